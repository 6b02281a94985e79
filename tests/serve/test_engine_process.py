"""The engine in its own process: same answers, aborts, shutdown, and every kind of death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import psutil
import pytest
from two_layer_engine import CONFIG, config, drain, prompts, request, tokens

from moeserve.engine.engine import Engine
from moeserve.engine.process import EngineError, ProcessEngine, start_engine
from moeserve.engine.request import FinishReason, Request, TokenEvent
from moeserve.errors import UsageError


async def until(condition: Callable[[], bool]) -> None:
    """Wait for counters, which nobody announces."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def collect(client: ProcessEngine, wanted: Request) -> list[TokenEvent]:
    return [event async for event in client.generate(wanted)]


def test_the_process_answers_like_the_engine_and_imports_torch_only_there() -> None:
    code = """
        import asyncio, sys
        from moeserve.engine.config import EngineConfig
        from moeserve.engine.process import start_engine
        from moeserve.engine.request import Request, SamplingParams

        async def main():
            client = await start_engine(EngineConfig(
                model="minigsm-tiny", load_format="dummy", max_model_len=256, num_pages=400,
                hf_overrides={"num_hidden_layers": 2}))
            sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            async for event in client.generate(Request("a", (1, 2, 3), sampling)):
                print(*event.token_ids)
            await client.shutdown(1.0)
            assert not client.is_alive()
            assert "torch" not in sys.modules and "numpy" not in sys.modules

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    engine = Engine(config())
    engine.add(request("a", [1, 2, 3], max_tokens=20))
    assert [int(t) for t in done.stdout.split()] == tokens(drain(engine)["a"])


def test_the_process_serves_aborts_profiles_and_reports_its_death() -> None:
    async def run() -> None:
        client = await start_engine(CONFIG)
        assert client.info.max_model_len == 256
        assert client.info.backends["moe"]["backend"]  # type: ignore[index]
        many = [
            collect(client, request(str(i), p, max_tokens=30)) for i, p in enumerate(prompts(8))
        ]
        for events in await asyncio.gather(*many):
            assert len(tokens(events)) == 30
            assert [e.finish_reason for e in events][-1] is FinishReason.LENGTH

        stream = client.generate(request("left", [1, 2], max_tokens=250))
        await anext(stream)
        await stream.aclose()
        again = await collect(client, request("again", [1, 2], max_tokens=5))
        assert len(tokens(again)) == 5
        await until(lambda: client.stats().num_running == 0)

        profile = await client.profile()
        assert profile["num_moe_layers"] == 2
        (rank,) = profile["ranks"]  # type: ignore[misc]
        assert rank["prefill"]["counts"]["aten::linear"] > 4
        assert rank["decode"]["num_tokens"] == 1

        opened = [
            asyncio.create_task(collect(client, request(f"open{i}", [i + 1], max_tokens=250)))
            for i in range(5)
        ]
        await until(lambda: client.stats().num_running == 5)
        os.kill(client.pid, signal.SIGKILL)
        for task in opened:
            last = (await asyncio.wait_for(task, 10))[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert last.error == "the engine process is gone (exit code -9)"
        assert not client.is_alive()
        (refused,) = await collect(client, request("late", [1], max_tokens=1))
        assert refused.finish_reason is FinishReason.ERROR
        with pytest.raises(EngineError, match="gone"):
            await client.profile()
        await client.shutdown(0.1)

    asyncio.run(run())


def test_shutdown_waits_for_open_requests_and_then_ends_them() -> None:
    async def run(grace_s: float) -> TokenEvent:
        client = await start_engine(config(max_model_len=4096))
        task = asyncio.create_task(collect(client, request("a", [1], max_tokens=300)))
        await until(lambda: client.stats().num_steps > 0)
        await client.shutdown(grace_s)
        assert not psutil.pid_exists(client.pid)
        return (await task)[-1]

    assert asyncio.run(run(60.0)).finish_reason is FinishReason.LENGTH
    cut = asyncio.run(run(0.0))
    assert (cut.finish_reason, cut.error) == (FinishReason.ERROR, "the server is shutting down")


def test_a_model_that_cannot_be_served_is_told_to_the_one_who_started_it() -> None:
    async def run() -> None:
        with pytest.raises(UsageError, match="max_model_len=9999 exceeds"):
            await start_engine(config(max_model_len=9999))

    asyncio.run(run())


def test_the_engine_process_ends_when_its_parent_is_killed() -> None:
    code = """
        import asyncio
        from moeserve.engine.config import EngineConfig
        from moeserve.engine.process import start_engine

        async def main():
            client = await start_engine(EngineConfig(
                model="minigsm-tiny", load_format="dummy", max_model_len=256, num_pages=40))
            print(client.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(timeout=20)
        assert not child.is_running()
