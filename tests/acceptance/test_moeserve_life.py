"""The bundled server under the suite: killed at a third of the questions, front or engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_helpers import REPOSITORY, is_alive, wait_until

from evalsuite.supervisor import descendants

pytest.importorskip("torch", reason="the bundled server needs torch")
NUM_QUESTIONS = 330


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["front", "deepest"])
def test_killed_at_a_third(tmp_path: Path, victim: str) -> None:
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "evalsuite.cli", "run"),
            *("--config", f"{REPOSITORY}/configs/moe-refactor/MiniGSM-tiny-cpu.yaml"),
            *("--results", str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def num_answered() -> int:
        return sum(len(p.read_bytes().splitlines()) - 1 for p in tmp_path.rglob("ledger.jsonl"))

    try:
        wait_until(lambda: num_answered() >= NUM_QUESTIONS // 3, 120.0)
        tree = sorted(descendants(run.pid))
        servers = [pid for pid in tree if "moeserve" in command_of(pid)]
        assert servers
        target = servers[0] if victim == "front" else servers[-1]
        subprocess.run(["kill", "-9", str(target)], check=True)
        began = time.monotonic()
        output, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    assert time.monotonic() - began < 10
    assert run.returncode == 75, output
    assert not [pid for pid in tree if is_alive(pid)]
    (results,) = tmp_path.glob("*/results.json")
    (verdict,) = json.loads(results.read_text())["verdicts"]
    assert verdict["status"] == "ERROR"
    assert verdict["accuracy"] is None
