"""The engine's process, started before anything heavy is imported on this side of the socket.

Receives an `EngineConfig`; returns a `Spawned`, which `process.py` connects to. The engine spends
seconds on importing torch, and the HTTP side most of one on its own libraries: both at once.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from moeserve.engine.config import EngineConfig
from moeserve.engine.wire import pack

_CODE = (
    "import sys; from moeserve.engine import worker; "
    "worker.main(int(sys.argv[1]), float(sys.argv[2]))"
)


@dataclass(frozen=True)
class Spawned:
    """An engine process that is loading.

    Attributes:
        process: Of rank 0, which starts the others.
        socks: Our end of the connection of each DP rank.
    """

    process: subprocess.Popen[bytes]
    socks: tuple[socket.socket, ...]

    def abandon(self) -> None:
        """End the process if it still lives: whoever would have used it has ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for sock in self.socks:
            sock.close()


def spawn_engine(config: EngineConfig) -> Spawned:
    """Start the engine process and tell it to load.

    Args:
        config: Options; carried to the process as they are.
    """
    # One connection for each DP rank; the process is the first one, and starts the others.
    pairs = [socket.socketpair() for _ in range(config.data_parallel_size)]
    fds = [theirs.fileno() for _, theirs in pairs]
    process = _spawn(fds)
    for _, theirs in pairs:
        theirs.close()
    # A few hundred bytes, which the socket takes at once.
    pairs[0][0].sendall(pack(("start", replace(config, env=dict(config.env)), fds[1:])))
    return Spawned(process, tuple(ours for ours, _ in pairs))


def _spawn(fds: list[int]) -> subprocess.Popen[bytes]:
    """A fresh interpreter: it must not import what the API process imported.

    Nor what lies in the current folder, which may be the model's (-P).
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, str(fds[0]), str(time.time())],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        # Idle OpenMP threads must sleep: by default they spin on the API process's core. Ranks are
        # processes of one host, and meet on its loopback device.
        env={"OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo", **os.environ},
    )
