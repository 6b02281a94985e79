"""Runs the sequences of one request through the engine and turns their events into text.

Receives a `Job` with its prompts; yields `Delta`s as tokens arrive, or returns `Choice`s when all
are done. A stop string, a cancelled task or a closed iterator aborts in the engine at once. How a
reply looks is `replies.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from moeserve.engine.client import EngineClient
from moeserve.engine.request import FinishReason, Logprob, Request, TokenEvent
from moeserve.errors import MoeserveError
from moeserve.server.params import Job, ModelContext, Prompt
from moeserve.server.text import TextStream

# Sequences that are planned before others may use the event loop, about a millisecond of work.
_PLANNED_AT_ONCE = 64


class EngineFailedError(MoeserveError):
    """The engine ended a sequence for a reason that is not the client's; becomes HTTP 5xx.

    Attributes:
        is_stopping: The server is shutting down (503), as against an internal error (500).
    """

    def __init__(self, message: str, is_stopping: bool) -> None:
        super().__init__(message)
        self.is_stopping = is_stopping


class Observer(Protocol):
    """Receives the timings of sequences; `metrics.py` is one."""

    def first_token(self, seconds: float) -> None:
        """Time from arrival to the first token."""

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """Time since the last tokens, and how many came."""

    def finished(self, choice: Choice, seconds: float) -> None:
        """A sequence ended."""


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token with its log-probability and where its text begins in the output."""

    token_id: int
    offset: int
    logprob: Logprob


@dataclass
class Delta:
    """What became certain with one event."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Choice:
    """One sequence while it runs, and its outcome at the end.

    Attributes:
        index: Place in the reply.
        prompt: Its prompt.
        request: What the engine was asked.
        stream: Turns tokens into text.
        stop_reason: Stop string or stop token id that ended it; None for end of text.
        num_tokens: Generated, the one that ended the sequence included.
    """

    index: int
    prompt: Prompt
    request: Request
    stream: TextStream
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0

    def take(self, event: TokenEvent) -> Delta:
        """Take one event of the engine; return what became certain.

        Raises:
            EngineFailedError: The event ends the sequence with an error or an abort.
        """
        if event.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens or event.num_cached_tokens
        delta = Delta()
        stream = self.stream
        for place, token_id in enumerate(event.token_ids):
            self._note(token_id, event, place, delta)
            delta.text += stream.feed(token_id)
            if stream.stop is not None:
                self._end(delta, "stop", stream.stop)
                break
        else:
            self._finish(event, delta)
        if delta.text:
            self.text.append(delta.text)
        return delta

    def _note(self, token_id: int, event: TokenEvent, place: int, delta: Delta) -> None:
        self.num_tokens += 1
        self.token_ids.append(token_id)
        delta.token_ids.append(token_id)
        if place < len(event.logprobs):
            entry = TokenLogprob(token_id, self.stream.num_chars, event.logprobs[place])
            self.logprobs.append(entry)
            delta.logprobs.append(entry)

    def _finish(self, event: TokenEvent, delta: Delta) -> None:
        reason = event.finish_reason
        if reason is None:
            return
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            is_stopping = reason is FinishReason.ABORT
            message = event.error or ("the server is stopping" if is_stopping else "engine error")
            raise EngineFailedError(message, is_stopping)
        if event.stop_token_id is not None:
            self._note(event.stop_token_id, event, len(event.token_ids), delta)
            if event.stop_token_id in self.request.sampling.stop_token_ids:
                self.stop_reason = event.stop_token_id
        delta.text += self.stream.finish()
        if self.stream.stop is not None:
            self._end(delta, "stop", self.stream.stop)
        else:
            self._end(delta, reason.value, self.stop_reason)

    def _end(self, delta: Delta, reason: str, stop_reason: str | int | None) -> None:
        self.finish_reason = delta.finish_reason = reason
        self.stop_reason = stop_reason

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens, by which candidates are ranked."""
        total = sum(entry.logprob.logprob for entry in self.logprobs)
        return total / max(len(self.logprobs), 1)


