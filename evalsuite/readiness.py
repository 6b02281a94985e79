"""Is a server ready to be evaluated: alive, healthy, ours, and serving the expected model?

Receives a base URL, the expected model name and, for a server of ours, its process tree;
returns `Probe`s. Starting and the time limit are `server.py`;
servers that somebody else runs are looked at by `attach.py`.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from evalsuite.processes import Work, port_owner, work_of

_HTTP_TIMEOUT_S = 1.0
_MAX_BODY_BYTES = 4 * 1024 * 1024
# Routes that are not there say nothing about health; /v1/models decides then.
NO_SUCH_ROUTE = (404, 405)

FOREIGN = "in use by a process we did not start"

State = Literal["starting", "ready", "foreign", "wrong_model"]


@dataclass(frozen=True)
class Probe:
    """One look at a server.

    Attributes:
        state: "starting" may still become "ready"; the other two never will.
        detail: What was seen, for messages.
    """

    state: State
    detail: str


def get(
    base_url: str, path: str, *, timeout_s: float = _HTTP_TIMEOUT_S, api_key: str = ""
) -> tuple[int, bytes]:
    """GET without proxies: the server is on this host or was named by the user.

    Raises:
        OSError: No connection, or none in time.
        http.client.HTTPException: What answers does not speak HTTP.
    """
    connection = connection_to(base_url, timeout_s)
    try:
        return ask(connection, urlsplit(base_url).path.rstrip("/") + path, api_key)
    finally:
        connection.close()


def connection_to(base_url: str, timeout_s: float) -> http.client.HTTPConnection:
    """A connection that is not open yet; by TLS where the URL says so."""
    url = urlsplit(base_url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "127.0.0.1", url.port, timeout=timeout_s)


def ask(connection: http.client.HTTPConnection, path: str, api_key: str) -> tuple[int, bytes]:
    """GET one path; opens the connection where it is not open.

    Raises:
        OSError: No connection, or none in time.
        http.client.HTTPException: What answers does not speak HTTP.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.read(_MAX_BODY_BYTES)


def served_names(body: bytes) -> list[str]:
    """Model names that a `/v1/models` body lists.

    Raises:
        ValueError: The body is not such a list.
    """
    parsed = json.loads(body)
    data = parsed.get("data") if isinstance(parsed, dict) else None
    if not isinstance(data, list):
        raise ValueError("no list under 'data'")
    return [str(entry.get("id", "")) for entry in data if isinstance(entry, dict)]


def probe(
    base_url: str,
    model: str,
    *,
    pids: AbstractSet[int] | None = None,
    timeout_s: float = _HTTP_TIMEOUT_S,
    api_key: str = "",
) -> Probe:
    """Look once; never raises for anything a server may do.

    Args:
        base_url: Server root.
        model: Name that `/v1/models` must list.
        pids: Process tree that must own the port; None for a server that is not ours.
        timeout_s: Limit of each of the two requests.
        api_key: Bearer token the server asks for, "" for none.
    """
    if pids is not None:
        port = urlsplit(base_url).port or 0
        is_ours = port_owner(port, set(pids))
        if is_ours is False:
            return Probe("foreign", f"port {port} is {FOREIGN}")
        if is_ours is None and Path("/proc/net/tcp").exists():
            return Probe("starting", f"nothing listens on port {port} yet")
    try:
        status, _ = get(base_url, "/health", timeout_s=timeout_s, api_key=api_key)
        if status != 200 and status not in NO_SUCH_ROUTE:
            return Probe("starting", f"/health answers {status}")
        status, body = get(base_url, "/v1/models", timeout_s=timeout_s, api_key=api_key)
        if status != 200:
            return Probe("starting", f"/v1/models answers {status}")
        names = served_names(body)
    except (OSError, http.client.HTTPException) as error:
        return Probe("starting", f"no answer yet ({type(error).__name__}: {error})")
    except ValueError as error:
        return Probe("starting", f"/v1/models gave no model list ({error})")
    if not names:
        return Probe("starting", "/v1/models lists nothing")
    if model not in names:
        return Probe("wrong_model", f"it serves {', '.join(names)}, not {model}")
    return Probe("ready", f"serves {model}")


class ProgressWatch:
    """Notices whether a starting server still does anything.

    Growth of its log, bytes read (weights) and CPU time all count as progress; a wait that ends
    at its limit can then say "stood still for 300 s" or "was still loading".
    """

    # CPU time below this share of the wall time is a poll loop, not work.
    _IDLE_CPU_SHARE = 0.05

    def __init__(self) -> None:
        self._last = Work()
        self._last_look = time.monotonic()
        self._progress_at = self._last_look

    def look(self, pids: AbstractSet[int], log: Path) -> Work:
        """Take a new reading."""
        work = work_of(set(pids), log)
        now = time.monotonic()
        cpu_share = (work.cpu_s - self._last.cpu_s) / max(now - self._last_look, 1e-3)
        if (
            work.log_bytes != self._last.log_bytes
            or work.read_bytes > self._last.read_bytes + 65536
            or cpu_share > self._IDLE_CPU_SHARE
        ):
            self._progress_at = now
        self._last, self._last_look = work, now
        return work

    def describe(self) -> str:
        """One clause for a message or the progress line."""
        still_s = time.monotonic() - self._progress_at
        work = self._last
        sums = (
            f"{work.cpu_s:.1f} s of CPU time, {work.read_bytes / 2**20:.0f} MiB read, "
            f"{work.log_bytes / 1024:.0f} KiB of log"
        )
        if still_s < 5.0:
            return f"still making progress ({sums})"
        return f"no progress for {still_s:.0f} s ({sums})"
