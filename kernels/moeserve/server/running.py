"""Runs the sequences of one request through the engine.

Receives planned `Choice`s; yields `Delta`s as tokens arrive, or returns when all are done. A stop
string, a cancelled task or a closed iterator aborts in the engine at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from time import perf_counter

from moeserve.engine.client import EngineClient
from moeserve.server.params import Job
from moeserve.server.sequences import Choice, Delta, EngineFailedError, Observer


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
                num_tokens = len(delta.token_ids)
                if is_first:
                    observer.first_token(len(choice.prompt.ids), num_tokens, now - start)
                else:
                    observer.next_tokens(num_tokens, now - last)
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
