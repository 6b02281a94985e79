"""Serving with several ranks, as processes over gloo: the same texts as one rank, and one end.

Every layout is started as the server starts it. The reference is one engine in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from moeserve.engine.board import Board, board_bytes
from moeserve.engine.config import EngineConfig
from moeserve.engine.dp import Lane, emptiest, merged_stats
from moeserve.engine.engine import Engine
from moeserve.engine.process import ProcessEngine, start_engine
from moeserve.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from moeserve.errors import Unsupported
from moeserve.models.config import load_model_spec
from moeserve.models.shards import check_divides, first_kv_head, vocabulary_rows
from moeserve.parallel import Parallel, Place
from moeserve.server.tokenizer import load_tokenizer
from moeserve.tiny import model_dir
from moeserve.tiny.minigsm import load_split

CONFIG = EngineConfig(
    model=str(model_dir()), max_model_len=1024, kv_cache_memory_bytes=1 << 26, dtype="float32"
)
NUM_QUESTIONS = 30
GREEDY = SamplingParams(max_tokens=96, temperature=0.0)
# Case 36's lengths, and the one of a lonely request.
UNEVEN, LONELY = (1, 5, 200), 64
STALLED = "stalled: a step has lasted more than 1 s; rank 1 did not take part"


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


def tokens(events: list[TokenEvent]) -> list[int]:
    assert events[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), events[-1].error
    return [token for event in events for token in event.token_ids]


async def collect(client: ProcessEngine, wanted: Request) -> list[TokenEvent]:
    return [event async for event in client.generate(wanted)]


async def ask(
    client: ProcessEngine, kind: str, only: slice = slice(None)
) -> list[list[TokenEvent]]:
    wanted = [
        collect(client, Request(f"{kind}{index}", prompt, params))
        for index, (prompt, params) in enumerate(asked(kind)[only])
    ]
    return list(await asyncio.wait_for(asyncio.gather(*wanted), 120))


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


async def check_texts(client: ProcessEngine) -> None:
    """Thirty questions at once, scores and draws: what one rank says."""
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
    await asyncio.sleep(1.0)
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


TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEVICE = EngineConfig(
    model="", max_model_len=128, num_pages=80, page_size=16, max_num_seqs=4, num_threads=1,
    max_num_batched_tokens=64, attention_backend="triton", dtype="float32",
)  # fmt: skip


def save_tiny(folder: Path, **changes: object) -> None:
    """A checkpoint of random weights: dummy weights differ between one rank and several."""
    overrides = TINY | changes
    engine = Engine(replace(
        DEVICE, model="minigsm-tiny", load_format="dummy", hf_overrides=overrides,
        attention_backend="torch", moe_backend="cpu", device="cpu",
    ))  # fmt: skip
    tensors = {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in engine.runner.model.destinations().items():
        # The checkpoint has one norm for all heads.
        is_spread = name.endswith(("q_norm.weight", "k_norm.weight"))
        tensors[name] = (tensor[0] if is_spread else tensor).clone()
        if name.endswith(".bias"):
            tensors[name].normal_(generator=generator)
    save_file(tensors, str(folder / "model.safetensors"))
    keys = json.loads((Path(model_dir()) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | overrides))


@pytest.mark.parametrize(
    ("tp", "dp", "dense_layers"),
    [(2, 1, [0]), pytest.param(1, 2, [0, 1], marks=pytest.mark.slow)],
)
def test_dense_layers_biases_and_an_odd_untied_vocabulary_are_cut_too(
    tmp_path: Path, tp: int, dp: int, dense_layers: list[int]
) -> None:
    """Also a model without any experts, whose DP ranks have nothing to wait for."""
    save_tiny(
        tmp_path,
        num_hidden_layers=2,
        mlp_only_layers=dense_layers,
        attention_bias=True,
        tie_word_embeddings=False,
        vocab_size=131,
    )
    config = replace(DEVICE, model=str(tmp_path), attention_backend="auto", page_size=0)
    prompts = [tuple((5 * i + 3 * j) % 130 + 1 for j in range(20)) for i in range(3)]
    scored = SamplingParams(max_tokens=30, temperature=0.0, num_logprobs=2, ignore_eos=True)

    async def run(config: EngineConfig) -> list[list[TokenEvent]]:
        async with serving(config) as client:
            wanted = [collect(client, Request(str(i), p, scored)) for i, p in enumerate(prompts)]
            return list(await asyncio.wait_for(asyncio.gather(*wanted), 60))

    parallel = replace(
        config, tensor_parallel_size=tp, data_parallel_size=dp, has_expert_parallel=dp > 1
    )
    assert_same_scores(asyncio.run(run(parallel)), asyncio.run(run(config)))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_the_steps_of_a_gpu_agree_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, dp: int
) -> None:
    """Steps ahead of the host and padded decode steps, run by Triton's interpreter over gloo."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    save_tiny(tmp_path)
    prompts = [tuple((7 * i * j + 3 * i + j) % 120 + 1 for j in range(5 + 7 * i)) for i in range(4)]
    params = [
        SamplingParams(max_tokens=5 + i, temperature=0.7 * (i == 2), seed=i, ignore_eos=True)
        for i in range(4)
    ]

    async def texts(config: EngineConfig) -> list[list[int]]:
        async with serving(replace(config, model=str(tmp_path))) as client:
            wanted = [
                collect(client, Request(str(i), prompt, params[i]))
                for i, prompt in enumerate(prompts)
            ]
            found = [tokens(events) for events in await asyncio.gather(*wanted)]
            # One rank alone, the other without a request.
            return [*found, tokens(await collect(client, Request("z", prompts[0], params[3])))]

    parallel = replace(
        DEVICE, tensor_parallel_size=tp, data_parallel_size=dp, has_expert_parallel=dp > 1
    )
    assert asyncio.run(texts(parallel)) == asyncio.run(texts(DEVICE))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, "=3 does not divide num_attention_heads=4"),
        (
            {"tensor_parallel_size": 4, "hf_overrides": {"num_key_value_heads": 3}},
            "=4 neither divides num_key_value_heads=3 nor is a multiple",
        ),
        (
            {"tensor_parallel_size": 4, "hf_overrides": {"moe_intermediate_size": 126}},
            "=4 does not divide moe_intermediate_size=126; with --enable-expert-parallel",
        ),
    ],
)
def test_a_size_that_does_not_cut_the_model_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    spec = load_model_spec(CONFIG.model, changes.get("hf_overrides"))
    with pytest.raises(Unsupported, match=message):
        check_divides(spec, changes["tensor_parallel_size"], is_expert_parallel=False)


