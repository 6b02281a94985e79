"""Floods of hostile requests at the real engine: no 5xx, no hang, bounded memory, others served.

Two generators: schemathesis, which follows the server's OpenAPI document, and this project's own,
which also sends valid requests that ask for as much as they may. A normal client with a key of its
own has to keep half of its rate beside either.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from flood import FloodProgram, NormalClient, median_ratio, normal_client, resident_mib
from served_model import served_model

NUM_HOSTILE = 5000
WINDOW_S, FLOOD_WINDOW_S = 4.0, 8.0
LIMIT_S = 1500.0
# What a flood may add to the server's memory once the KV cache (256 MiB here) has been touched:
# bodies that are held, and what the allocator keeps of replies.
MOST_GROWTH_MIB = 512.0
KEYS = ("--api-key", "normal", "--api-key", "hostile", "--kv-cache-memory-bytes", "268435456")
MAX_EXAMPLES = 30

pytestmark = pytest.mark.slow


def check_client(client: NormalClient) -> None:
    assert not client.faults
    assert len(client.texts) == 1
    assert client.slowest_s < 5.0


def check_health(url: str) -> None:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
        assert reply.status == 200


def test_five_thousand_hostile_requests(tmp_path: Path) -> None:
    with served_model(tmp_path, *KEYS) as url, normal_client(url, "normal") as client:
        flood = FloodProgram(url, "hostile", 1, num_workers=4)
        try:
            client.rate_over(WINDOW_S)
            without: list[float] = []
            beside: list[float] = []
            memory: list[float] = []
            end = time.monotonic() + LIMIT_S
            while flood.num_sent < NUM_HOSTILE:
                assert time.monotonic() < end, f"{flood.num_sent} of {NUM_HOSTILE} were answered"
                without.append(client.rate_over(WINDOW_S))
                flood.go()
                beside.append(client.rate_over(FLOOD_WINDOW_S))
                flood.stop()
                rates = f"{without[-1]:.1f}/s alone, {beside[-1]:.1f}/s beside"
                print(f"{flood.num_sent} sent: {rates}", flush=True)
                memory.append(resident_mib(tmp_path))
        finally:
            flood.end()
        check_health(url)
    ratio = median_ratio(beside, without)
    grown = f"{memory[0]:.0f} to {max(memory):.0f} MiB"
    print(f"{dict(flood.statuses)}, ratio {ratio:.2f}, {grown}, slowest {client.slowest_s:.2f} s")
    assert not flood.faults
    # The flood must be one: refused, answered, and heavy enough to be left.
    assert flood.statuses["400"] > NUM_HOSTILE // 3
    assert flood.statuses["200"] > NUM_HOSTILE // 20
    assert flood.statuses["0"] > 20
    check_client(client)
    assert max(memory) - memory[0] < MOST_GROWTH_MIB
    assert ratio >= 0.5


def test_schemathesis(tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("no schemathesis on the PATH")
    command = [program, "run", "--checks", "not_a_server_error", "--request-timeout", "60",
               "--max-examples", str(MAX_EXAMPLES), "--suppress-health-check", "all",
               "--generation-database", "none", "--header",
               "Authorization: Bearer hostile"]  # fmt: skip
    with served_model(tmp_path, *KEYS) as url, normal_client(url, "normal") as client:
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
    print(f"{len(beside)} s of schemathesis: ratio {ratio:.2f}, memory +{grown:.0f} MiB\n{output}")
    assert running.returncode == 0, output
    check_client(client)
    assert len(beside) >= 5
    assert grown < MOST_GROWTH_MIB
    assert ratio >= 0.5
