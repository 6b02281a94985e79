"""Several ranks end together: deaths, hangs, refusals, each told to every open request."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from parallel_helpers import (
    GREEDY,
    all_gone,
    collect,
    ignoring_end,
    layout,
    pids,
    questions,
)

from moeserve.engine.board import Board, board_bytes
from moeserve.engine.process import ProcessEngine, start_engine
from moeserve.engine.request import FinishReason, Request, TokenEvent
from moeserve.errors import Unsupported
from moeserve.parallel import Place

STALLED = "stalled: a step has lasted more than 1 s; rank 1 did not take part"


async def open_requests(client: ProcessEngine, count: int) -> list[asyncio.Task[list[TokenEvent]]]:
    """Start long requests and wait until all of them run."""
    tasks = [
        asyncio.create_task(collect(client, Request(f"open{i}", questions()[i], ignoring_end(900))))
        for i in range(count)
    ]
    deadline = time.monotonic() + 30
    while client.stats().num_running < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return tasks


async def errors_of(tasks: list[asyncio.Task[list[TokenEvent]]]) -> set[str]:
    ends = [(await asyncio.wait_for(task, 20))[-1] for task in tasks]
    assert all(end.finish_reason is FinishReason.ERROR for end in ends)
    return {end.error for end in ends}


@pytest.mark.parametrize(
    ("tp", "dp", "victim", "message"),
    [
        (1, 2, 1, "rank 1 (dp 1, tp 0) died (killed by SIGKILL); all ranks end"),
        pytest.param(
            *(2, 1, 0, "the engine process is gone (exit code -9)"), marks=pytest.mark.slow
        ),
        pytest.param(
            *(2, 1, 1, "rank 1 (dp 0, tp 1) died (killed by SIGKILL); all ranks end"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_death_of_one_rank_ends_all_and_every_request_is_told(
    tp: int, dp: int, victim: int, message: str
) -> None:
    async def run() -> None:
        client = await start_engine(layout(tp, dp, ep=True))
        started = pids(client)
        tasks = await open_requests(client, 4)
        os.kill(started[victim], signal.SIGKILL)
        assert await errors_of(tasks) == {message}
        await all_gone(started)
        assert not client.is_alive()
        (late,) = await collect(client, Request("late", (1, 2), GREEDY))
        assert (late.finish_reason, late.error) == (FinishReason.ERROR, message)
        await client.shutdown(0.0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tp", "dp", "victim", "message"),
    [
        (2, 1, 1, STALLED),
        pytest.param(1, 2, 1, STALLED, marks=pytest.mark.slow),
        pytest.param(
            *(2, 1, 0, "the engine process is gone (exit code -9)"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_hangs_is_found_and_named(tp: int, dp: int, victim: int, message: str) -> None:
    async def run() -> None:
        client = await start_engine(layout(tp, dp, ep=True, stall_limit_s=1.0))
        started = pids(client)
        tasks = await open_requests(client, 3)
        os.kill(started[victim], signal.SIGSTOP)
        (error,) = await errors_of(tasks)
        assert error.startswith(message)
        await all_gone(started)
        await client.shutdown(0.0)

    asyncio.run(run())


def test_all_ranks_end_when_the_front_is_killed() -> None:
    code = """
        import asyncio
        from moeserve.engine.config import EngineConfig
        from moeserve.engine.process import start_engine

        async def main():
            client = await start_engine(EngineConfig(
                model="minigsm-tiny", max_model_len=256, num_pages=40, data_parallel_size=2,
                has_expert_parallel=True))
            print(*(rank["pid"] for rank in client.info.backends["ranks"]), flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        started = [int(word) for word in parent.stdout.readline().split()]
        assert len(started) == 2
        parent.kill()
        asyncio.run(all_gone(started))


def test_every_rank_refuses_alike_and_the_starter_is_told_once() -> None:
    async def run() -> None:
        with pytest.raises(Unsupported, match="=3 does not divide num_attention_heads=4"):
            await start_engine(layout(3, 1, ep=False))

    asyncio.run(run())


def test_the_board_blames_a_stopped_rank_before_an_idle_one() -> None:
    memory = os.memfd_create("board")
    os.truncate(memory, board_bytes(3))
    boards = [Board(memory, Place(dp_size=3, dp_rank=rank)) for rank in range(3)]
    boards[0].begin()
    boards[1].begin()
    boards[1].end()
    boards[2].begin()
    assert "; rank 1 did not take part: rank 0 in step 1 (pid" in boards[0].report(5.0)
    boards[1].begin()
    assert "; every rank is in it: " in boards[0].report(5.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        os.kill(other.pid, signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        boards[2]._mine[2] = other.pid
        assert "; rank 2 did not take part" in boards[0].report(5.0)
        other.kill()