async def plan_choices(
    job: Job,
    prompts: tuple[Prompt, ...],
    context: ModelContext,
    request_id: str,
    origin: tuple[str, str],
) -> list[Choice]:
    """Return one choice a candidate, ordered by prompt and then by candidate.

    Args:
        job: What was asked.
        prompts: Each is continued `best_of` times.
        context: Length and tokenizer of the model.
        request_id: Unique; the engine's ids begin with it.
        origin: Client and connection.

    Raises:
        BadRequest: A prompt does not fit into the context.
    """
    choices: list[Choice] = []
    for prompt in prompts:
        for candidate in range(job.best_of):
            index = len(choices)
            if index % _PLANNED_AT_ONCE == _PLANNED_AT_ONCE - 1:
                await asyncio.sleep(0)  # thousands take a while: others are served in between
            sampling = job.sampling_of(prompt, candidate, context.info.max_model_len)
            name = f"{request_id}-{index}"
            request = Request(name, prompt.ids, sampling, job.priority, *origin)
            stream = TextStream(context.tokenizer, job.text, prompt.ids)
            choices.append(Choice(index, prompt, request, stream))
    return choices


async def run_choice(
    engine: EngineClient, choice: Choice, observer: Observer
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of one sequence; the last has a `finish_reason`.

    Raises:
        EngineFailedError: The engine could not finish it.
    """
    start = last = perf_counter()
    is_first = True
    events = engine.generate(choice.request)
    try:
        async for event in events:
            delta = choice.take(event)
            now = perf_counter()
            if delta.token_ids:
                if is_first:
                    observer.first_token(now - start)
                else:
                    observer.next_tokens(now - last, len(delta.token_ids))
                is_first, last = False, now
            if delta.finish_reason is not None:
                # Counted before the caller sees the end: it may not come back for more.
                observer.finished(choice, now - start)
                yield delta
                return
            yield delta
    finally:
        # Closing it is what aborts in the engine; a plain iterator has nothing to close.
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
    raise EngineFailedError("the engine ended a sequence without a reason", is_stopping=False)


async def run_all(
    engine: EngineClient, choices: list[Choice], observer: Observer, most: int
) -> None:
    """Run every sequence to its end; the first failure cancels the others.

    Args:
        engine: Runs them.
        choices: One for each sequence.
        observer: Receives timings.
        most: The engine has at most this many of them at once.

    Raises:
        EngineFailedError: One of them failed.
    """
    if len(choices) == 1:
        await _drain(engine, choices, observer)
        return
    waiting = iter(choices)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(most, len(choices))):
                group.create_task(_drain(engine, waiting, observer))
    except* EngineFailedError as failures:
        first = failures.exceptions[0]
        raise first if isinstance(first, EngineFailedError) else failures from None


async def _drain(engine: EngineClient, choices: Iterable[Choice], observer: Observer) -> None:
    """Run sequences one after another; several of these may share one iterator."""
    for choice in choices:
        async with aclosing(run_choice(engine, choice, observer)) as deltas:
            async for _ in deltas:
                pass


async def stream_all(
    engine: EngineClient, choices: list[Choice], observer: Observer, most: int
) -> AsyncGenerator[tuple[Choice, Delta], None]:
    """Yield the deltas of all sequences as they come; arguments as of `run_all`.

    Raises:
        EngineFailedError: One of them failed; the others are aborted.
    """
    if len(choices) == 1:
        async with aclosing(run_choice(engine, choices[0], observer)) as deltas:
            async for delta in deltas:
                yield choices[0], delta
        return
    # Bounded, so that a client that reads slowly holds back its own sequences and no memory.
    queue: asyncio.Queue[tuple[Choice, Delta] | BaseException | None] = asyncio.Queue(64)
    waiting = iter(choices)

    async def pump() -> None:
        try:
            for choice in waiting:
                async with aclosing(run_choice(engine, choice, observer)) as deltas:
                    async for delta in deltas:
                        await queue.put((choice, delta))
            await queue.put(None)
        except EngineFailedError as failure:
            await queue.put(failure)

    tasks = [asyncio.create_task(pump()) for _ in range(min(most, len(choices)))]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def best(choices: list[Choice], job: Job) -> list[Choice]:
    """Return the n best candidates of each prompt, best first, numbered as in the reply."""
    if job.best_of == job.n:
        return choices
    kept: list[Choice] = []
    for first in range(0, len(choices), job.best_of):
        candidates = choices[first : first + job.best_of]
        # A stable sort: equal candidates stay in order.
        candidates.sort(key=lambda choice: -choice.mean_logprob)
        kept.extend(candidates[: job.n])
    for index, choice in enumerate(kept):
        choice.index = index
    return kept