def test_every_rank_refuses_alike_and_the_starter_is_told_once() -> None:
    async def run() -> None:
        with pytest.raises(Unsupported, match="=3 does not divide num_attention_heads=4"):
            await start_engine(layout(3, 1, ep=False))

    asyncio.run(run())


def test_heads_and_vocabulary_rows_of_each_rank() -> None:
    spec = load_model_spec(CONFIG.model)  # two key and value heads, 1024 rows
    ranks = [Parallel(tp_size=4, tp_rank=rank) for rank in range(4)]
    assert [first_kv_head(spec, rank) for rank in ranks] == [0, 0, 1, 1]
    assert [vocabulary_rows(10, rank) for rank in ranks] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert [vocabulary_rows(5, rank) for rank in ranks] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_requests_go_to_the_emptiest_lane_and_counters_add_up() -> None:
    lanes = [Lane(), Lane(), Lane()]
    chosen = []
    for _ in range(4):
        lane = emptiest(lanes)
        lane.num_open += 1
        chosen.append(lanes.index(lane))
    assert chosen == [0, 1, 2, 0]
    lanes[1].num_open -= 1
    assert lanes.index(emptiest(lanes)) == 1
    lanes[2].new.append(Request("a", (1,), GREEDY))
    assert merged_stats(lanes).num_waiting == 1


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
