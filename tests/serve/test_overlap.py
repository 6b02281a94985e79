"""Steps launched before the tokens of the last one are known: the same events as without.

The CPU's own steps are delivered late here: what the engine must get right is the same as on a
GPU, and the model runs at full speed.
"""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.engine.host_steps import HostSteps
from moeserve.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from moeserve.engine.scheduler import StepPlan
from moeserve.engine.sequence import Sequence
from moeserve.layers.attention import Array
from moeserve.runner.sampler import Sampled


class LateStep:
    """A step whose tokens the engine gets one step later, as on a GPU."""

    hidden = None

    def __init__(self, rows: list[Sequence], sampled: Sampled | None, may_wait: bool) -> None:
        self.rows = rows
        self.may_wait = may_wait
        self._sampled = sampled

    def sampled(self) -> Sampled | None:
        return self._sampled


class LateSteps:
    """Keeps the newest token of each block-table row, where pending ones are looked up."""

    num_padding_rows = 0

    def __init__(self, steps: HostSteps) -> None:
        self.steps = steps
        self.last: dict[int, int] = {}
        self.num_late = 0

    def num_nan_rows(self) -> int:
        return self.steps.num_nan_rows()

    def launch(self, plan: StepPlan, block_table: Array) -> LateStep:
        sequences = [*plan.decodes, *(seq for seq, _ in plan.prefills)]
        kept = [list(seq.tokens) for seq in sequences]
        for seq in sequences:
            seq.tokens = [t if t >= 0 else self.last[-1 - t] for t in seq.tokens]
        step = self.steps.launch(plan, block_table)
        sampled = step.sampled()
        for seq, tokens in zip(sequences, kept, strict=True):
            seq.tokens = tokens
        if sampled is not None:
            for seq, token in zip(step.rows, sampled.tokens, strict=True):
                self.last[seq.row] = token
        may_wait = all(row.is_greedy for row in step.rows)
        self.num_late += may_wait
        return LateStep(step.rows, sampled, may_wait)


CONFIG: dict[str, Any] = {
    "model": "minigsm-tiny",
    "load_format": "dummy",
    "hf_overrides": {"num_hidden_layers": 1, "eos_token_id": 0},
    "max_model_len": 128,
    "max_num_seqs": 8,
    "num_pages": 80,
    "num_threads": 1,
    "device": "cpu",
}
LENGTHS = [3, 20, 1, 40, 17, 33]
COUNTS = [40, 5, 60, 3, 30, 1]


def engine_of(is_late: bool, **changes: Any) -> Engine:
    engine = Engine(EngineConfig(**{**CONFIG, **changes}))
    if is_late:
        assert isinstance(engine.steps, HostSteps)
        engine.steps = LateSteps(engine.steps)
    return engine


def requests(**fields: Any) -> list[Request]:
    out = []
    for i, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        prompt = tuple((7 * i + 31 * k) % 1023 + 1 for k in range(length))
        values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": count, **fields}
        out.append(Request(str(i), prompt, SamplingParams(**values)))
    return out


def run(engine: Engine, wanted: list[Request], aborts: dict[int, str] | None = None) -> Any:
    for each in wanted:
        engine.add(each)
    events: dict[str, list[TokenEvent]] = {}
    for index in range(500):
        if not engine.has_work:
            return events
        if aborts and index in aborts:
            engine.abort(aborts[index])
        for event in engine.step().all_events():
            events.setdefault(event.request_id, []).append(event)
    raise AssertionError("the engine does not come to an end")


def summary(events: dict[str, list[TokenEvent]]) -> dict[str, object]:
    return {
        name: (
            [token for event in own for token in event.token_ids],
            own[-1].finish_reason,
            own[-1].stop_token_id,
            own[0].num_cached_tokens,
        )
        for name, own in events.items()
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return summary(run(engine_of(False), requests()))


def test_events_are_the_same_and_everything_is_given_back(expected: dict[str, Any]) -> None:
    engine = engine_of(True)
    assert summary(run(engine, requests())) == expected
    assert isinstance(engine.steps, LateSteps)
    assert engine.steps.num_late == 60
    assert engine.pool.num_used == 0
    assert engine.scheduler.running == engine.scheduler.waiting == []


def test_a_step_is_launched_before_the_last_ones_tokens_are_read() -> None:
    engine = engine_of(True)
    engine.add(requests()[3])
    assert engine.step().all_events() == []
    assert engine.stats().num_steps == 1
    counts = []
    while engine.has_work:
        counts.append(len(engine.step().all_events()))
    # Three tokens, a step each; the third needs no step after it.
    assert counts == [1, 1, 1]
    assert engine.stats().num_steps == 3


def test_what_a_stop_token_ends_is_not_continued(expected: dict[str, Any]) -> None:
    stop = expected["0"][0][10]
    late = engine_of(True)
    fields = {"stop_token_ids": (stop,)}
    ended = summary(run(late, requests(**fields)))
    assert ended == summary(run(engine_of(False), requests(**fields)))
    assert ended["0"][1] is FinishReason.STOP
    assert len(ended["0"][0]) <= 10
    assert late.pool.num_used == 0


def test_a_full_cache_preempts_and_continues_alike(expected: dict[str, Any]) -> None:
    engine = engine_of(True, num_pages=9)
    assert summary(run(engine, requests())) == expected
    assert engine.stats().num_preemptions > 0


def test_chunks_and_preemption_with_stops(expected: dict[str, Any]) -> None:
    fields = {"stop_token_ids": (expected["2"][0][25],)}
    changes = {"num_pages": 9, "max_num_batched_tokens": 16}
    late = summary(run(engine_of(True, **changes), requests(**fields)))
    assert late == summary(run(engine_of(False, **changes), requests(**fields)))


def test_aborting_while_a_step_flies_leaves_the_others_alone(expected: dict[str, Any]) -> None:
    engine = engine_of(True)
    events = summary(run(engine, requests(), aborts={4: "2", 6: "0"}))
    assert events.pop("2")[1] is FinishReason.ABORT
    assert events.pop("0")[1] is FinishReason.ABORT
    assert events == {n: e for n, e in expected.items() if n not in ("0", "2")}
    assert engine.pool.num_used == 0


def test_a_drawn_request_among_greedy_ones_changes_neither(expected: dict[str, Any]) -> None:
    drawn = Request("drawn", (5, 6), SamplingParams(temperature=1.0, seed=4, max_tokens=12))
    late = summary(run(engine_of(True), [*requests(), drawn]))
    assert late == summary(run(engine_of(False), [*requests(), drawn]))
    assert {n: e for n, e in late.items() if n != "drawn"} == expected


def test_pages_of_generated_tokens_are_found_by_a_later_request(expected: dict[str, Any]) -> None:
    engine = engine_of(True)
    run(engine, requests())
    known = (*requests()[2].prompt_ids, *expected["2"][0])
    follow = Request("again", known, SamplingParams(temperature=0.0, max_tokens=2))
    events = run(engine, [follow])["again"]
    # 61 tokens: three pages of 16 are full and computed.
    assert events[0].num_cached_tokens == 48
    plain = engine_of(False)
    assert summary(run(plain, [follow]))["again"][0] == summary({"again": events})["again"][0]


def test_a_failing_step_ends_what_flies_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, Any]
) -> None:
    engine = engine_of(True)
    for each in requests():
        engine.add(each)
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "hidden", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    failed = engine.fail_step("broken").all_events()
    assert {e.finish_reason for e in failed} == {FinishReason.ERROR}
    assert not engine.has_work
    assert engine.pool.num_used == 0
    assert summary(run(engine, requests())) == expected
