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
from random import Random
from time import perf_counter
from typing import Any

import aiohttp

from moeserve.bench.serve_load import Ask

# A run is bounded by its own load, not by a time-out that would look like a slow server.
_TIMEOUT_S = 6 * 3600


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
        itls: Between one chunk with text and the next.
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
    """Return a session without a bound of its own on connections."""
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
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:"):
                continue
            payload = event[5:].strip()
            if payload == b"[DONE]":
                has_end = True
                continue
            chunk: dict[str, Any] = json.loads(payload)
            if "error" in chunk:
                outcome.error = f"in the stream: {chunk['error']}"
                return
            if chunk.get("usage"):
                outcome.num_input = chunk["usage"]["prompt_tokens"]
                outcome.num_output = chunk["usage"]["completion_tokens"]
            if not chunk.get("choices"):
                continue
            choice = chunk["choices"][0]
            text = choice.get("text")
            if text is None:
                delta = choice.get("delta") or {}
                if "content" not in delta or (delta.get("role") and not delta["content"]):
                    continue
                text = delta["content"]
            pieces.append(text or "")
            if num_chunks == 0:
                outcome.ttft = now - outcome.start
            else:
                outcome.itls.append(now - last)
            num_chunks += 1
            last = now
            outcome.latency = now - outcome.start
    if not has_end or num_chunks == 0:
        outcome.error = "the stream ended early" if num_chunks else "no token came"
    elif outcome.num_output == 0:
        # A server that reports no usage: a chunk is taken for a token.
        outcome.num_output = num_chunks


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
    rng = Random(pace.seed)
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
        due = start
        for ask in asks:
            tasks.append(asyncio.create_task(one(session, ask)))
            if math.isfinite(pace.rate):
                due += rng.expovariate(pace.rate)
                await asyncio.sleep(max(0.0, due - perf_counter()))
        outcomes = await asyncio.gather(*tasks)
        return list(outcomes), perf_counter() - start
