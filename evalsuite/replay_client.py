"""Teacher forcing over HTTP: the log-probabilities a server gives to a text it did not choose.

Receives (prompt, answer) pairs, posts both as one prompt with `echo` and `logprobs`, returns the
tokens of the answer with their log-probabilities. What is made of them is `replay.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from evalsuite.client import Client, ClientSettings, Exchange, RequestFailure
from evalsuite.errors import EvalError
from evalsuite.retries import RetryPolicy
from evalsuite.wire import SamplingSettings


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
    settings = ClientSettings(
        base_url=server.base_url,
        sampling=SamplingSettings(server.model, max_tokens=0, temperature=0.0, seed=0),
        timeout_s=server.timeout_s,
        retry=server.retry,
        api_key=server.api_key,
    )
    async with Client(settings) as client:

        async def one(prompt: str, answer: str) -> Scored:
            async with gate:
                return await _score(client, prompt, answer)

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


async def _score(client: Client, prompt: str, answer: str) -> Scored:
    start, end = len(prompt), len(prompt) + len(answer)

    async def ask(max_tokens: int) -> Exchange[Scored] | RequestFailure:
        body = {
            "model": client.settings.sampling.model,
            "prompt": prompt + answer,
            "echo": True,
            "logprobs": 1,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        return await client.exchange(
            json.dumps(body).encode("ascii"), lambda payload: answer_part(payload, start, end)
        )

    outcome = await ask(max_tokens=0)
    if isinstance(outcome, RequestFailure) and outcome.status == 400:
        # Zero is refused by some servers; the one token then generated is cut off.
        outcome = await ask(max_tokens=1)
    if not isinstance(outcome, RequestFailure):
        return outcome.content
    is_refused = outcome.status is not None and outcome.status // 100 == 4
    reason = (
        "replay: the server refuses echo with logprobs"
        if is_refused and outcome.status != 429
        else "replay: a request failed after all retries"
    )
    raise EvalError(reason, 1, 1, outcome.message)


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
