"""Noise of repeats, the field's rules, signs that agree: published figures and invariants."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evalsuite.stats import agreement, noise, rules, sequential

# -- noise and rules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "sigma"), [(0.006, 0.15), (0.02, 0.28), (0.035, 0.36), (0.05, 0.44), (0.1, 0.62)]
)
def test_sigma_published(d: float, sigma: float) -> None:
    assert 100 * noise.sigma_from_discordance(d, 1319) == pytest.approx(sigma, abs=0.006)


def test_noise_of_a_known_process() -> None:
    rng = np.random.default_rng(7)
    p = rng.choice([0.0, 0.3, 1.0], size=1319, p=[0.05, 0.1, 0.85])
    runs = rng.random((40, 1319)) < p
    measured = noise.measure_noise(runs.tolist())
    true_sigma = math.sqrt((p * (1 - p)).sum()) / 1319
    assert measured.sigma_questions == pytest.approx(true_sigma, rel=0.05)
    assert measured.sigma_repeats == pytest.approx(true_sigma, rel=0.35)
    assert measured.discordant == pytest.approx(2 * (p * (1 - p)).sum() / 1319, rel=0.05)
    assert measured.sigma_run == measured.sigma_questions


def test_noise_sees_shifts_of_whole_runs() -> None:
    # Whole runs shift together: half of the runs lose the same 60 questions.
    rows = [[not (run % 2 and i < 60) for i in range(1000)] for run in range(10)]
    measured = noise.measure_noise(rows)
    assert measured.p_overdispersed < 0.01
    assert measured.sigma_run == measured.sigma_repeats == pytest.approx(0.0316, abs=1e-4)


def test_noise_needs_two_repeats() -> None:
    with pytest.raises(ValueError, match="two or more"):
        noise.measure_noise([[True]])


@pytest.mark.parametrize(
    ("n", "offset", "theta"),
    [(1319, -3.203, 4.841), (512, -5.14, 7.77), (1024, -3.63, 5.49), (4096, -1.82, 2.75)],
)
def test_trtllm_rule_published(n: int, offset: float, theta: float) -> None:
    rule = rules.TrtllmRule(n)
    assert 100 * rule.offset == pytest.approx(offset, abs=0.01)
    assert 100 * rule.theta == pytest.approx(theta, abs=0.01)
    assert rule.passes(0.85, 0.88) is (100 * rule.offset <= -3)


def test_vllm_rule() -> None:
    assert rules.vllm_passes(0.81, 0.88)
    assert not rules.vllm_passes(0.79, 0.88)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 60))
def test_noise_does_not_know_an_order(seed: int, repeats: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((repeats, n)) < 0.8
    found = noise.measure_noise(rows.tolist())
    turned = noise.measure_noise(rows[rng.permutation(repeats)][:, rng.permutation(n)].tolist())
    assert turned.discordant == pytest.approx(found.discordant)
    assert turned.sigma_run == pytest.approx(found.sigma_run)
    # Questions that never flip thin the discordance out and widen nothing.
    padded = noise.measure_noise(np.hstack([rows, np.ones((repeats, n), bool)]).tolist())
    assert padded.discordant == pytest.approx(found.discordant / 2)
    assert padded.sigma_questions == pytest.approx(found.sigma_questions / 2)


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=12), st.randoms())
def test_holm_does_not_know_an_order(p_values: list[float], random: Random) -> None:
    adjusted = sequential.holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))
    order = random.sample(range(len(p_values)), len(p_values))
    assert sequential.holm([p_values[i] for i in order]) == [adjusted[i] for i in order]


# -- agreement -------------------------------------------------------------------------------

SHIFTS = st.lists(
    st.tuples(*[st.floats(-2, 2, allow_subnormal=False)] * 2), min_size=1, max_size=50
)


@given(SHIFTS)
def test_agreement_is_symmetric(pairs: list[tuple[float, float]]) -> None:
    one, two = [a for a, _ in pairs], [b for _, b in pairs]
    found = agreement.sign_agreement(one, two, 1e-6)
    assert -1 <= found <= 1
    assert agreement.sign_agreement(two, one, 1e-6) == found
    # Swapping the builds turns both shifts; swapping the first two replays turns one.
    assert agreement.sign_agreement([-x for x in one], [-x for x in two], 1e-6) == found
    assert agreement.sign_agreement([-x for x in one], two, 1e-6) == -found
    # Tokens in another order are the same tokens, of another size too; equal ones say nothing.
    turned = agreement.sign_agreement(one[::-1], two[::-1], 1e-6)
    assert turned == pytest.approx(found)
    assert agreement.sign_agreement([3 * x for x in one], two, 3e-6) == pytest.approx(
        agreement.sign_agreement(one, [x if abs(x) > 3e-6 else 0.0 for x in two], 1e-6)
    )
    padded = agreement.sign_agreement([*one, *[0.0] * 7], [*two, *[1.0] * 7], 1e-6)
    assert padded == pytest.approx(found * len(one) / (len(one) + 7))


@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.5, 0.9])
def test_signs_of_correlated_normals_agree_as_scipy_says(correlation: float) -> None:
    cov = [[1, correlation], [correlation, 1]]
    both_low = scipy_stats.multivariate_normal.cdf([0, 0], cov=cov)
    expected = 4 * both_low - 1  # P(same sign) - P(other sign)
    assert agreement.common_share(expected) == pytest.approx(correlation, abs=1e-5)
    rng = np.random.default_rng(1)
    one, two = rng.multivariate_normal([0, 0], cov, 40_000).T
    found = agreement.sign_agreement(list(one), list(two), 0.0)
    assert found == pytest.approx(expected, abs=0.02)


def test_common_shift_in_noise() -> None:
    # Half of the variance is common: a shift as large as the noise; a third of the signs agree.
    assert agreement.shift_in_noise(1 / 3) == pytest.approx(1.0)
    assert agreement.shift_in_noise(0.0) == agreement.shift_in_noise(-0.4) == 0.0
    assert agreement.shift_in_noise(1.0) > 1e6
