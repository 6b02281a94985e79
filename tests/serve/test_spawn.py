"""The engine's process starts before the HTTP side is imported, and never outlives it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from moeserve.engine.config import EngineConfig
from moeserve.engine.spawn import spawn_engine


def processes_with(mark: str) -> list[str]:
    """Ids of processes whose environment holds `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def test_a_server_that_gets_no_port_leaves_no_engine(tmp_path: Path) -> None:
    mark = f"MOESERVE_TEST_MARK={tmp_path}"
    name, _, value = mark.partition("=")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-P", "-m", "moeserve", "moeserve/minigsm-tiny"]
        done = subprocess.run(
            [*command, "--port", str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, name: value},
        )
    assert (done.returncode, "cannot listen" in done.stderr) == (1, True)
    assert processes_with(mark) == []


def test_an_abandoned_engine_ends() -> None:
    spawned = spawn_engine(EngineConfig(model="moeserve/minigsm-tiny"))
    assert spawned.process.poll() is None
    spawned.abandon()
    assert spawned.process.poll() is not None
    spawned.abandon()  # once is enough
