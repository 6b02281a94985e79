"""The GPU's step path, run by Triton's interpreter: the CPU's tokens, whatever the batch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from small_engine import HAS_GPU, engine_of, prompts, request, run, tokens

from moeserve.engine.device_steps import DeviceSteps
from moeserve.engine.request import FinishReason, Request
from moeserve.layers.attention import HostBatch
from moeserve.layers.attention_triton import find_shared_prefix
from moeserve.layers.step_inputs import StepSizes, prompt_blocks
from moeserve.runner.cuda_graph import Capturable, GraphLadder, graph_sizes
from moeserve.triton_kernels import linear

DEVICE = "cuda" if HAS_GPU else "cpu"
PROMPTS = prompts([3, 9, 1, 18, 5])
COUNTS = [5, 3, 6, 2, 4]


def requests(**fields: Any) -> list[Request]:
    pairs = enumerate(zip(PROMPTS, COUNTS, strict=True))
    return [request(str(i), prompt, count, **fields) for i, (prompt, count) in pairs]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {name: tokens(own) for name, own in run(engine_of("torch"), requests()).items()}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter takes milliseconds a program.
    monkeypatch.setattr("moeserve.triton_kernels.attention_decode.NUM_PROGRAMS", 4)


def test_greedy_tokens_equal_the_cpus(expected: dict[str, list[int]]) -> None:
    engine = engine_of(max_num_batched_tokens=24)
    events = run(engine, requests())
    assert {name: tokens(own) for name, own in events.items()} == expected
    assert [events[str(i)][-1].finish_reason for i in range(5)] == [FinishReason.LENGTH] * 5
    assert engine.pool.num_used == 0


def test_drawn_tokens_and_scores_equal_the_cpus() -> None:
    fields = {"temperature": 0.8, "seed": 3, "num_logprobs": 2, "presence_penalty": 0.5}
    mixed = [
        request("greedy", PROMPTS[0], 3),
        request("drawn", PROMPTS[1], 3, num_prompt_logprobs=1, **fields),
    ]
    ours, theirs = run(engine_of(enforce_eager=True), mixed), run(engine_of("torch"), mixed)
    assert {n: tokens(e) for n, e in ours.items()} == {n: tokens(e) for n, e in theirs.items()}
    scores = [
        [p.logprob for e in own["drawn"] for p in (*e.prompt_logprobs, *e.logprobs) if p]
        for own in (ours, theirs)
    ]
    assert len(scores[0]) == 8 + 3
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_a_common_prefix_is_read_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = [
        request(str(i), prompt, 3) for i, prompt in enumerate(prompts([3, 2, 1, 4], shared=32))
    ]
    plain = {n: tokens(e) for n, e in run(engine_of("torch"), batch).items()}
    monkeypatch.setattr("moeserve.layers.attention_triton.MIN_SHARED_READS", 32)
    engine = engine_of()
    assert isinstance(engine.steps, DeviceSteps)
    seen = []
    replay = engine.steps._replay
    monkeypatch.setattr(
        engine.steps, "_replay", lambda size, shared: (seen.append(shared), replay(size, shared))
    )
    assert {n: tokens(e) for n, e in run(engine, batch).items()} == plain
    assert any(seen)


@pytest.mark.parametrize("garbage", [1e30, float("nan")])
def test_padding_leaves_real_rows_bit_for_bit_the_same(garbage: float) -> None:
    """Three rows in a step of eight, whose other rows and unused slots hold zeros or garbage."""
    engine = engine_of()
    steps = engine.steps
    assert isinstance(steps, DeviceSteps)
    for i in range(3):
        engine.add(request(str(i), PROMPTS[i], 4))
    engine.step()
    plan = engine.scheduler.schedule()
    assert len(plan.decodes) == 3
    table = engine.scheduler.block_table
    assert steps.graphs is not None
    steps.graphs.sizes = [8]
    known = steps.last_tokens.clone()
    logits = steps.launch(plan, table).logits.clone()
    steps.last_tokens.copy_(known)
    for layer in engine.runner.model.attention_layers():
        layer.cache[0] = garbage
    steps.last_tokens[[i for i in range(8) if i not in {seq.row for seq in plan.decodes}]] = 2**30
    steps._logits.fill_(garbage)
    again = steps.launch(plan, table)
    assert torch.equal(again.logits, logits)
    assert steps.num_padding_rows == 10


def host(table: list[list[int]], lengths: list[int], page_size: int = 16) -> HostBatch:
    count = len(lengths)
    zeros = np.zeros(count, dtype=np.int64)
    return HostBatch(
        token_ids=zeros,
        positions=np.array(lengths) - 1,
        slot_mapping=zeros,
        cu_seqlens_q=np.arange(count + 1),
        seq_lens=np.array(lengths),
        block_table=np.array(table, dtype=np.int32),
        seq_ids=zeros,
        num_decodes=count,
        page_size=page_size,
    )


def test_the_prefix_of_most_is_found_and_strangers_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moeserve.layers.attention_triton.MIN_SHARED_READS", 96)
    same = [[7, 8, 9, 20 + i, 0] for i in range(6)]
    found = find_shared_prefix(host([*same, [7, 5, 5, 5, 5]], [60] * 6 + [75]))
    assert found.num_tokens == 48
    assert found.begins.tolist() == [48] * 6 + [0]
    assert found.line < 6
    # Pages alike past the new token's page are not a prefix: they are being written.
    found = find_shared_prefix(host([[7, 8, 9, 1, 0]] * 5, [48, 64, 64, 64, 64]))
    assert (found.num_tokens, found.begins.tolist()) == (48, [0, 48, 48, 48, 48])
    assert find_shared_prefix(host(same[:3], [60] * 3)).num_tokens == 0
    assert find_shared_prefix(host([[i, 1, 1] for i in range(9)], [40] * 9)).num_tokens == 0


def test_prompt_blocks_cover_every_row_once() -> None:
    batch = HostBatch(
        token_ids=np.zeros(28),
        positions=np.zeros(28),
        slot_mapping=np.zeros(28),
        cu_seqlens_q=np.array([0, 1, 2, 12, 13, 28]),
        seq_lens=np.array([5, 6, 10, 40, 15]),
        block_table=np.zeros((5, 4)),
        seq_ids=np.zeros(5),
        num_decodes=2,
        page_size=16,
    )
    blocks = prompt_blocks(batch, 4).tolist()
    assert blocks == [
        [2, 4, 2], [6, 4, 2], [10, 2, 2], [12, 1, 3],
        [13, 4, 4], [17, 4, 4], [21, 4, 4], [25, 3, 4],
    ]  # fmt: skip
    assert len({i for first, count, _ in blocks for i in range(first, first + count)}) == 26


def test_parts_of_the_step_buffer_are_aligned_and_apart() -> None:
    spans = StepSizes(7, 5, 3, 2).spans()
    ordered = sorted(spans.values())
    assert all(first % 4 == 0 for first, _ in ordered)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))
    assert StepSizes(7, 5, 3, 2).capacity((4, 10)) == spans["table"][0] + 40


@pytest.mark.parametrize("largest", [1, 8, 100, 256, 1408])
def test_the_ladder_ends_at_the_largest_batch_and_pads_by_an_eighth(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert len(sizes) <= 70
    previous = 0
    for size in sizes:
        assert size - previous - 1 <= max(0, size // 8)
        previous = size


def test_a_whole_step_runs_before_the_first_capture_and_samples_before_each() -> None:
    """What a layer makes at its first use would else be made, and not written, in a capture."""
    done: list[tuple[str, int]] = []

    def make(size: int, has_shared: bool) -> Capturable:
        assert not has_shared
        return Capturable(lambda: done.append(("run", size)), lambda: done.append(("sample", size)))

    class Once:
        def __init__(self, step: Capturable) -> None:
            step.sample()
            done.append(("capture", 0))

        def replay(self) -> None: ...

    GraphLadder([1, 4], make, Once).capture_all()
    assert done == [("run", 4), ("sample", 4), ("capture", 0), ("sample", 1), ("capture", 0)]


def test_a_fixed_projection_makes_nothing_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    projection = linear.FixedProjection(torch.device(DEVICE))
    monkeypatch.setattr(linear, "new_tickets", lambda device: pytest.fail("made at the first call"))
    x = torch.randn(3, 1024, device=DEVICE)
    weight = torch.randn(16, 1024, device=DEVICE)
    assert linear.num_parts(16, 1024) > 1
    torch.testing.assert_close(projection(x, weight), x @ weight.T, rtol=1e-4, atol=1e-3)
