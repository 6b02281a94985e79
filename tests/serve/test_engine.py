"""The engine in this process: whatever surrounds a request, its tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from two_layer_engine import config, continuations, drain, prompts, request, tokens

from moeserve.engine.engine import NOT_FINITE, Engine
from moeserve.engine.request import FinishReason, TokenEvent
from moeserve.errors import Unsupported, UsageError


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each prompt by itself, whole, without any cache."""
    engine = Engine(config(has_prefix_caching=False))
    return [continuations(engine, [prompt])[0] for prompt in prompts(12)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_prefix_caching": False},
        {"max_num_batched_tokens": 24},
        {"max_num_seqs": 3},
        {"num_pages": 30, "has_prefix_caching": False},
        {"num_pages": 30},
        {"page_size": 32},
        {"has_chunked_prefill": False, "max_num_batched_tokens": 128},
    ],
    ids=str,
)
def test_a_greedy_continuation_does_not_depend_on_what_surrounds_it(
    changes: dict[str, Any], alone: list[list[int]]
) -> None:
    engine = Engine(config(**changes))
    assert continuations(engine, prompts(12)) == alone
    # Again, now with whatever the cache has kept.
    assert continuations(engine, prompts(12)[::-1]) == alone[::-1]
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 0, 0.0)
    if changes.get("num_pages") == 30 and not changes.get("has_prefix_caching", True):
        assert stats.num_preemptions > 0
    if changes.get("has_prefix_caching", True):
        assert stats.prefix_hit_tokens >= 12 * 64
    else:
        assert stats.prefix_hit_tokens == 0


def test_dense_rows_and_gathered_pages_agree(alone: list[list[int]]) -> None:
    assert continuations(Engine(config(attention_backend="torch")), prompts(12)) == alone
    engine = Engine(config(attention_backend="torch"))
    engine.runner.attention.rows.max_bytes = 0  # type: ignore[attr-defined]
    assert continuations(engine, prompts(12)) == alone


def test_requests_that_come_and_go_leave_others_alone(alone: list[list[int]]) -> None:
    engine = Engine(config())
    batch = prompts(12)
    got: dict[str, list[int]] = {str(i): [] for i in range(12)}
    for step in range(200):
        if step % 4 == 0 and step // 4 < 12:
            number = step // 4
            engine.add(request(str(number), batch[number], max_tokens=40))
            engine.add(request(f"noise{number}", batch[number][::-1], max_tokens=100))
        if step % 4 == 3:
            engine.abort(f"noise{step // 4 - 2}")
        for event in engine.step().all_events():
            got.setdefault(event.request_id, []).extend(event.token_ids)
    assert [got[str(i)] for i in range(12)] == alone
    drain(engine)
    assert engine.pool.num_used == 0


def test_the_first_event_says_what_was_cached_and_every_token_comes_once() -> None:
    engine = Engine(config())
    engine.add(request("a", prompts(1)[0], max_tokens=3))
    first = drain(engine)["a"]
    engine.add(request("b", prompts(1)[0], max_tokens=3))
    second = drain(engine)["b"]
    assert [e.num_cached_tokens for e in first] == [0, 0, 0]
    assert [e.num_cached_tokens for e in second] == [64, 0, 0]
    assert [len(e.token_ids) for e in second] == [1, 1, 1]
    assert second[-1].finish_reason is FinishReason.LENGTH
    assert tokens(first) == tokens(second)


def test_a_stop_token_ends_the_sequence_and_is_told_apart_from_its_text() -> None:
    engine = Engine(config())
    plain = continuations(engine, prompts(1))[0]
    stop = plain[5]
    at = plain.index(stop)
    engine.add(request("a", prompts(1)[0], max_tokens=40, stop_token_ids=(stop,), num_logprobs=1))
    events = drain(engine)["a"]
    assert tokens(events) == plain[:at]
    last = events[-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, stop)
    assert last.token_ids == ()
    assert [len(e.logprobs) for e in events] == [1] * (at + 1)
    assert last.logprobs[0].top[0][0] == stop


def test_the_context_limit_ends_a_sequence() -> None:
    engine = Engine(config(max_model_len=100))
    engine.add(request("a", [5] * 90, max_tokens=40))
    engine.add(request("b", [5] * 100, max_tokens=40))
    events = drain(engine)
    assert len(tokens(events["a"])) == 10
    assert events["b"] == [TokenEvent("b", finish_reason=FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 257, {}, "the prompt has 257 tokens; max_model_len is 256"),
        ([1, 1024], {}, "token id 1024 is outside the vocabulary of 1024"),
        ([-1], {}, "token id -1 is outside"),
        ([1], {"stop_token_ids": (5000,)}, "token id 5000 is outside"),
        ([1], {"logit_bias": {1024: 1.0}}, "token id 1024 is outside"),
    ],
)
def test_a_request_that_cannot_run_gets_an_error_and_others_run(
    prompt: list[int], fields: dict[str, Any], message: str
) -> None:
    engine = Engine(config())
    engine.add(request("bad", prompt, max_tokens=4, **fields))
    engine.add(request("good", [1, 2, 3], max_tokens=4))
    events = drain(engine)
    assert events["bad"][0].finish_reason is FinishReason.ERROR
    assert message in events["bad"][0].error
    assert len(tokens(events["good"])) == 4


