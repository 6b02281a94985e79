"""One supervised server process, seen from the suite.

Receives argv, environment and a log file; starts `supervisor.py` with them and turns its events
into attributes. Whether the server is ready is `readiness.py`; the whole life is `server.py`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evalsuite import supervisor

# The supervisor is a sibling file, run by path: no import of the package, no site-packages.
_SUPERVISOR = Path(supervisor.__file__)


@dataclass
class Leash:
    """A server under supervision.

    Attributes:
        argv: Command line of the server.
        env: Its whole environment.
        log_path: Where its output goes.
        grace_s: Seconds between TERM and KILL.
        log_limit_bytes: Beyond this size the middle of the log is dropped.
        pid: The server's process id, 0 until it is started.
        exit_code: Its exit status (negative: signal), None while it lives.
        left: Pids it left behind at its end.
        survivors: Pids that even KILL did not end.
        ended: Set when the server process itself has ended, or could not be started.
        gone: Set when nothing of its tree is left.
        start_error: Why it could not be started, "" if it could.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    grace_s: float = 10.0
    log_limit_bytes: int = 256 * 1024 * 1024
    pid: int = 0
    exit_code: int | None = None
    left: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    ended: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    start_error: str = ""
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    on_end: Callable[[], None] | None = None
    _started: threading.Event = field(default_factory=threading.Event)
    _supervisor: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; its pid is known on return unless `start_error` is set."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        launch = {
            "argv": list(self.argv),
            "env": {**self.env, supervisor.MARKER: self.marker},
            "cwd": "",
            "log": str(self.log_path.resolve()),
            "grace_s": self.grace_s,
            "log_limit": self.log_limit_bytes,
        }
        with self.log_path.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal is the suite's alone
            )
        assert self._supervisor.stdin is not None
        threading.Thread(target=self._listen, name="server-events", daemon=True).start()
        self._supervisor.stdin.write((json.dumps(launch) + "\n").encode())
        self._supervisor.stdin.flush()
        self._started.wait(30)

    def tree(self) -> set[int]:
        """Pids of the server and everything below it, strays adopted by the supervisor too."""
        return supervisor.descendants(self._supervisor.pid) if self._supervisor else set()

    def stop(self) -> None:
        """End the whole tree and wait for it; harmless when it has ended already.

        An interrupt during the wait passes through: the supervisor finishes the work alone.
        """
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the supervisor has ended already
            self._supervisor.stdin.write(b"stop\n")
            self._supervisor.stdin.close()
        self.gone.wait(self.grace_s + 8)
        if not self.gone.is_set():
            self.survivors = tuple(sorted(self.tree()))

    def _listen(self) -> None:
        """Thread: read events until the supervisor ends, however it ends."""
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        is_tidy = False
        for line in self._supervisor.stdout:
            event = json.loads(line)
            name = event["event"]
            if name == "started":
                self.pid = event["pid"]
                self._started.set()
            elif name == "failed":
                self.start_error = event["error"]
                is_tidy = True
                self._mark_ended()
            elif name == "exit":
                self.exit_code, self.left = event["code"], tuple(event["left"])
                self._mark_ended()
            elif name == "gone":
                is_tidy = True
                self.survivors = tuple(event["survivors"])
        if not is_tidy:
            # The supervisor was killed: its server has ended with it (PDEATHSIG), the rest of
            # the tree is found by its marker.
            self.survivors = tuple(supervisor.end_tree(0, self.marker, 0.0))
        self._supervisor.wait()
        self._mark_ended()
        self.gone.set()

    def _mark_ended(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._started.set()
            if self.on_end is not None:
                self.on_end()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the server's end; True if it came. Returns at once when it is over."""
        return self.ended.wait(max(timeout_s, 0.0))
