"""Floods of hostile requests at the real engine: no 5xx, no hang, bounded memory, others served.

Two generators: schemathesis, which follows the server's OpenAPI document, and this project's own,
which also sends valid requests that ask for as much as they may. A normal client has to keep half
of its rate beside either, with a key of its own and as one more connection of the same address.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flood import FloodProgram, NormalClient, median_ratio, normal_client, resident_mib
from served_model import served_model

NUM_HOSTILE = 5000
NUM_SAME_ADDRESS = 2500
WINDOW_S, FLOOD_WINDOW_S = 4.0, 8.0
LIMIT_S = 1500.0
# What a flood may add to the server's memory once the KV cache (256 MiB here) has been touched:
# bodies that are held, and what the allocator keeps of replies.
MOST_GROWTH_MIB = 512.0
CACHE = ("--kv-cache-memory-bytes", "268435456")
KEYS = ("--api-key", "normal", "--api-key", "hostile")
MAX_EXAMPLES = 15
# A chat without max_tokens goes on until the context is full: seconds each, of some hundred.
SHORT_CONTEXT = ("--max-model-len", "512")

pytestmark = pytest.mark.slow


def check_client(client: NormalClient) -> None:
    assert not client.faults
    assert len(client.texts) == 1
    assert client.slowest_s < 5.0


def check_health(url: str) -> None:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
        assert reply.status == 200


@dataclass
class Outcome:
    """What a normal client and the server's memory did beside a flood."""

    client: NormalClient
    flood: FloodProgram
    without: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median_ratio(self.beside, self.without)


def run_flood(folder: Path, num_requests: int, *args: str) -> Outcome:
    """Alternate windows with and without the flood until it has sent so many."""
    with served_model(folder, *CACHE, *args) as url, normal_client(url, "normal") as client:
        outcome = Outcome(client, flood := FloodProgram(url, "hostile", 1, num_workers=4))
        try:
            client.rate_over(WINDOW_S)
            end = time.monotonic() + LIMIT_S
            while flood.num_sent < num_requests:
                assert time.monotonic() < end, f"{flood.num_sent} of {num_requests} were answered"
                outcome.without.append(client.rate_over(WINDOW_S))
                flood.go()
                outcome.beside.append(client.rate_over(FLOOD_WINDOW_S))
                flood.stop()
                rates = f"{outcome.without[-1]:.1f}/s alone, {outcome.beside[-1]:.1f}/s beside"
                print(f"{flood.num_sent} sent: {rates}", flush=True)
                outcome.memory.append(resident_mib(folder))
        finally:
            flood.end()
        check_health(url)
    alone, beside = (statistics.median(rates) for rates in (outcome.without, outcome.beside))
    grown = f"{outcome.memory[0]:.0f} to {max(outcome.memory):.0f} MiB"
    print(
        f"{dict(flood.statuses)}, {alone:.1f}/s alone, {beside:.1f}/s beside, "
        f"ratio {outcome.ratio:.2f}, {grown}, slowest {client.slowest_s:.2f} s"
    )
    assert not flood.faults
    # The flood must be one: refused, answered, and heavy enough to be left.
    assert flood.statuses["400"] > num_requests // 3
    assert flood.statuses["200"] > num_requests // 20
    assert flood.statuses["0"] > num_requests // 250
    check_client(client)
    return outcome


def test_five_thousand_hostile_requests(tmp_path: Path) -> None:
    outcome = run_flood(tmp_path, NUM_HOSTILE, *KEYS)
    assert max(outcome.memory) - outcome.memory[0] < MOST_GROWTH_MIB
    assert outcome.ratio >= 0.5


def test_hostile_connections_of_the_same_address(tmp_path: Path) -> None:
    assert run_flood(tmp_path, NUM_SAME_ADDRESS).ratio >= 0.5


def test_schemathesis(tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("no schemathesis on the PATH")
    command = [program, "run", "--checks", "not_a_server_error", "--request-timeout", "60",
               "--max-examples", str(MAX_EXAMPLES), "--suppress-health-check", "all",
               "--generation-database", "none", "--header",
               "Authorization: Bearer hostile"]  # fmt: skip
    args = (*CACHE, *KEYS, *SHORT_CONTEXT)
    with served_model(tmp_path, *args) as url, normal_client(url, "normal") as client:
        without = [client.rate_over(WINDOW_S) for _ in range(4)]
        before = resident_mib(tmp_path)
        beside: list[float] = []
        with (tmp_path / "schemathesis.log").open("w") as log:
            running = subprocess.Popen(
                ["nice", "-n", "19", *command, f"{url}/openapi.json"],
                stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path,
            )  # fmt: skip
            try:
                while running.poll() is None:
                    beside.append(client.rate_over(1.0))
                    assert len(beside) < 900
            finally:
                running.kill()
                running.wait()
        without += [client.rate_over(WINDOW_S) for _ in range(4)]
        grown = resident_mib(tmp_path) - before
        check_health(url)
    output = (tmp_path / "schemathesis.log").read_text()[-4000:]
    ratio = median_ratio(beside, without)
    rates = f"{statistics.median(without):.1f}/s alone, {statistics.median(beside):.1f}/s beside"
    print(
        f"{len(beside)} s of schemathesis: {rates}, ratio {ratio:.2f}, +{grown:.0f} MiB\n{output}"
    )
    assert running.returncode == 0, output
    check_client(client)
    assert len(beside) >= 5
    assert grown < MOST_GROWTH_MIB
    assert ratio >= 0.5
