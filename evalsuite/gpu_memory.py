"""Waits until the memory of dead servers is free again, so that job 2 does not run out of it.

Asks `nvidia-smi`; where there is none (CPU, other vendors) there is nothing to wait for.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# What a driver keeps after the last process of a GPU has gone varies by this much.
_SLACK_MIB = 512
_WAIT_S = 60.0


def _query(what: str, fields: str) -> list[list[str]]:
    """Rows of an nvidia-smi query, [] where it is absent or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]


def used_mib() -> dict[str, int]:
    """GPU uuid -> memory in use, MiB."""
    rows = _query("gpu", "uuid,memory.used")
    return {uuid: int(used) for uuid, used in rows if used.isdigit()}


@dataclass
class GpuMemory:
    """Memory in use before the first server of a run; later servers start from there.

    Attributes:
        before_mib: GPU uuid -> MiB in use when the run began.
        wait_s: How long to wait for it to come back.
    """

    before_mib: dict[str, int] = field(default_factory=used_mib)
    wait_s: float = _WAIT_S

    def wait_free(self, on_wait: Callable[[float, str], None] | None = None) -> str:
        """Wait for the memory.

        Args:
            on_wait: Called before each pause with (seconds waited, who holds how much).

        Returns:
            "" when the memory is free, else which GPU still holds how much, and who.
        """
        began = time.monotonic()
        while self.before_mib:
            held = [
                (uuid, used)
                for uuid, used in used_mib().items()
                if used > self.before_mib.get(uuid, used) + _SLACK_MIB
            ]
            if not held:
                return ""
            waited_s = time.monotonic() - began
            holders = "; ".join(_describe(uuid, used) for uuid, used in held)
            if waited_s >= self.wait_s:
                return holders
            if on_wait is not None:
                on_wait(waited_s, holders)
            time.sleep(0.5)
        return ""


def _describe(uuid: str, used: int) -> str:
    index = next((i for i, u in _query("gpu", "index,uuid") if u == uuid), uuid)
    pids = [pid for u, pid in _query("compute-apps", "gpu_uuid,pid") if u == uuid]
    return f"GPU {index} still holds {used} MiB (pid {', '.join(pids) or 'unknown'})"
