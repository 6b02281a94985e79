"""What /proc says of a process tree: work done so far, and who listens on a port.

Receives pids and ports, returns numbers; every function answers "unknown" (zeros, None) where
there is no /proc. Ending trees is `supervisor.py`; deciding on readiness is `server.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from evalsuite.supervisor import descendants

_LISTEN = "0A"  # state column of /proc/net/tcp


@dataclass(frozen=True)
class Work:
    """Work done by a tree so far; it grows while a server loads, and stands still in a hang.

    Attributes:
        cpu_s: User and system time of the living processes, seconds.
        read_bytes: Bytes read by system calls (page-cache hits included).
        log_bytes: Size of the log.
    """

    cpu_s: float = 0.0
    read_bytes: int = 0
    log_bytes: int = 0


def tree(root: int) -> set[int]:
    """`root` and its living descendants."""
    return {root, *descendants(root)}


def is_running(pid: int) -> bool:
    """Whether a process lives and is no zombie; True where there is no /proc to say otherwise."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def work_of(pids: set[int], log: Path) -> Work:
    """Sum CPU time and reads over `pids`; a process that ended meanwhile counts nothing."""
    cpu_ticks = 0
    read_bytes = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
            cpu_ticks += sum(int(x) for x in fields.split()[11:13])
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith("rchar:"):
                    read_bytes += int(line.split()[1])
        except (OSError, ValueError, IndexError):
            continue
    try:
        log_bytes = log.stat().st_size
    except OSError:
        log_bytes = 0
    return Work(cpu_ticks / os.sysconf("SC_CLK_TCK"), read_bytes, log_bytes)


def listening_inodes(port: int) -> set[str]:
    """Socket inodes that listen on `port` on any local address, empty if none or unknown."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def owners(inodes: set[str], pids: set[int]) -> set[int]:
    """Those of `pids` that hold a socket of `inodes` open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    holders: set[int] = set()
    for pid in pids:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if descriptor.is_symlink() and str(descriptor.readlink()) in wanted:
                    holders.add(pid)
                    break
        except OSError:
            continue  # ended, or another user's
    return holders


def port_owner(port: int, pids: set[int]) -> bool | None:
    """Whether one of `pids` listens on `port`; None where nobody does or /proc cannot tell."""
    inodes = listening_inodes(port)
    return bool(owners(inodes, pids)) if inodes else None
