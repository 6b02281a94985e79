from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moeserve.engine.request import Logprob, Request, SamplingParams
from moeserve.engine.sequence import Sequence
from moeserve.runner.sampler import sample, score_tokens, uniform

V = 50
GOLDEN = [0.36818951565166946, 0.9140224628703029, 0.3922164624235318]


def row(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **fields: Any) -> Sequence:
    fields.setdefault("temperature", 1.0)
    seq = Sequence(Request("r", prompt, SamplingParams(max_tokens=100, **fields)), 0, (0,), 1000)
    seq.tokens.extend(output)
    return seq


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_is_the_argmax_and_the_lowest_id_of_a_tie() -> None:
    x = logits(3)
    x[1, 7] = x[1, 9] = 50.0
    got = sample(x, [row(temperature=0.0)] * 3)
    assert got.tokens == [int(x[0].argmax()), 7, int(x[2].argmax())]
    assert got.bad_rows == frozenset()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_best_are_reported_and_others_unchanged(temperature: float) -> None:
    x = logits(4)
    rows = [row(temperature=temperature, seed=3)] * 4
    clean = sample(x.clone(), rows).tokens
    x[1, 30] = float("nan")
    x[2] = float("-inf")
    got = sample(x, rows)
    assert got.bad_rows == {1, 2}
    assert [got.tokens[0], got.tokens[3]] == [clean[0], clean[3]]


def test_the_uniform_stream_is_fixed_and_even() -> None:
    # Golden: a stream that moves would change every seeded reply ever recorded.
    assert uniform([1, 1, 2], [0, 1, 0]).tolist() == pytest.approx(GOLDEN, abs=1e-15)
    draws = uniform([42] * 40000, range(40000))
    assert abs(draws.mean() - 0.5) < 0.006
    assert np.abs(np.histogram(draws, bins=20, range=(0, 1))[0] / 2000 - 1).max() < 0.12
    seeds = uniform(range(40000), [0] * 40000)
    assert abs(np.corrcoef(seeds[:-1], seeds[1:])[0, 1]) < 0.02
    assert uniform([-1], [0]) == uniform([2**64 - 1], [0])


@pytest.mark.parametrize("fields", [{}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_frequencies_follow_the_distribution(fields: dict[str, float]) -> None:
    x = logits(1)[0] / 2
    probs = torch.softmax(x / 0.8, -1)
    kept = torch.ones(V, dtype=torch.bool)
    order = probs.argsort(descending=True)
    if "top_k" in fields:
        kept = torch.zeros(V, dtype=torch.bool).index_fill_(0, order[:10], True)
    if "top_p" in fields:
        before = probs[order].cumsum(0) - probs[order]
        kept = torch.zeros(V, dtype=torch.bool).index_fill_(0, order[before < 0.9], True)
    if "min_p" in fields:
        kept = probs >= 0.05 * probs.max()
    assert 1 < kept.sum() <= V
    expected = torch.where(kept, probs, 0.0)
    expected /= expected.sum()
    n = 8000
    rows = [row(temperature=0.8, seed=i, **fields) for i in range(n)]
    counts = np.bincount(sample(x.repeat(n, 1), rows).tokens, minlength=V)
    assert counts[~kept.numpy()].sum() == 0
    error = np.abs(counts / n - expected.numpy())
    assert error.max() < 4.5 * np.sqrt(0.25 / n)


def test_a_seeded_row_draws_the_same_in_any_batch() -> None:
    x = logits(40)
    rows = [
        row(seed=i, output=(1,) * (i % 5), **fields)
        for i, fields in enumerate([{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}] * 10)
    ]
    together = sample(x.clone(), rows).tokens
    alone = [sample(x[i : i + 1].clone(), [r]).tokens[0] for i, r in enumerate(rows)]
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    mixed = sample(x[shuffled].clone(), [rows[i] for i in shuffled]).tokens
    assert together == alone
    assert mixed == [together[i] for i in shuffled]


def test_the_stream_moves_on_with_each_token_and_differs_between_unseeded_rows() -> None:
    x = torch.zeros(1, V)
    seeded = [sample(x.clone(), [row(seed=5, output=(1,) * i)]).tokens[0] for i in range(30)]
    assert len(set(seeded)) > 10
    assert seeded[:10] == [
        sample(x.clone(), [row(seed=5, output=(1,) * i)]).tokens[0] for i in range(10)
    ]
    assert len({row().seed for _ in range(20)}) == 20


def test_a_temperature_next_to_zero_does_not_overflow() -> None:
    x = logits(1) * 1e4
    assert sample(x.clone(), [row(temperature=1e-4, seed=1)]).tokens == [int(x.argmax())]


def test_penalties_and_biases_have_their_published_values() -> None:
    x = torch.zeros(1, V)
    x[0, 3], x[0, 4], x[0, 5] = 2.0, 2.0, -1.0
    r = row(
        prompt=(5,),
        output=(3, 3, 4),
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias={9: 0.75},
    )
    sample(x, [r])
    # 2 / 2 - 0.5 - 2 * 0.25; 2 / 2 - 0.5 - 0.25; -1 * 2; untouched
    assert x[0, [3, 4, 5, 9, 10]].tolist() == [0.0, 0.25, -2.0, 0.75, 0.0]


def test_ends_are_masked_until_min_tokens() -> None:
    x = torch.zeros(1, V)
    x[0, 0], x[0, 8], x[0, 9] = 9.0, 8.0, 7.0
    fields: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (8,)}
    assert sample(x.clone(), [row(output=(5,), **fields)]).tokens == [9]
    assert sample(x.clone(), [row(output=(5, 5), **fields)]).tokens == [0]


def test_log_probabilities_are_of_raw_logits_with_rank_and_best() -> None:
    x = logits(3)
    raw = torch.log_softmax(x, -1)
    rows = [
        row(temperature=0.0),
        row(temperature=0.0, num_logprobs=2, logit_bias={4: 100.0}),
        row(seed=2, num_logprobs=0),
    ]
    got = sample(x, rows)
    assert got.tokens[1] == 4
    assert got.scores is not None
    assert got.scored_rows == {1: 0, 2: 1}
    biased = got.scores.as_logprob(0, 2, Logprob)
    assert biased.logprob == pytest.approx(raw[1, 4].item(), abs=1e-5)
    assert biased.rank == int((raw[1] > raw[1, 4]).sum()) + 1
    best = raw[1].topk(2)
    assert [i for i, _ in biased.top] == best.indices.tolist()
    assert [v for _, v in biased.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    drawn = got.scores.as_logprob(1, 0, Logprob)
    assert drawn.top == ()
    assert drawn.logprob == pytest.approx(raw[2, got.tokens[2]].item(), abs=1e-5)


def test_more_log_probabilities_than_tokens_are_all_of_them() -> None:
    scores = score_tokens(logits(1), [3], V + 10)
    assert len(scores.top_ids[0]) == V


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_is_no_fault_of_the_model(
    penalty: float, temperature: float
) -> None:
    x = logits(2)
    x[0, 1] = 30.0
    rows = [row(repetition_penalty=penalty, temperature=temperature, seed=1)] * 2
    got = sample(x, rows)
    assert got.bad_rows == frozenset()
    assert all(0 <= token < V for token in got.tokens)
    if penalty < 1:
        assert got.tokens[0] == 1  # raised beyond every other token
