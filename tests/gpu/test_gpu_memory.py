"""Memory of dead servers on a real GPU: what is waited for, and what is said when it stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evalsuite.gpu_memory import GpuMemory, used_mib

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not used_mib(), reason="nvidia-smi names no GPU here"),
]

HOLDER = (
    "import sys, torch; x = torch.empty(3 << 30, dtype=torch.uint8, device='cuda');"
    "torch.cuda.synchronize(); print('held', flush=True); sys.stdin.read()"
)


def test_memory_is_waited_for_and_its_holder_is_named() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    memory = GpuMemory(wait_s=1.0)
    assert memory.wait_free() == ""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        held = memory.wait_free()
        assert held.startswith("GPU 0 still holds ")
        assert int(held.split()[4]) > 3 * 1024
    finally:
        holder.kill()
        holder.wait()
    assert GpuMemory(memory.before_mib, wait_s=20.0).wait_free() == ""
