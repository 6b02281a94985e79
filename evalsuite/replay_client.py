"""Teacher forcing over HTTP: the log-probabilities a server gives to a text it did not choose.

Receives (prompt, answer) pairs, posts both as one prompt with `echo` and `logprobs`, returns the
tokens of the answer with their log-probabilities. What is made of them is `replay.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from evalsuite.client import RetryPolicy
from evalsuite.errors import EvalError
from evalsuite.wire import error_message


@dataclass(frozen=True)
class Scored:
    """An answer's tokens.

    Attributes:
        tokens: Text of each token.
        logprobs: Log-probability of each, natural logarithm.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class ReplayServer:
    """Where to replay.

    Attributes:
        base_url: Server root.
        model: Served name.
        concurrency: Requests in flight.
        timeout_s: Of one request.
        api_key: Bearer token, "" for none.
        retry: Repeats of failed requests.
    """

    base_url: str
    model: str
    concurrency: int = 64
    timeout_s: float = 600.0
    api_key: str = field(default="", repr=False)
    retry: RetryPolicy = field(default_factory=RetryPolicy)


def score(server: ReplayServer, texts: Mapping[int, tuple[str, str]]) -> dict[int, Scored]:
    """Score every (prompt, answer), by key.

    Raises:
        EvalError: A request failed after all retries, or no log-probabilities are echoed.
    """
    return asyncio.run(_score_all(server, texts))


async def _score_all(
    server: ReplayServer, texts: Mapping[int, tuple[str, str]]
) -> dict[int, Scored]:
    gate = asyncio.Semaphore(server.concurrency)
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=server.timeout_s),
        headers=headers,
    ) as session:

        async def one(prompt: str, answer: str) -> Scored:
            async with gate:
                return await _score(session, server, prompt, answer)

        keys = list(texts)
        tasks = [asyncio.create_task(one(*texts[key])) for key in keys]
        try:
            results = await asyncio.gather(*tasks)
        except EvalError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
    return dict(zip(keys, results, strict=True))


async def _score(
    session: aiohttp.ClientSession, server: ReplayServer, prompt: str, answer: str
) -> Scored:
    url = server.base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt + answer,
        "echo": True,
        "logprobs": 1,
        # Zero is refused by some servers; the one token then generated is cut off below.
        "max_tokens": 0,
        "temperature": 0,
    }
    attempt = 0
    while True:
        try:
            async with session.post(url, json=body) as response:
                payload = await response.read()
            if response.status == 200:
                return answer_part(payload, len(prompt), len(prompt) + len(answer))
            problem = f"HTTP {response.status}: {error_message(payload)}"
            if response.status == 400 and body["max_tokens"] == 0:
                body["max_tokens"] = 1
                continue
            if response.status < 500 and response.status != 429:
                raise EvalError("replay: the server refuses echo with logprobs", 1, 1, problem)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        if attempt >= server.retry.max_retries:
            raise EvalError("replay: a request failed after all retries", 1, 1, problem)
        await asyncio.sleep(server.retry.pause_s(attempt, None))
        attempt += 1


def answer_part(payload: bytes, start: int, end: int) -> Scored:
    """Pick the tokens that lie whole between two character offsets of the echoed text.

    A token that straddles the border between prompt and answer belongs to neither.

    Raises:
        EvalError: No echoed tokens with offsets in the reply.
    """
    try:
        details = json.loads(payload)["choices"][0]["logprobs"]
        rows = list(
            zip(details["tokens"], details["token_logprobs"], details["text_offset"], strict=True)
        )
        kept = [
            (str(token), float(value))
            for token, value, offset in rows
            if value is not None and start <= offset < end
        ]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        reason = "replay: the reply has no echoed tokens, token_logprobs and text_offset"
        raise EvalError(reason, 1, 1, f"{type(error).__name__}: {error}") from error
    return Scored(tuple(token for token, _ in kept), tuple(value for _, value in kept))
