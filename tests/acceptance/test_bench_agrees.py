"""`moeserve bench serve` and vLLM's own client measure alike.

Against a server that answers by the clock both have to give the truth. Against the embedded model
they have to agree with each other, but for what is known to tell them apart: vLLM's client lets
aiohttp look for proxies (`trust_env`) before every request, half a millisecond of its own time
after the clock has started. Sixteen requests that leave together wait for each other's look-ups,
and the server gets them 7 ms late instead of 1. A third column is the same client without that.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paced_server import PacedServer, Schedule, paced_server
from served_model import served_model

from moeserve.tiny import MODEL_NAME, model_dir

CLIENTS = ("ours", "vllm", "vllm without proxies")
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
WITHOUT_PROXIES = """
import aiohttp
start = aiohttp.ClientSession.__init__
def quick(self, *args, **kwargs):
    start(self, *args, **{**kwargs, "trust_env": False})
aiohttp.ClientSession.__init__ = quick
from vllm.entrypoints.cli.main import main
main()
"""
KEYS = {
    "requests/s": "request_throughput",
    "output tok/s": "output_throughput",
    "mean TTFT, ms": "mean_ttft_ms",
    "median TTFT, ms": "median_ttft_ms",
    "mean TPOT, ms": "mean_tpot_ms",
    "mean ITL, ms": "mean_itl_ms",
    "mean E2EL, ms": "mean_e2el_ms",
}

SERVER_MEANS = {
    "mean_ttft_ms": "time_to_first_token",
    "mean_tpot_ms": "time_per_output_token",
    "mean_e2el_ms": "e2e_request_latency",
}
# Shares of the truth. Measured over six runs with a load of up to 3.7: mean TTFT 1 to 3 % above it
# (vLLM with 16 open up to 9 %, which is its look-ups), TPOT and ITL within 0.6 %, E2EL 0.3 to 1.2 %
# (vLLM to 3 %), requests a second 0.5 to 1.7 % below (vLLM to 3.3 %). Three times the room for vLLM
# with its look-ups, whose single runs of 16 open were up to 15 % late.
PACED_ROOM = {
    "request_throughput": 0.04,
    "output_throughput": 0.04,
    "mean_ttft_ms": 0.05,
    "mean_tpot_ms": 0.02,
    "mean_itl_ms": 0.02,
    "mean_e2el_ms": 0.03,
}
# How far two clients may be apart, each taken against what the server saw of the same requests, so
# that other work on the machine cancels. Measured on two cores with a load of 3: TTFT over the
# server's own is 2.0 ms (ours) and 1.9 (vLLM without proxies; 2.8 with) with one request open, 9.5
# and 9.5 (12.8) with 16; TPOT is the server's within 0.002 and 0.011 ms, E2EL follows TTFT.
ROOM_MS = {
    ("mean_ttft_ms", 1): 1.0,
    ("mean_ttft_ms", 16): 3.0,
    ("mean_tpot_ms", 1): 0.03,
    ("mean_tpot_ms", 16): 0.1,
    ("mean_e2el_ms", 1): 1.0,
    ("mean_e2el_ms", 16): 3.0,
}

pytestmark = pytest.mark.slow
Result = dict[str, float]


@dataclass(frozen=True)
class Load:
    """What a client is to send, and where."""

    url: str
    model: str
    num_prompts: int
    num_output: int
    concurrency: int


def measure(client: str, load: Load, folder: Path, seed: int) -> Result:
    """Run a client to its end; return the figures it saved."""
    name = f"{client.replace(' ', '-')}-{load.concurrency}-{seed}.json"
    if client == "ours":
        command = [sys.executable, "-P", "-m", "moeserve", "bench", "serve"]
    else:
        vllm = shutil.which("vllm")
        if vllm is None:
            pytest.skip("no vllm on the PATH")
        python = str(Path(vllm).with_name("python"))
        start = [vllm] if client == "vllm" else [python, "-c", WITHOUT_PROXIES]
        command = [*start, "bench", "serve"]
    options = {
        "backend": "openai", "base-url": load.url, "model": load.model, "tokenizer": model_dir(),
        "dataset-name": "random", "random-input-len": 64, "random-output-len": load.num_output,
        "num-prompts": load.num_prompts, "max-concurrency": load.concurrency, "temperature": 0,
        # No client finds the prompts of another in the cache.
        "seed": 100 * CLIENTS.index(client) + seed,
        "percentile-metrics": "ttft,tpot,itl,e2el", "result-dir": folder, "result-filename": name,
    }  # fmt: skip
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    if client != "ours":
        command += ["--ready-check-timeout-sec", "0"]  # its request would count with the others
    before = server_means(load)
    done = subprocess.run(
        [*command, "--ignore-eos", "--save-result"], capture_output=True, text=True, timeout=600,
        env={**os.environ, **OFFLINE}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: Result = json.loads((folder / name).read_text())
    assert (result["completed"], result["failed"]) == (load.num_prompts, 0)
    for key, (total, count) in server_means(load).items():
        result[f"own_{key}"] = 1e3 * (total - before[key][0]) / (count - before[key][1])
    return result


def server_means(load: Load) -> dict[str, tuple[float, float]]:
    """Sum in seconds and count of what the embedded model's server observed of itself so far."""
    if load.model != MODEL_NAME:
        return {}
    with urllib.request.urlopen(f"{load.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()

    def value(start: str) -> float:
        return sum(float(line.split()[-1]) for line in lines if line.startswith(start))

    return {
        key: (value(f"vllm:{name}_seconds_sum"), value(f"vllm:{name}_seconds_count"))
        for key, name in SERVER_MEANS.items()
    }


def rounds(load: Load, folder: Path, num_rounds: int) -> Iterator[tuple[str, Result]]:
    """Run every client in every round, in another order each."""
    for number in range(num_rounds):
        turn = number % len(CLIENTS)
        for client in CLIENTS[turn:] + CLIENTS[:turn]:
            yield client, measure(client, load, folder, number)


def values(runs: list[tuple[str, Result]], client: str, key: str) -> list[float]:
    """One figure of one client, round by round."""
    return [result[key] for name, result in runs if name == client]


def table(title: str, runs: list[tuple[str, Result]], truth: Result) -> dict[str, Result]:
    """Print median (least–most) of each figure for each client; return the medians."""
    print(f"\n| {title} | {' | '.join([*CLIENTS, 'truth'] if truth else CLIENTS)} |")
    print("|---" * (len(CLIENTS) + 1 + bool(truth)) + "|")
    medians: dict[str, Result] = {client: {} for client in CLIENTS}
    for label, key in KEYS.items():
        cells = []
        for client in CLIENTS:
            own = values(runs, client, key)
            medians[client][key] = statistics.median(own)
            cells.append(f"{medians[client][key]:.2f} ({min(own):.2f}–{max(own):.2f})")
        if truth:
            cells.append(f"{truth[key]:.2f}" if key in truth else "–")
        print(f"| {label} | {' | '.join(cells)} |")
    return medians


@pytest.mark.parametrize(("tokens_per_chunk", "concurrency"), [(1, 1), (1, 16), (4, 16)])
def test_both_clients_give_the_latencies_of_a_server_that_keeps_to_a_clock(
    tmp_path: Path, tokens_per_chunk: int, concurrency: int
) -> None:
    schedule = Schedule(num_chunks=20, tokens_per_chunk=tokens_per_chunk)
    with paced_server(schedule) as server:
        num_tokens = schedule.num_chunks * tokens_per_chunk
        load = Load(server.url, "paced", 8 * concurrency, num_tokens, concurrency)
        runs = list(rounds(load, tmp_path, 2))
        truth = truth_of(server, load)
    medians = table(f"{tokens_per_chunk} tokens a chunk, {concurrency} open", runs, truth)
    wrong = [
        f"{client}, {key}: {medians[client][key]:.2f}, the truth is {truth[key]:.2f}"
        for client in CLIENTS
        for key, room in PACED_ROOM.items()
        if abs(medians[client][key] / truth[key] - 1) > room * (3 if client == "vllm" else 1)
    ]
    assert not wrong


def truth_of(server: PacedServer, load: Load) -> Result:
    """What the server did, over all runs; throughput is that of its schedule."""
    sent, schedule = server.sent(), server.schedule
    rate = load.concurrency / schedule.e2el_s
    return {
        "request_throughput": rate,
        "output_throughput": rate * load.num_output,
        "mean_ttft_ms": 1e3 * statistics.fmean(one.ttft_s for one in sent),
        "median_ttft_ms": 1e3 * statistics.median(one.ttft_s for one in sent),
        "mean_tpot_ms": 1e3 * schedule.tpot_s,
        "mean_itl_ms": 1e3 * schedule.itl_s,
        "mean_e2el_ms": 1e3 * statistics.fmean(one.e2el_s for one in sent),
    }


@pytest.mark.parametrize(("concurrency", "num_prompts"), [(1, 64), (16, 256)])
def test_both_clients_measure_the_same_server_alike(
    tmp_path: Path, concurrency: int, num_prompts: int
) -> None:
    # vLLM's random prompts are runs of consecutive ids: of a small vocabulary there are few, and
    # with the cache on it would measure a server that has seen most of them.
    with served_model(tmp_path, "--no-enable-prefix-caching") as url:
        load = Load(url, MODEL_NAME, num_prompts, 64, concurrency)
        measure("ours", load, tmp_path, 99)  # the first run meets everything for the first time
        runs = list(rounds(load, tmp_path, 4))
    table(f"embedded model, {concurrency} open", runs, {})
    wrong = []
    for key in SERVER_MEANS:
        over = {client: over_server(runs, client, key) for client in CLIENTS}
        print(f"{key}, over the server's own: {over}")
        room = ROOM_MS[key, concurrency]
        apart = abs(over["ours"] - over["vllm without proxies"])
        if apart > room:
            wrong.append(f"{key}: {over}, ours and vllm without proxies are {apart:.3f} ms apart")
        if key == "mean_tpot_ms":
            wrong += [f"{key}: {over}" for value in over.values() if abs(value) > room]
    assert not wrong


def over_server(runs: list[tuple[str, Result]], client: str, key: str) -> float:
    """Median over the rounds of what a client saw less what the server saw of the same requests."""
    pairs = zip(values(runs, client, key), values(runs, client, f"own_{key}"), strict=True)
    return statistics.median(seen - own for seen, own in pairs)
