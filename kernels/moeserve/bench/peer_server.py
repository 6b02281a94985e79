"""A server for a benchmark: started, waited for, weighed, ended with its whole group.

Receives a command; returns a `PeerServer`. The suite's own servers are started by
`evalsuite/server.py`, which trusts nobody; this one only has to measure.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeserve.errors import UsageError
from moeserve.tiny import MODEL_NAME, model_dir

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02


@dataclass(frozen=True)
class PeerCommand:
    """How one engine serves the embedded model in float32.

    Attributes:
        name: Engine and version, a column of the table.
        argv: Command, `{port}` replaced.
        env: Variables on top of the inherited ones.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


def moeserve_command() -> PeerCommand:
    """This package's server."""
    try:
        version = importlib.metadata.version("moe-evalsuite")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    argv = [sys.executable, "-P", "-m", "moeserve", MODEL_NAME, "--dtype", "float32"]
    argv += ["--max-model-len", "4096", "--host", "127.0.0.1", "--port", "{port}"]
    return PeerCommand(f"moeserve {version}".strip(), tuple(argv), {})


def vllm_command(path: str | None = None) -> PeerCommand:
    """How users start vLLM: with its compiled default.

    Raises:
        UsageError: There is no `vllm` on the PATH.
    """
    command = path or shutil.which("vllm")
    if command is None:
        raise UsageError("no vllm on the PATH")
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # As much KV cache as moeserve takes on a CPU; more only costs memory here.
    env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    asked = subprocess.run(
        [*_with(env), command, "--version"], capture_output=True, text=True, check=False
    )
    words = asked.stdout.split()
    argv = [command, "serve", str(model_dir()), "--dtype", "float32", "--max-model-len", "4096"]
    argv += ["--served-model-name", MODEL_NAME, "--disable-uvicorn-access-log"]
    argv += ["--host", "127.0.0.1", "--port", "{port}"]
    return PeerCommand(f"vllm {words[-1] if words else ''}".strip(), tuple(argv), env)


class PeerServer:
    """One running server.

    Attributes:
        name: From the command.
        base_url: Root.
        startup_s: From the start of the process to the end of the first reply.
    """

    def __init__(self, command: PeerCommand, log: Path) -> None:
        self.name = command.name
        port = _free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        argv = [*_with(command.env), *(w.replace("{port}", str(port)) for w in command.argv)]
        start = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await_reply(start + _START_TIMEOUT_S, log)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - start

    def _await_reply(self, deadline: float, log: Path) -> None:
        fields = {"model": MODEL_NAME, "prompt": "Question: 2 and 3?\nAnswer:", "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.base_url}/v1/completions",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise UsageError(f"{self.name} ended with status {self._process.returncode}: {log}")
            # Not there yet, or not ready.
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(request, timeout=30) as reply,
            ):
                if reply.status == 200:
                    return
            time.sleep(_POLL_S)
        raise UsageError(f"{self.name} gave no reply within {_START_TIMEOUT_S:g} s: {log}")

    def resident_mib(self) -> dict[str, float]:
        """Resident memory of each process of the group, MiB, by process id and name."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.getpgid(int(folder.name)) != self._process.pid:
                    continue
                fields = (folder / "status").read_text().splitlines()
                (kib,) = [line.split()[1] for line in fields if line.startswith("VmRSS:")]
                name = fields[0].split("\t")[1]
                found[f"{name} {folder.name}"] = int(kib) / 1024
        return found

    def cpu_seconds(self) -> float:
        """Processor time of the group's processes so far; other programs do not add to it."""
        ticks = 0
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.getpgid(int(folder.name)) == self._process.pid:
                    # After the name, which may hold anything: utime and stime.
                    fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels, from `/metrics`."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))
        )

    def stop(self) -> None:
        """End the whole group; harmless when repeated."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _with(env: Mapping[str, str]) -> list[str]:
    """A command's head that sets variables on top of the inherited ones."""
    return ["env", *(f"{name}={value}" for name, value in env.items())]


def _free_port() -> int:
    """A port that was free a moment ago; a benchmark may be started again where it is lost."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
