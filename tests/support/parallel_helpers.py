"""A server's engine with several ranks, started as the server starts it, and questions for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

import psutil
import pytest

from moeserve.engine.config import EngineConfig
from moeserve.engine.process import ProcessEngine, start_engine
from moeserve.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from moeserve.server.tokenizer import load_tokenizer
from moeserve.tiny import model_dir
from moeserve.tiny.minigsm import load_split

CONFIG = EngineConfig(
    model=str(model_dir()), max_model_len=1024, kv_cache_memory_bytes=1 << 26, dtype="float32"
)

# Several for each rank at every step of the largest layout.
NUM_QUESTIONS = 16

GREEDY = SamplingParams(max_tokens=96, temperature=0.0)


def layout(tp: int, dp: int, ep: bool, **changes: Any) -> EngineConfig:
    values = vars(CONFIG) | {
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "has_expert_parallel": ep,
    }
    return EngineConfig(**{**values, **changes})


@cache
def questions() -> tuple[tuple[int, ...], ...]:
    tokenizer = load_tokenizer(model_dir())
    rows = load_split("test")[:NUM_QUESTIONS]
    return tuple(tuple(tokenizer.encode(f"Question: {row.question}\nAnswer:")) for row in rows)


def ignoring_end(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def tokens(events: list[TokenEvent]) -> list[int]:
    assert events[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), events[-1].error
    return [token for event in events for token in event.token_ids]


async def collect(client: ProcessEngine, wanted: Request) -> list[TokenEvent]:
    return [event async for event in client.generate(wanted)]


def pids(client: ProcessEngine) -> list[int]:
    return [rank["pid"] for rank in client.info.backends["ranks"]]  # type: ignore[attr-defined]


@asynccontextmanager
async def serving(config: EngineConfig) -> AsyncIterator[ProcessEngine]:
    client = await start_engine(config)
    started = pids(client)
    try:
        yield client
    finally:
        await client.shutdown(0.0)
        await all_gone(started)


async def all_gone(started: list[int]) -> None:
    """Wait until no process of these exists, or is more than a name."""
    deadline = time.monotonic() + 20
    for pid in started:
        while psutil.pid_exists(pid):
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    break
            assert time.monotonic() < deadline, pid
            await asyncio.sleep(0.05)


def assert_same_scores(events: list[list[TokenEvent]], expected: list[list[TokenEvent]]) -> None:
    for ours, theirs in zip(events, expected, strict=True):
        assert tokens(ours) == tokens(theirs)
        for mine, other in zip(scores_of(ours), scores_of(theirs), strict=True):
            assert mine == pytest.approx(other, abs=1e-4)


def scores_of(events: list[TokenEvent]) -> list[float]:
    found = [score for event in events for score in (*event.prompt_logprobs, *event.logprobs)]
    return [value for score in found if score for value in (score.logprob, score.top[0][1])]
