"""The embedded model behind a real `moeserve`, in its own process group, for tests of clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from moeserve.tiny import MODEL_NAME

READY_TIMEOUT_S = 120.0


@contextlib.contextmanager
def served_model(folder: Path, *args: str) -> Iterator[str]:
    """Start the server, yield its root URL, end its whole group.

    Args:
        folder: Receives log and port file.
        args: Further options of `moeserve`.
    """
    port_file, log = folder / "port.json", folder / "server.log"
    command = [sys.executable, "-P", "-m", "moeserve", MODEL_NAME, "--port", "0"]
    command += ["--port-file", str(port_file), "--dtype", "float32", *args]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    # Its process group, for who weighs it.
    (folder / "pid").write_text(str(server.pid))
    try:
        yield _wait_ready(server, port_file, log)
    finally:
        server.terminate()
        try:
            server.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_ready(server: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(OSError, ValueError, urllib.error.URLError):
            url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        time.sleep(0.05)
    raise AssertionError(f"not ready in {READY_TIMEOUT_S} s: {log.read_text()[-3000:]}")