@pytest.mark.parametrize("budget", [256, 20])
def test_prompt_scores_do_not_depend_on_chunks_cache_or_company(budget: int) -> None:
    engine = Engine(config(max_num_batched_tokens=budget))
    prompt = prompts(1)[0]
    continuations(engine, [prompt])
    engine.add(request("score", prompt, max_tokens=0, num_prompt_logprobs=2))
    engine.add(request("other", prompts(3)[2], max_tokens=10))
    engine.add(request("both", prompt, max_tokens=3, num_prompt_logprobs=0, num_logprobs=0))
    events = drain(engine)
    (only,) = events["score"]
    assert (only.token_ids, only.finish_reason) == ((), FinishReason.LENGTH)
    assert only.prompt_logprobs[0] is None
    assert len(only.prompt_logprobs) == len(prompt)
    reference = Engine(config(has_prefix_caching=False))
    reference.add(request("score", prompt, max_tokens=0, num_prompt_logprobs=2))
    (expected,) = drain(reference)["score"]
    for left, right in zip(only.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert left is not None
        assert right is not None
        assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
        assert (left.rank, left.top[0][0]) == (right.rank, right.top[0][0])
    both = events["both"]
    assert len(both[0].prompt_logprobs) == len(prompt)
    assert [len(e.prompt_logprobs) for e in both[1:]] == [0, 0]
    assert both[0].num_cached_tokens == 0


def test_a_prompt_score_survives_preemption() -> None:
    engine = Engine(config(num_pages=20, max_num_batched_tokens=40, has_prefix_caching=False))
    for i in range(3):
        engine.add(request(str(i), prompts(3)[i], max_tokens=60, num_prompt_logprobs=0))
    events = drain(engine)
    assert engine.stats().num_preemptions > 0
    for i in range(3):
        sent = [e.prompt_logprobs for e in events[str(i)] if e.prompt_logprobs]
        assert [len(s) for s in sent] == [len(prompts(3)[i])]
        assert len(tokens(events[str(i)])) == 60


def test_seeded_sampling_survives_company_and_preemption() -> None:
    fields = {"temperature": 1.0, "seed": 11}
    reference = Engine(config(has_prefix_caching=False))
    expected = [continuations(reference, [p], **fields)[0] for p in prompts(6)]
    crowded = Engine(config(num_pages=30, has_prefix_caching=False))
    assert continuations(crowded, prompts(6), **fields) == expected
    assert crowded.stats().num_preemptions > 0


def test_a_row_without_finite_logits_ends_alone_and_leaves_nothing_behind(
    alone: list[list[int]],
) -> None:
    engine = Engine(config(num_pages=60))
    # Only the bad prompt holds token 1000.
    engine.runner.model.destinations()["model.embed_tokens.weight"][1000] = float("nan")
    engine.runner.model.head = type(engine.runner.model.head)(1024, 128, torch.float32)  # type: ignore[attr-defined]
    engine.runner.model.head.weight.data.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
    batch = [[t for t in p if t != 1000] for p in prompts(5)]
    expected = continuations(engine, batch)
    engine.add(request("bad", [*batch[0], 1000, 7], max_tokens=10))
    assert continuations(engine, batch) == expected
    engine.add(request("bad2", [1000] * 200, max_tokens=10))
    events = drain(engine)
    assert events["bad2"][-1].error == NOT_FINITE
    # Every page is used again by somebody; none may hold a NaN.
    for _ in range(3):
        assert continuations(engine, [p[::-1] for p in batch] + batch)[5:] == expected
    assert engine.pool.num_used == 0


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(config())
    engine.add(request("a", [1, 2, 3], max_tokens=5))
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "hidden", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
        (event,) = engine.fail_step("broken").all_events()
    assert (event.finish_reason, event.error) == (FinishReason.ERROR, "broken")
    assert engine.pool.num_used == 0
    assert len(continuations(engine, [[1, 2, 3]])[0]) == 40


def test_abort_frees_everything_at_any_time() -> None:
    engine = Engine(config(max_num_seqs=2))
    for name in "abc":
        engine.add(request(name, prompts(1)[0], max_tokens=100))
    engine.step()
    for name in ("c", "a", "b", "unknown"):
        engine.abort(name)
    events = drain(engine)
    assert {n: e[-1].finish_reason for n, e in events.items()} == dict.fromkeys(
        "abc", FinishReason.ABORT
    )
    assert engine.pool.num_used == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_model_len": 5000}, UsageError, "max_model_len=5000 exceeds .*=4096"),
        ({"num_pages": 10}, UsageError, "max_model_len=256 does not fit: .* 144 tokens"),
        ({"max_num_batched_tokens": 8}, UsageError, "=8 is less than max_num_seqs=16"),
        ({"dtype": "fp8"}, UsageError, "dtype 'fp8' is not one of"),
        ({"attention_backend": "x"}, UsageError, "attention backend 'x' is unknown"),
        ({"moe_backend": "tritn"}, UsageError, "Did you mean 'triton'"),
        ({"is_deterministic": True}, Unsupported, "deterministic mode: attention backend"),
        ({"tensor_parallel_size": 2}, Unsupported, "one engine runs one rank"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(config(**changes))


def test_an_unset_context_length_is_what_the_cache_can_hold() -> None:
    engine = Engine(config(max_model_len=0, num_pages=11))
    assert engine.info().max_model_len == 160
    assert Engine(config(max_model_len=0)).info().max_model_len == 4096
