"""Serving with several ranks, as processes over gloo: the same texts as one rank.

The reference is one engine in this process. Deaths and hangs are `test_parallel_faults.py`.
"""

from __future__ import annotations

import asyncio
import time
from functools import cache
from itertools import chain
from typing import Any

import pytest
from parallel_helpers import (
    CONFIG,
    GREEDY,
    assert_same_scores,
    collect,
    ignoring_end,
    layout,
    questions,
    serving,
    tokens,
)

from moeserve.engine.engine import Engine
from moeserve.engine.process import ProcessEngine
from moeserve.engine.request import Request, SamplingParams, TokenEvent

# Case 36's lengths, and the one of a lonely request.
UNEVEN, LONELY = (1, 5, 200), 64


@cache
def one_rank(sampling: str = "greedy") -> list[list[TokenEvent]]:
    """Events of the questions (or of the first, for one of the special kinds) on one rank."""
    engine = Engine(CONFIG)
    for index, (prompt, params) in enumerate(asked(sampling)):
        engine.add(Request(str(index), prompt, params))
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step().all_events():
            events.setdefault(event.request_id, []).append(event)
    return [events[str(index)] for index in range(len(events))]


@cache
def asked(kind: str) -> list[tuple[tuple[int, ...], SamplingParams]]:
    prompts = questions()
    if kind == "greedy":
        return [(prompt, GREEDY) for prompt in prompts]
    if kind == "scored":
        scored = SamplingParams(
            max_tokens=12, temperature=0.0, num_logprobs=3, num_prompt_logprobs=2
        )
        return [(prompt, scored) for prompt in prompts[:3]]
    if kind == "drawn":
        drawn = [
            SamplingParams(max_tokens=24, temperature=0.8, seed=seed, top_p=0.9, ignore_eos=True)
            for seed in range(3)
        ]
        return list(zip(prompts[:3], drawn, strict=True))
    assert kind == "uneven"
    lengths = (*UNEVEN, LONELY)
    return [(prompts[i], ignoring_end(length)) for i, length in enumerate(lengths)]


async def ask(
    client: ProcessEngine, kind: str, only: slice = slice(None)
) -> list[list[TokenEvent]]:
    wanted = [
        collect(client, Request(f"{kind}{index}", prompt, params))
        for index, (prompt, params) in enumerate(asked(kind)[only])
    ]
    return list(await asyncio.wait_for(asyncio.gather(*wanted), 120))


async def check_texts(client: ProcessEngine) -> None:
    """Many questions at once, scores and draws: what one rank says."""
    texts = [tokens(events) for events in await ask(client, "greedy")]
    assert texts == [tokens(events) for events in one_rank()]
    assert_same_scores(await ask(client, "scored"), one_rank("scored"))
    drawn = [tokens(events) for events in await ask(client, "drawn")]
    assert drawn == [tokens(events) for events in one_rank("drawn")]


async def check_uneven(client: ProcessEngine) -> None:
    """Case 36: idle and uneven ranks, a silent time, a client that leaves."""
    expected = [tokens(events) for events in one_rank("uneven")]
    (lonely,) = await ask(client, "uneven", slice(3, 4))
    assert tokens(lonely) == expected[3]
    uneven = [tokens(events) for events in await ask(client, "uneven", slice(0, 3))]
    assert uneven == expected[:3]
    steps = client.stats().num_steps
    await asyncio.sleep(0.3)
    assert client.stats().num_steps == steps  # idle ranks do not spin
    leaving = client.generate(Request("leaves", questions()[0], ignoring_end(600)))
    seen = 0
    while seen < 10:
        seen += len((await anext(leaving)).token_ids)
    await leaving.aclose()
    (again,) = await ask(client, "uneven", slice(3, 4))
    assert tokens(again) == expected[3]
    deadline = time.monotonic() + 10
    while client.stats().num_running:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("tp", "dp", "ep"),
    [
        (2, 1, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        (1, 2, False),
        (1, 2, True),
        pytest.param(2, 2, True, marks=pytest.mark.slow),
        pytest.param(2, 2, False, marks=pytest.mark.slow),
        pytest.param(4, 1, False, marks=pytest.mark.slow),
        pytest.param(1, 3, True, marks=pytest.mark.slow),
    ],
)
def test_every_layout_says_what_one_rank_says(tp: int, dp: int, ep: bool) -> None:
    async def run() -> None:
        async with serving(layout(tp, dp, ep)) as client:
            await check_texts(client)
            await check_uneven(client)
            await check_layout(client, tp, dp, ep)

    asyncio.run(run())


async def check_layout(client: ProcessEngine, tp: int, dp: int, ep: bool) -> None:
    """What `/v1/backends` and `/v1/evidence` say of the ranks."""
    assert client.info.backends["parallel"] == {
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "expert_parallel_size": tp * dp if ep else 1,
    }
    ranks: Any = client.info.backends["ranks"]
    seats = [(rank["rank"], rank["dp_rank"], rank["tp_rank"]) for rank in ranks]
    assert seats == [(i, i // tp, i % tp) for i in range(tp * dp)]
    whole: Any = Engine(CONFIG).info().backends["ranks"]
    experts = [list(range(*rank["experts"])) for rank in ranks]
    if ep:
        assert sorted(chain.from_iterable(experts)) == list(range(32))
        assert all(rank["expert_width"] == 128 for rank in ranks)
    else:
        assert all(rank["experts"] == [0, 32] for rank in ranks)
        assert all(rank["expert_width"] == 128 // tp for rank in ranks)
    if tp * dp > 1 and (ep or tp > 1):
        # Only this rank's part of the weights is read.
        assert all(rank["weight_bytes"] < 0.6 * whole[0]["weight_bytes"] for rank in ranks)
    profile: Any = await asyncio.wait_for(client.profile(), 60)
    assert [rank["rank"] for rank in profile["ranks"]] == list(range(tp * dp))
    for rank in profile["ranks"]:
        assert any("moeserve" in name or "mm" in name for name in rank["decode"]["counts"])
