"""Statistics of looking more than once: SPRT, early decisions, alpha spending."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from evalsuite.stats import proportion, sequential

# p0, p1, error rate (both), questions if healthy, if broken, if every answer is wrong.
SPRT_TABLE = [
    (0.88, 0.80, 0.01, 199, 174, 9), (0.88, 0.80, 0.001, 305, 266, 14),
    (0.88, 0.84, 0.01, 702, 648, 16), (0.88, 0.84, 0.001, 1074, 991, 25),
    (0.92, 0.84, 0.01, 159, 131, 7), (0.92, 0.84, 0.001, 244, 200, 10),
    (0.58, 0.50, 0.01, 350, 347, 27), (0.58, 0.50, 0.001, 536, 532, 40),
]  # fmt: skip


@pytest.mark.parametrize(("p0", "p1", "rate", "healthy", "broken", "all_wrong"), SPRT_TABLE)
def test_sprt_published(
    p0: float, p1: float, rate: float, healthy: int, broken: int, all_wrong: int
) -> None:
    test = sequential.Sprt(p0, p1, rate, rate)
    assert test.expected_questions(p0) == pytest.approx(healthy, abs=1)
    assert test.expected_questions(p1) == pytest.approx(broken, abs=1)
    assert test.questions_if_all_wrong() == all_wrong
    assert test.decide(0, all_wrong) == "broken"
    assert test.decide(0, all_wrong - 1) == "go on"


def test_sprt_error_rates_by_simulation() -> None:
    test = sequential.Sprt(0.88, 0.8, 0.01, 0.01)
    rng = np.random.default_rng(0)
    for p, wrong_end in ((0.88, "broken"), (0.8, "healthy")):
        right = rng.random((4000, 2000)) < p
        llr = np.where(right, test.step_right, test.step_wrong).cumsum(axis=1)
        up = np.where((llr >= test.upper).any(1), (llr >= test.upper).argmax(1), 10**6)
        down = np.where((llr <= test.lower).any(1), (llr <= test.lower).argmax(1), 10**6)
        errors = (up < down).mean() if wrong_end == "broken" else (down < up).mean()
        assert errors <= 0.014  # Wald's bounds are conservative; 0.01 + 2.5 standard errors


@pytest.mark.parametrize("bad", [(0.8, 0.88, 0.01), (0.88, 0.8, 0.6), (1.0, 0.8, 0.01)])
def test_sprt_refuses_nonsense(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="needs"):
        sequential.Sprt(bad[0], bad[1], bad[2])


def test_outcome_decided() -> None:
    assert sequential.outcome_decided(90, 95, 100, 90) == "pass"
    assert sequential.outcome_decided(84, 95, 100, 90) == "fail"
    assert sequential.outcome_decided(85, 95, 100, 90) == "open"


def test_spending_single_look_is_the_plain_test() -> None:
    assert sequential.spending_levels([1.0], 0.05) == [0.05]


@pytest.mark.parametrize(
    ("spending", "expected"),
    [
        # Lan-DeMets bounds for 5 equal looks at one-sided 0.025, as tabulated (z): OBF-like
        # 4.877 3.357 2.680 2.290 2.031; Pocock-like 2.438 2.427 2.410 2.397 2.386.
        ("obrien-fleming", [4.877, 3.357, 2.680, 2.290, 2.031]),
        ("pocock", [2.438, 2.427, 2.410, 2.397, 2.386]),
    ],
)
def test_spending_bounds_published(
    spending: sequential.SpendingName, expected: list[float]
) -> None:
    levels = sequential.spending_levels([0.2, 0.4, 0.6, 0.8, 1.0], 0.025, spending)
    bounds = [proportion.normal_quantile(1 - level) for level in levels]
    assert bounds == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("spending", ["pocock", "obrien-fleming"])
def test_spending_keeps_its_rate(spending: sequential.SpendingName) -> None:
    fractions = sequential.information_fractions(baseline_repeats=2, max_repeats=4)
    levels = np.array(sequential.spending_levels(fractions, 0.05, spending))
    rng = np.random.default_rng(5)
    draws = 200_000
    # D_k = mean of k candidate runs - mean of 2 baseline runs, unit variance a run.
    runs = rng.normal(size=(draws, 4))
    means = runs.cumsum(1) / np.arange(1, 5)
    base = rng.normal(size=(draws, 2)).mean(1, keepdims=True)
    z = (base - means) / np.sqrt(0.5 + 1 / np.arange(1, 5))
    rejected = (scipy_stats.norm.sf(z) <= levels).any(1).mean()
    assert rejected == pytest.approx(0.05, abs=0.002)


def test_holm_published_example() -> None:
    # Holm 1979's own steps: 0.01, 0.02, 0.03, 0.04, 0.05 of five tests.
    assert sequential.holm([0.03, 0.01, 0.05, 0.02, 0.04]) == pytest.approx(
        [0.09, 0.05, 0.09, 0.08, 0.09]
    )
    assert sequential.holm([]) == []
