"""Serving on a GPU through HTTP: the embedded model's verdicts under each backend, and its bits."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from run_helpers import REPOSITORY
from served_model import served_model

torch = pytest.importorskip("torch", reason="the bundled server needs torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SUITE = REPOSITORY / "configs" / "embedded-gpu"
LIST = SUITE / "config-h200-embedded.txt"
SMALL = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "1073741824", "--device", "cuda")
# 1,246 of 1,319 on a CPU in bf16. The answers of one model, so a run differs from another by the
# questions near a tie: three standard errors of ten flips are ten questions.
CPU_RIGHT, MOST_FLIPS = 1246, 15


def jobs() -> list[str]:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [line.removesuffix(".yaml") for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.parametrize("job", jobs())
def test_the_embedded_model_is_as_accurate_as_on_a_cpu(job: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evalsuite.cli", "run", "--configs-root", "configs"]
    command += ["--config", LIST.name, job, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if done.returncode == 5:
        pytest.skip(f"this machine is not of the list's pool: {done.stdout[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.iterdir()
    (verdict,) = json.loads((run / "results.json").read_text())["verdicts"]
    asked = verdict["evidence"]["declared"]
    assert (verdict["status"], verdict["evidence"]["executed"]) == ("PASS", asked)
    assert abs(round(verdict["accuracy"] * 1319) - CPU_RIGHT) <= MOST_FLIPS


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "torch_grouped_mm"])
def test_deterministic_mode_is_refused_where_the_kernel_cannot_promise_it(backend: str) -> None:
    command = [sys.executable, "-P", "-m", "moeserve", "moeserve/minigsm-tiny", "--port", "0"]
    command += [*SMALL, "--deterministic", "--moe-backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "does not support batch invariance (deterministic mode)" in done.stderr


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("exact")
    with served_model(folder, *SMALL, "--deterministic", "--dtype", "bfloat16") as url:
        yield url


def ask(url: str, number: int, *, is_streamed: bool = False) -> tuple[str, list[float]]:
    """One greedy reply with the log-probabilities of its tokens."""
    shared = [7 + i % 900 for i in range(300)] if number % 2 else []
    own = random.Random(number).choices(range(2, 1000), k=5 + 13 * number % 90)
    body: dict[str, Any] = {
        "prompt": shared + own, "max_tokens": 40, "temperature": 0, "logprobs": 0,
        "ignore_eos": True, "stream": is_streamed,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        raw = response.read().decode()
    if not is_streamed:
        choices = [json.loads(raw)["choices"][0]]
    else:
        events = [line[6:] for line in raw.split("\n\n") if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
    logprobs = [x for c in choices if c["logprobs"] for x in c["logprobs"]["token_logprobs"]]
    assert len(logprobs) == 40
    return "".join(choice["text"] for choice in choices), logprobs


def test_a_deterministic_reply_is_the_same_alone_and_in_any_company(exact: str) -> None:
    numbers = list(range(32))
    alone = {number: ask(exact, number) for number in numbers}
    orders = [numbers, random.Random(1).sample([*numbers, *range(100, 140)], 72)]
    with ThreadPoolExecutor(72) as pool:
        for order in orders:
            replies = list(pool.map(lambda n: ask(exact, n, is_streamed=n % 3 == 0), order))
            found = {n: reply for n, reply in zip(order, replies, strict=True) if n in alone}
            assert found == alone
