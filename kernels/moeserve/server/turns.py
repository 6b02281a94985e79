"""Large bodies: how many may be held at once, and reading them one after another.

A body of megabytes is parsed in one piece that nothing else can interrupt. What the loop spends on
such bodies is measured, and the next one waits for as long as the last one took, so that whoever
sends small requests keeps half of the loop, whatever others send. What one body may hold is in
`http_guard.py`; both are used by `generate.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from moeserve.server.http_guard import HttpError

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
