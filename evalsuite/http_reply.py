"""What an HTTP reply holds, before anybody knows whether it is an answer.

Receives aiohttp's responses, returns bytes or a server's own words. What the bytes of an answer
mean is `wire.py`, when a request is repeated `retries.py`.
"""

from __future__ import annotations

import aiohttp

from evalsuite.wire import MalformedError, error_message

# A reply longer than this is no completion (a prompt of 100,000 tokens echoed with their
# log-probabilities is 10 MiB); reading on would only fill the memory.
MAX_REPLY_BYTES = 64 * 2**20


def one_line(message: str, key: str = "") -> str:
    """A message fit for a record: without line breaks, and without the key it may quote."""
    return " ".join((message.replace(key, "***") if key else message).split())


async def read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Read a body that is not beyond all measure.

    Raises:
        MalformedError: More than `MAX_REPLY_BYTES`; the rest is not read.
    """
    parts: list[bytes] = []
    num_bytes = 0
    async for part in response.content.iter_any():
        num_bytes += len(part)
        if num_bytes > MAX_REPLY_BYTES:
            response.close()
            raise MalformedError(f"the body is longer than {MAX_REPLY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def refusal(response: aiohttp.ClientResponse, payload: bytes) -> str:
    """A server's own words for a status other than 2xx, never blank."""
    if response.status // 100 == 3:
        place = response.headers.get("Location", "an address it does not name")
        return f"redirected to {place}; redirects are not followed, give the final address"
    return error_message(payload) or response.reason or "no message"
