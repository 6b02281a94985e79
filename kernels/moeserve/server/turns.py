"""Bodies: reading one within its limits, how many may be held, and large ones one by one.

A body of megabytes is parsed in one piece that nothing else can interrupt. What the loop spends on
such bodies is measured, and the next one waits for as long as the last one took, so that whoever
sends small requests keeps half of the loop, whatever others send. Used by `generate.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from moeserve.server.http_guard import HttpError, Receive, Scope
from moeserve.server.limits import Limits

# Smaller bodies (some thousand tokens as text or ids) are read in about a millisecond.
LARGE_BODY_BYTES = 65536


class Turns:
    """One after another, with rests as long as the work."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._free_at = 0.0

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn if the body is large, and have it until the block ends."""
        if num_bytes < LARGE_BODY_BYTES:
            yield
            return
        async with self._lock:
            await asyncio.sleep(self._free_at - time.monotonic())
            began = time.monotonic()
            try:
                yield
            finally:
                ended = time.monotonic()
                self._free_at = ended + (ended - began)


class HeldBytes:
    """Bytes of all bodies that are being read, bounded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """Yield what counts bytes in; all are counted out when the block ends.

        The function raises `HttpError` 429 where all bodies together would be too large.
        """
        own = 0

        def count(num_bytes: int) -> None:
            nonlocal own
            if self._num_bytes + num_bytes > self._most:
                raise HttpError(
                    429,
                    f"bodies that are being read hold {self._num_bytes} bytes and may hold "
                    f"{self._most}; try again",
                    code="bodies_full",
                    closes=True,
                    retry_after_s=1,
                )
            own += num_bytes
            self._num_bytes += num_bytes

        try:
            yield count
        finally:
            self._num_bytes -= own


async def read_body(
    scope: Scope, receive: Receive, limits: Limits, count: Callable[[int], None]
) -> bytes:
    """Return a request's body.

    Args:
        scope: Of the request.
        receive: Gives its parts.
        limits: On size and time.
        count: Told of bytes before they are kept; may raise.

    Raises:
        HttpError: 415 not JSON or compressed, 413 too large, 408 too slow, 400 cut short.
    """
    _check_media(scope["headers"])
    too_large = HttpError(
        413, f"the body is larger than {limits.max_body_bytes} bytes", closes=True
    )
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limits.max_body_bytes:
            raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(400, "the body was cut short", closes=True)
                size += len(message.get("body", b""))
                if size > limits.max_body_bytes:
                    raise too_large
                count(len(message.get("body", b"")))
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        limit = limits.body_timeout_s
        raise HttpError(408, f"the body was not complete after {limit:g} s", closes=True) from None


def _check_media(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse what would be read wrongly, and what a page of another origin may send unasked.

    A browser sends `text/plain` to any address without asking it first, `application/json` not.
    """
    for name, value in headers:
        if name == b"content-type":
            kind = value.split(b";")[0].strip().lower()
            if kind != b"application/json" and not kind.endswith(b"+json"):
                shown = ascii(kind[:80].decode("latin-1"))
                raise HttpError(415, f"content-type: want application/json, got {shown}")
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = ascii(value[:80].decode("latin-1"))
            raise HttpError(415, f"content-encoding: want none, got {shown}")
