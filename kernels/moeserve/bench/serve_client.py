"""Sends the requests of a serving benchmark and measures each stream.

Receives `Ask`s and a server's address; returns one `Outcome` a request. Times are taken where the
bytes arrive. What they sum up to is `serve_report.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from time import perf_counter
from typing import Any

import aiohttp

from moeserve.bench.serve_load import Ask

# A run is bounded by its own load, not by a time-out that would look like a slow server.
_TIMEOUT_S = 6 * 3600
# Fields of a chat's delta that hold generated text.
_SAID = ("reasoning", "reasoning_content", "content")


@dataclass(frozen=True)
class Target:
    """A server and how it is asked.

    Attributes:
        base_url: Root of the server.
        model: Name in requests.
        is_chat: `/v1/chat/completions`.
        api_key: "" sends none.
        extra: Fields added to every body.
    """

    base_url: str
    model: str
    is_chat: bool = False
    api_key: str = ""
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Address of the route."""
        route = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        return self.base_url.rstrip("/") + route

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, ask: Ask) -> dict[str, object]:
        """Return the body of one request.

        Raises:
            ValueError: Token ids for the chat route.
        """
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if ask.stops:
            body["stop"] = list(ask.stops)
        if not self.is_chat:
            body["prompt"] = ask.prompt
        elif isinstance(ask.prompt, str):
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            raise ValueError("the chat route takes text: give --tokenizer")
        return body


@dataclass(frozen=True)
class Pace:
    """When requests are sent.

    Attributes:
        rate: Requests a second, Poisson arrivals; infinite sends all at once.
        max_concurrency: Open requests at most; 0 is no bound.
        seed: Of the arrivals.
    """

    rate: float = math.inf
    max_concurrency: int = 0
    seed: int = 0


@dataclass
class Outcome:
    """What came of one request; times in seconds on one clock.

    Attributes:
        start: When it was sent.
        ttft: From there to the first token.
        itls: Between one chunk with tokens and the next.
        latency: From sending to the last token.
        num_input: Prompt tokens, as the server counts.
        num_output: Generated tokens, as the server counts.
        text: The reply.
        error: "" if it was answered in full.
    """

    start: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    num_input: int = 0
    num_output: int = 0
    text: str = ""
    error: str = ""


def new_session() -> aiohttp.ClientSession:
    """Return a session without a bound of its own on connections.

    It does not look for proxies: aiohttp's `trust_env` asks the environment and .netrc before every
    request, half a millisecond after the clock has started, one request of a burst after the other.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        # A chunk may carry thousands of log-probabilities.
        read_bufsize=2**20,
    )


async def send(session: aiohttp.ClientSession, target: Target, ask: Ask) -> Outcome:
    """Send one request and follow its stream; a failure is in `error`, never raised."""
    outcome = Outcome(start=perf_counter())
    pieces: list[str] = []
    try:
        async with session.post(
            target.url, json=target.body(ask), headers=target.headers
        ) as response:
            if response.status != 200:
                detail = (await response.text())[:500]
                outcome.error = f"HTTP {response.status}: {detail}"
                return outcome
            await _follow(response, outcome, pieces)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.text = "".join(pieces)
    return outcome


async def _follow(response: aiohttp.ClientResponse, outcome: Outcome, pieces: list[str]) -> None:
    last = outcome.start
    rest = b""
    num_chunks = 0
    has_end = False
    async for data in response.content.iter_any():
        now = perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            # An event of these streams has one line of data, whatever ends it or stands by it.
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                has_end = True
                continue
            text = _text(json.loads(payload), outcome)
            if outcome.error:
                return
            if text is None:
                continue
            pieces.append(text)
            if num_chunks == 0:
                outcome.ttft = now - outcome.start
            else:
                outcome.itls.append(now - last)
            num_chunks += 1
            last = now
            outcome.latency = now - outcome.start
    # Some servers end the last line by closing.
    has_end = has_end or rest.strip() in (b"data: [DONE]", b"data:[DONE]")
    if not has_end or num_chunks == 0:
        outcome.error = "the stream ended early" if num_chunks else "no token came"
    elif outcome.num_output == 0:
        # A server that reports no usage: a chunk is taken for a token.
        outcome.num_output = num_chunks


def _text(chunk: Any, outcome: Outcome) -> str | None:
    """Return what a chunk's tokens say, None if it has none; note the usage or the error.

    Raises:
        ValueError: No chunk of an OpenAI stream.
    """
    try:
        if error := chunk.get("error"):
            outcome.error = f"in the stream: {error}"
            return None
        if usage := chunk.get("usage"):
            outcome.num_input = usage.get("prompt_tokens") or 0
            outcome.num_output = usage.get("completion_tokens") or 0
        if not chunk.get("choices"):
            return None
        choice = chunk["choices"][0]
        if "delta" not in choice:
            text: str | None = choice["text"]
            return text
        # A chat begins with a role and may end with a bare reason: neither is a token. Thoughts and
        # calls are: the usage counts them, so the first of them is the first token.
        delta = choice["delta"] or {}
        said = [delta[name] for name in _SAID if delta.get(name) is not None]
        calls = delta.get("tool_calls")
        if not calls and (not said or (delta.get("role") and not any(said))):
            return None
        return "".join(said)
    except (AttributeError, IndexError, KeyError, TypeError) as fault:
        raise ValueError(f"no chunk of a stream: {str(chunk)[:200]} ({fault!r})") from None


def _arrivals(num_asks: int, pace: Pace) -> list[float]:
    """Seconds from the start at which requests are sent: Poisson, the last at `num_asks` / rate.

    Scaled to that end, as the field does, so that no seed offers a higher rate than was asked.
    """
    if not math.isfinite(pace.rate):
        return [0.0] * num_asks
    rng = Random(pace.seed)
    moments = list(accumulate(rng.expovariate(1.0) for _ in range(num_asks)))
    return [moment / moments[-1] * num_asks / pace.rate for moment in moments]


async def run_load(
    target: Target, asks: Sequence[Ask], pace: Pace, tick: Callable[[int], None] | None = None
) -> tuple[list[Outcome], float]:
    """Send all requests; return their outcomes in order, and the seconds it took.

    Args:
        target: Server.
        asks: Requests.
        pace: When they are sent.
        tick: Told the number done after each.
    """
    gate = asyncio.Semaphore(pace.max_concurrency) if pace.max_concurrency else None
    num_done = 0

    async def one(session: aiohttp.ClientSession, ask: Ask) -> Outcome:
        nonlocal num_done
        if gate is None:
            outcome = await send(session, target, ask)
        else:
            async with gate:
                outcome = await send(session, target, ask)
        num_done += 1
        if tick is not None:
            tick(num_done)
        return outcome

    async with new_session() as session:
        start = perf_counter()
        tasks = []
        for ask, moment in zip(asks, _arrivals(len(asks), pace), strict=True):
            wait = start + moment - perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(session, ask)))
        outcomes = await asyncio.gather(*tasks)
        return list(outcomes), perf_counter() - start
