"""Keeps one server's process tree on a leash; run as its own small process.

Receives one JSON line on stdin (argv, environment, log file), starts the server in its own
session with its output appended to the file, and then watches that pipe: a "stop" line or the
end of the pipe (the suite died, by whatever signal) ends the whole tree. Writes one JSON line
per event to stdout: started, failed, exit, gone. What the events mean is `server.py`'s business.

Only the standard library, so that `python -I -S` starts it in a few milliseconds. As a
subreaper it inherits descendants whose parents died, whatever session they moved to; a marker
variable in their environment finds them where there is no subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARKER = "EVALSUITE_SERVER_ID"
POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def parents() -> dict[int, int]:
    """Pid -> parent pid of every process of this machine that is not a zombie."""
    table: dict[int, int] = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold blanks and brackets; fields start after the last ")".
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            state, parent = fields[:2]
        except (OSError, ValueError):
            continue  # ended while we looked
        if state not in "ZX":
            table[int(entry.name)] = int(parent)
    return table


def descendants(root: int) -> set[int]:
    """Living descendants of `root`, without `root` itself."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        for pid in children.get(queue.pop(), []):
            if pid not in found:
                found.add(pid)
                queue.append(pid)
    return found


def marked(marker: str) -> set[int]:
    """Living processes that carry `marker` in their environment, this one excepted."""
    needle = f"{MARKER}={marker}".encode()
    found: set[int] = set()
    for pid in parents():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue  # ended, or another user's
        if needle in environ.split(b"\0"):
            found.add(pid)
    return found - {os.getpid()}


def end_tree(root: int, marker: str, grace_s: float, *, is_reaper: bool = False) -> set[int]:
    """TERM, then KILL after `grace_s`, every descendant of `root` and every marked process.

    Args:
        root: Process whose descendants end, itself spared; 0 for marked processes alone.
        marker: Value of the marker variable.
        grace_s: Seconds between TERM and KILL.
        is_reaper: Collect this process's ended children; only for one that owns them all.

    Returns:
        Processes that survived even KILL for five seconds (none, save in uninterruptible sleep).
    """
    told: set[int] = set()
    kill_at = time.monotonic() + grace_s
    while True:
        if is_reaper:
            reap()
        alive = (descendants(root) if root else set()) | marked(marker)
        alive -= {os.getpid()}
        now = time.monotonic()
        if not alive or now > kill_at + 5:
            return alive
        number = signal.SIGKILL if now >= kill_at else signal.SIGTERM
        for pid in alive if number == signal.SIGKILL else alive - told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
            told.add(pid)
        time.sleep(0.02)


def reap() -> dict[int, int]:
    """Collect ended children (and adopted ones): pid -> exit code, negative for a signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def cap_log(path: Path, limit_bytes: int) -> None:
    """Keep a log within `limit_bytes`: the first and the last eighth stay, with a note between.

    The server appends (O_APPEND), so it goes on at the new end; lines written during the cut
    may be lost.
    """
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if size <= limit_bytes:
            return
        keep = limit_bytes // 8
        with path.open("r+b") as file:
            file.seek(size - keep)
            tail = file.read()
            file.truncate(keep)
        note = f"\n[evalsuite: {size - 2 * keep} bytes of log dropped here]\n".encode()
        with path.open("ab") as file:
            file.write(note + tail)


def _say(event: str, **fields: Any) -> None:
    """One event line to the suite; a suite that is gone reads nothing."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def _prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere nothing happens and the marker has to do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(launch: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the server: own session, no stdin, output appended to the log file."""
    with Path(launch["log"]).open("ab") as log:
        return subprocess.Popen(
            launch["argv"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=launch["env"],
            cwd=launch["cwd"] or None,
            start_new_session=True,
            # If this supervisor itself is killed, its server must not outlive it.
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def _read_launch() -> dict[str, Any]:
    """First line of stdin, read byte-wise so that no later command is swallowed."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            sys.exit(0)
        line += chunk
    launch: dict[str, Any] = json.loads(line)
    return launch


def main() -> None:
    """Start the server, wait for its end or the suite's, leave nothing behind."""
    suite = os.getppid()
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda signum, _: stopping.append(signum))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    launch = _read_launch()
    marker, grace_s = launch["env"][MARKER], float(launch["grace_s"])
    try:
        server = _start(launch)
    except OSError as error:
        _say("failed", error=f"{type(error).__name__}: {error}")
        return
    _say("started", pid=server.pid)
    while True:
        readable = select.select([0, wake_r], [], [], POLL_S)[0]
        if wake_r in readable:
            os.read(wake_r, 4096)
        code = reap().get(server.pid)
        if code is not None:
            left = descendants(os.getpid()) | marked(marker)
            _say("exit", code=code, left=sorted(left))
            grace_s = min(grace_s, 2.0)  # a tree without its head has nothing to finish
            break
        if 0 in readable:
            stopping.append(0)  # "stop", or the end of the pipe
            if not os.read(0, 4096):
                _say("orphaned")
        if stopping or os.getppid() != suite:
            break
        cap_log(Path(launch["log"]), int(launch["log_limit"]))
    _say("gone", survivors=sorted(end_tree(os.getpid(), marker, grace_s, is_reaper=True)))


if __name__ == "__main__":
    main()
