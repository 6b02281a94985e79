"""`moeserve bench serve` and vLLM's own client agree on the same server, within noise."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from served_model import served_model

from moeserve.tiny import MODEL_NAME, model_dir

ROUNDS = 3
NUM_PROMPTS, NUM_INPUT, NUM_OUTPUT, CONCURRENCY = 128, 64, 64, 16
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
# (title, key in both results, least ratio, most). The clients share two cores with the server, and
# theirs takes more of them for a token than ours: what it measures is slower by that much.
FIGURES = (
    ("requests/s", "request_throughput", 0.8, 1.5),
    ("output tok/s", "output_throughput", 0.8, 1.5),
    ("mean TTFT, ms", "mean_ttft_ms", 0.5, 1.5),
    ("mean TPOT, ms", "mean_tpot_ms", 0.6, 1.25),
)

pytestmark = pytest.mark.slow


def ours(url: str, folder: Path, number: int) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "moeserve", "bench", "serve", "--base-url", url]
    command += ["--model", MODEL_NAME, "--dataset", "random", "--input-len", str(NUM_INPUT)]
    command += ["--output-len", str(NUM_OUTPUT), "--num-prompts", str(NUM_PROMPTS)]
    command += ["--max-concurrency", str(CONCURRENCY), "--seed", str(number), "--ignore-eos"]
    command += ["--tokenizer", str(model_dir()), "--save-result", "--result-dir", str(folder)]
    return run(command, folder, f"ours-{number}.json")


def theirs(vllm: str, url: str, folder: Path, number: int) -> dict[str, float]:
    command = [vllm, "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--model", MODEL_NAME, "--tokenizer", str(model_dir()), "--dataset-name", "random"]
    command += ["--random-input-len", str(NUM_INPUT), "--random-output-len", str(NUM_OUTPUT)]
    command += ["--num-prompts", str(NUM_PROMPTS), "--max-concurrency", str(CONCURRENCY)]
    command += ["--seed", str(100 + number), "--ignore-eos", "--temperature", "0"]
    command += ["--save-result", "--result-dir", str(folder)]
    return run(command, folder, f"theirs-{number}.json")


def run(command: list[str], folder: Path, name: str) -> dict[str, float]:
    done = subprocess.run(
        [*command, "--result-filename", name], capture_output=True, text=True, timeout=600,
        env={**os.environ, **OFFLINE}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, float] = json.loads((folder / name).read_text())
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert result["total_output_tokens"] == NUM_PROMPTS * NUM_OUTPUT
    return result


def test_both_clients_measure_the_same_server_alike(tmp_path: Path) -> None:
    vllm = shutil.which("vllm")
    if vllm is None:
        pytest.skip("no vllm on the PATH")
    with served_model(tmp_path) as url:
        ours(url, tmp_path, 99)  # the first run touches the cache's pages
        pairs = [(ours(url, tmp_path, i), theirs(vllm, url, tmp_path, i)) for i in range(ROUNDS)]
    print("\n| | moeserve bench serve | vllm bench serve | ratio |\n|---|---|---|---|")
    wrong = []
    for title, key, least, most in FIGURES:
        mine = statistics.median(pair[0][key] for pair in pairs)
        other = statistics.median(pair[1][key] for pair in pairs)
        print(f"| {title} | {mine:.2f} | {other:.2f} | {mine / other:.2f} |")
        if not least <= mine / other <= most:
            wrong.append(f"{title}: {mine:.2f} and {other:.2f}, want a ratio {least} to {most}")
    assert not wrong
