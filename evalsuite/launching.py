"""The small decisions of a start: port, environment, key, and what an exit status means.

Receives specs and settings of `server.py`, which owns the order of things.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path

from evalsuite.engines.base import LaunchSpec


def describe_exit(code: int | None) -> str:
    """Say what an exit status means, killed by signals above all."""
    if code is None or code >= 0:
        return "" if code is None else f" with exit code {code}"
    hint = " (out of memory, if nobody sent it)" if code == -9 else ""
    return f" by signal {-code}{hint}"


def hold_port(stack: contextlib.ExitStack) -> int:
    """Reserve a port and keep it bound, not listening, while the server starts.

    A bound socket keeps the number out of everybody's search for a free port; with
    SO_REUSEADDR on both sides the server can still bind and listen on it.
    """
    holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    return port


def read_port(port_file: Path) -> int:
    """Port that the server bound itself (`{"port": N}`), 0 until the file is complete."""
    try:
        found = json.loads(port_file.read_text())["port"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0  # not there yet, or half written
    return int(found)


def child_env(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The suite's environment (hub tokens, proxies, device selection), ours, then the job's."""
    ours = {
        # The working directory must not shadow the server's packages.
        "PYTHONSAFEPATH": "1",
        # A log that is seen when it is written, not when 8 KiB are full.
        "PYTHONUNBUFFERED": "1",
    }
    return {**environ, **ours, **spec.env}


def api_key_of(argv: tuple[str, ...], env: Mapping[str, str]) -> str:
    """The key that the server was told to ask for."""
    for position, word in enumerate(argv):
        if word == "--api-key" and position + 1 < len(argv):
            return argv[position + 1]
        if word.startswith("--api-key="):
            return word.partition("=")[2]
    return env.get("VLLM_API_KEY", "")
