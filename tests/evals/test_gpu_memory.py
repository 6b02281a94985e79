"""Waiting for GPU memory, against a scripted `nvidia-smi`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from evalsuite.engines.base import LaunchSpec
from evalsuite.errors import ServerError
from evalsuite.gpu_memory import GpuMemory, used_mib
from evalsuite.server import StartSettings, start


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that holds the MiB in use of the one GPU there is."""
    figure = tmp_path / "used"
    figure.write_text("100")
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"  *uuid,memory.used) echo \"GPU-a, $(cat '{figure}')\";;\n"
        "  *index,uuid) echo '3, GPU-a';;\n"
        "  *compute-apps*) echo 'GPU-a, 4711';;\n"
        "esac\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return figure


def test_free_memory_is_not_waited_for(used: Path) -> None:
    assert used_mib() == {"GPU-a": 100}
    memory = GpuMemory()
    used.write_text("400")  # within what a driver keeps
    began = time.monotonic()
    assert memory.wait_free() == ""
    assert time.monotonic() - began < 1.0


def test_held_memory_is_named_with_gpu_and_pid(used: Path) -> None:
    memory = GpuMemory(wait_s=0.2)
    used.write_text("9000")
    assert memory.wait_free() == "GPU 3 still holds 9000 MiB (pid 4711)"


def test_a_wait_for_memory_is_said(used: Path) -> None:
    memory = GpuMemory(wait_s=5.0)
    used.write_text("9000")
    heard: list[tuple[float, str]] = []

    def freed_after_the_second(waited_s: float, seen: str) -> None:
        heard.append((waited_s, seen))
        if len(heard) == 2:
            used.write_text("100")

    assert memory.wait_free(freed_after_the_second) == ""
    assert [seen for _, seen in heard] == ["GPU 3 still holds 9000 MiB (pid 4711)"] * 2
    assert heard[0][0] < heard[1][0]


def test_no_server_is_started_into_held_memory(used: Path, tmp_path: Path) -> None:
    memory = GpuMemory(wait_s=0.2)
    used.write_text("9000")
    spec = LaunchSpec((sys.executable, "-c", "raise SystemExit(7)"), served_model="x")
    with pytest.raises(ServerError, match=r"start: GPU 3 still holds 9000 MiB") as caught:
        start(spec, StartSettings(tmp_path / "log", 5.0, {}, memory=memory))
    assert caught.value.exit_code is None
    assert not (tmp_path / "log").exists()


def test_without_the_tool_there_is_nothing_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert GpuMemory().wait_free() == ""
