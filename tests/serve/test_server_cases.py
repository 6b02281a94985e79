"""The whole server, engine included, on the embedded model: the cases that need real sampling."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from moeserve.tiny import MODEL_NAME

QUESTION = "Question: Tom has 3 apples and buys 4 more. How many apples are there?\nAnswer:"


@contextmanager
def server(folder: Path, *options: str) -> Iterator[str]:
    port_file, log = folder / "port.json", folder / "server.log"
    argv = [sys.executable, "-m", "moeserve", MODEL_NAME, "--port", "0"]
    argv += ["--port-file", str(port_file), "--num-threads", "1", *options]
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + 90
        url = ""
        while not url or httpx.get(f"{url}/health", timeout=30).status_code != 200:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.05)
            if port_file.exists():
                url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server(tmp_path_factory.mktemp("real"), "--max-model-len", "512") as base:
        yield base


def post(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def text(url: str, **body: object) -> str:
    reply = post(url, **body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def streamed(url: str, **body: object) -> str:
    reply = post(url, stream=True, **body)
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def test_batched_choices_come_in_prompt_order_and_equal_single_ones(url: str) -> None:
    prompts = [QUESTION * 3, "Question:", "12 + 13 ="]
    together = post(url, prompt=prompts, max_tokens=12, temperature=0).json()["choices"]
    assert [choice["index"] for choice in together] == [0, 1, 2]
    alone = [text(url, prompt=prompt, max_tokens=12, temperature=0) for prompt in prompts]
    assert [choice["text"] for choice in together] == alone


def test_streams_join_to_the_plain_answer_with_and_without_a_stop(url: str) -> None:
    body = {"prompt": QUESTION, "max_tokens": 60, "temperature": 0}
    plain = text(url, **body)
    assert streamed(url, **body) == plain
    stop = plain[10:14]
    cut = plain[: plain.find(stop)]
    assert text(url, stop=stop, **body) == streamed(url, stop=stop, **body) == cut


def test_a_seed_holds_in_any_batch(url: str) -> None:
    seeded = {"prompt": QUESTION, "temperature": 0.8, "max_tokens": 16, "seed": 42}
    free = {"prompt": QUESTION, "temperature": 0.8, "max_tokens": 16}
    firsts, others = set(), set()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            one, other = pool.submit(text, url, **seeded), pool.submit(text, url, **free)
            firsts.add(one.result())
            others.add(other.result())
        one = pool.submit(text, url, **seeded)
        other = pool.submit(text, url, **{**free, "seed": 7})
        firsts.add(one.result())
        other.result()
        copies = [pool.submit(text, url, **seeded) for _ in range(2)]
        firsts.update(copy.result() for copy in copies)
    firsts.add(text(url, **seeded))
    assert len(firsts) == 1
    assert len(others) > 1


def test_choices_of_a_seeded_request_differ_and_repeat(url: str) -> None:
    body = {"prompt": QUESTION, "temperature": 1.0, "max_tokens": 16, "n": 4, "seed": 5}
    first = [choice["text"] for choice in post(url, **body).json()["choices"]]
    again = [choice["text"] for choice in post(url, **body).json()["choices"]]
    assert first == again
    assert len(set(first)) > 1


def test_scoring_a_text_gives_what_generating_it_gave(url: str) -> None:
    made = post(url, prompt=QUESTION, max_tokens=20, temperature=0, logprobs=1).json()["choices"][0]
    whole = QUESTION + made["text"]
    scored = post(url, prompt=whole, max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
    assert scored["text"] == whole
    num_made = len(made["logprobs"]["tokens"])
    tail = scored["logprobs"]["token_logprobs"][-num_made:]
    assert tail == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)
    assert scored["logprobs"]["token_logprobs"][0] is None


def test_a_client_that_goes_away_frees_its_place_and_pages(url: str) -> None:
    body = {"prompt": QUESTION, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        parts = reply.iter_raw()  # kept: dropping it would close the connection
        next(parts)
        assert gauge(url, "vllm:num_requests_running") > 0
    end = time.monotonic() + 10
    while gauge(url, "vllm:num_requests_running") or gauge(url, "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert gauge(url, "moeserve:client_disconnects_total") >= 1


def test_context_of_16_tokens(tmp_path: Path) -> None:
    with server(tmp_path, "--max-model-len", "16") as url:
        ids = list(range(300, 317))
        assert post(url, prompt=ids[:15], max_tokens=1).status_code == 200
        for length, wanted in ((16, 1), (17, 1), (10, 7)):
            reply = post(url, prompt=ids[:length], max_tokens=wanted)
            assert reply.status_code == 400
            assert "16 tokens" in reply.json()["error"]["message"]
            assert post(url, prompt=ids[:3], max_tokens=1).status_code == 200
        used = post(url, prompt=ids[:10], ignore_eos=True).json()["usage"]
        assert used["completion_tokens"] == 6
        models = httpx.get(f"{url}/v1/models").json()
        assert models["data"][0]["max_model_len"] == 16
