"""Paired statistics against scipy, enumeration, published figures, and invariants."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evalsuite.stats import paired

OUTCOMES = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_equals_scipy_binomtest(lost: int, gained: int) -> None:
    total = lost + gained
    expected = (
        scipy_stats.binomtest(lost, total, 0.5, alternative="greater").pvalue if total else 1.0
    )
    assert paired.mcnemar_exact(lost, gained) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_mcnemar_by_hand() -> None:
    # 8 lost, 2 gained: (45 + 10 + 1) / 1024; the point itself is 45 / 1024.
    assert paired.mcnemar_exact(8, 2) == pytest.approx(56 / 1024)
    assert paired.mcnemar_midp(8, 2) == pytest.approx((56 - 22.5) / 1024)
    assert paired.mcnemar_exact(0, 0) == 1.0
    assert paired.mcnemar_two_sided(8, 2) == pytest.approx(112 / 1024)


@pytest.mark.parametrize(("d", "se"), [(0.006, 0.21), (0.02, 0.39), (0.035, 0.52), (0.1, 0.87)])
def test_paired_se_published(d: float, se: float) -> None:
    half = d * 1319 / 2
    assert 100 * paired.paired_se(half, half, 1319) == pytest.approx(se, abs=0.006)  # type: ignore[arg-type]


@given(OUTCOMES)
def test_swapping_sides(pairs: list[tuple[bool, bool]]) -> None:
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired.discordance(before, after), paired.discordance(after, before)
    assert (there.lost, there.gained) == (back.gained, back.lost)
    assert there.drop == -back.drop
    # P(X >= b) + P(X >= c) = 1 + P(X = b): the two one-sided tests share the observed point.
    point = scipy_stats.binom.pmf(there.lost, there.lost + there.gained, 0.5)
    total = paired.mcnemar_exact(there.lost, there.gained) + paired.mcnemar_exact(
        back.lost, back.gained
    )
    assert total == pytest.approx(1 + point)


def _repeats(
    rng: np.random.Generator, n: int, r: int, p: float
) -> dict[int, tuple[bool | None, ...]]:
    return {i: tuple(bool(x) for x in rng.random(r) < p) for i in range(n)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_permuting_and_padding_change_nothing(seed: int, rb: int, ra: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    base, cand = _repeats(rng, n, rb, 0.8), _repeats(rng, n, ra, 0.7)
    result = paired.repeats_test(base, cand)
    order = rng.permutation(n)
    shuffled = paired.repeats_test(
        {int(k): base[int(i)] for k, i in enumerate(order)},
        {int(k): cand[int(i)] for k, i in enumerate(order)},
    )
    assert shuffled.p_value == pytest.approx(result.p_value, rel=1e-9)
    # Equal pairs, on which both builds always agree, carry no information.
    padded = paired.repeats_test(
        {**base, **{n + k: (k % 2 == 0,) * rb for k in range(20)}},
        {**cand, **{n + k: (k % 2 == 0,) * ra for k in range(20)}},
    )
    assert padded.p_value == pytest.approx(result.p_value, rel=1e-9)
    assert padded.drop == pytest.approx(result.drop * n / (n + 20))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_swapping_repeated_builds_turns_the_drop(seed: int, rb: int, ra: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    base, cand = _repeats(rng, n, rb, 0.8), _repeats(rng, n, ra, 0.7)
    there, back = paired.repeats_test(base, cand), paired.repeats_test(cand, base)
    assert there.drop == pytest.approx(-back.drop)
    assert there.stderr == pytest.approx(back.stderr)
    # Each is a tail of one distribution, so that the two tails overlap in the observed point.
    assert there.p_sign_flip + back.p_sign_flip >= 1 - 1e-9
    assert there.p_stratified + back.p_stratified >= 1 - 1e-9


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 400))
def test_one_more_lost_answer_never_helps(lost: int, gained: int, equal: int) -> None:
    n = lost + gained + equal + 1
    assert paired.mcnemar_exact(lost + 1, gained) <= paired.mcnemar_exact(lost, gained)
    assert paired.mcnemar_exact(lost, gained + 1) >= paired.mcnemar_exact(lost, gained)
    better, worse = (paired.drop_upper_bound(b, gained, n, 0.8) for b in (lost, lost + 1))
    assert better < worse


@given(OUTCOMES)
def test_one_repeat_each_is_mcnemar(pairs: list[tuple[bool, bool]]) -> None:
    counts = paired.discordance([a for a, _ in pairs], [b for _, b in pairs])
    result = paired.repeats_test(
        {i: (a,) for i, (a, _) in enumerate(pairs)}, {i: (b,) for i, (_, b) in enumerate(pairs)}
    )
    expected = paired.mcnemar_exact(counts.lost, counts.gained)
    assert result.p_sign_flip == pytest.approx(expected, rel=1e-9)
    assert result.p_stratified == pytest.approx(expected, rel=1e-9)


def test_sign_flip_by_enumeration() -> None:
    differences = [3, -1, 2, 2, -3, 1, 0, 4]
    nonzero = [d for d in differences if d]
    sums = [
        sum(s * abs(d) for s, d in zip(signs, nonzero, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(nonzero))
    ]
    expected = sum(total >= sum(differences) for total in sums) / len(sums)
    assert paired.sign_flip_exact(differences) == pytest.approx(expected)
    assert paired.sign_flip_monte_carlo(differences) == pytest.approx(expected, abs=0.01)


def test_sign_flip_equals_scipy_permutation_test() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0.3, 1.0, 12)
    expected = scipy_stats.permutation_test(
        (x, np.zeros(12)), lambda a, b: np.sum(a - b), permutation_type="samples",
        alternative="greater", n_resamples=np.inf,
    ).pvalue  # fmt: skip
    assert paired.sign_flip_monte_carlo(list(x)) == pytest.approx(expected, abs=0.01)


def test_stratified_by_enumeration() -> None:
    # Two questions, 2 baseline and 2 candidate answers each.
    groups = [((True, True), (False, True)), ((True, False), (False, False))]
    observed = sum(sum(c) for _, c in groups)
    hits = total = 0
    for picks in itertools.product(itertools.combinations(range(4), 2), repeat=2):
        value = sum(
            sum((*b, *c)[i] for i in pick) for (b, c), pick in zip(groups, picks, strict=True)
        )
        hits, total = hits + (value <= observed), total + 1
    strata = [(sum(b), 2, sum(c), 2) for b, c in groups]
    assert paired.stratified_permutation(strata) == pytest.approx(hits / total)


def test_copies_of_one_run_add_no_certainty() -> None:
    # Ten bit-equal repeats are one run: by question the p-value stays that of a single run.
    before = dict.fromkeys(range(30), (True,))
    after = {i: (i >= 6,) for i in range(30)}
    single = paired.repeats_test(before, after).p_value
    copies = paired.repeats_test(
        {i: o * 10 for i, o in before.items()}, {i: o * 10 for i, o in after.items()}
    )
    assert single == pytest.approx(1 / 64)
    assert copies.p_value == pytest.approx(single)
    assert copies.p_stratified < single / 1000  # what the larger of the two protects from


def test_missing_repeats_are_left_out() -> None:
    result = paired.repeats_test(
        {0: (True, None), 1: (None, None), 2: (True, True)},
        {0: (False, None), 1: (True, True), 2: (True, False)},
    )
    assert result.n == 2
    assert result.drop == pytest.approx(0.75)


def test_drop_upper_bound_is_positive_without_a_flip() -> None:
    bound = paired.drop_upper_bound(0, 0, 1319, 0.95)
    assert 0.0005 < bound < 0.003
    assert paired.drop_upper_bound(40, 20, 1319, 0.95) == pytest.approx(
        20 / 1321 + 1.6449 * math.sqrt(62 - 400 / 1321) / 1321, abs=1e-6
    )
