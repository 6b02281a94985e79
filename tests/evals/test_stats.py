"""Proportions and power against scipy, published figures, and invariants on random inputs."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evalsuite.stats import power, proportion

# -- proportion ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "n", "expected"),
    [
        (0.29, 1319, 0.0125), (0.58, 1319, 0.0136), (0.85, 1319, 0.0098), (0.88, 1319, 0.0089),
        (0.92, 1319, 0.0075), (0.95, 1319, 0.0060), (0.88, 200, 0.0230), (0.92, 200, 0.0192),
    ],
)  # fmt: skip
def test_binomial_se_published(p: float, n: int, expected: float) -> None:
    assert proportion.binomial_se(p, n) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("n", "half"), [(50, 0.075), (200, 0.038), (1319, 0.015)])
def test_half_width_at_092(n: int, half: float) -> None:
    low, high = proportion.wilson_interval(round(0.92 * n), n)
    assert (high - low) / 2 == pytest.approx(half, abs=0.0035)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipy(case: tuple[int, int]) -> None:
    right, n = case
    interval = scipy_stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    low, high = proportion.wilson_interval(right, n)
    assert low == pytest.approx(interval.low, abs=1e-12)
    assert high == pytest.approx(interval.high, abs=1e-12)
    one_sided = scipy_stats.binomtest(right, n, alternative="greater").proportion_ci(
        0.95, method="wilson"
    )
    assert proportion.wilson_bound(right, n, 0.95, "lower") == pytest.approx(
        one_sided.low, abs=1e-12
    )


@pytest.mark.parametrize(
    ("threshold", "tolerance", "n", "needed"),
    [
        (0.9, 0.0, 1000, 900),
        (0.9, 0.0, 1319, 1188),  # 1187.1
        (0.7, 0.0, 10, 7),  # 0.7 * 10 is 7.000000000000001 in binary
        (0.92, 0.08, 1319, 1108),  # 0.84 * 1319 = 1107.96
        (0.3, 0.1, 10, 2),  # 0.3 - 0.1 is 0.19999999999999998 in binary
        (0.05, 0.08, 100, 0),
    ],
)
def test_min_correct_is_exact(threshold: float, tolerance: float, n: int, needed: int) -> None:
    assert proportion.min_correct(threshold, tolerance, n) == needed


@pytest.mark.parametrize("n", [1, 30, 330, 1319])
@pytest.mark.parametrize("p", [1e-6, 0.02, 0.5, 0.9, 0.96, 1.0])
def test_binomial_cdf_equals_scipy_stats(n: int, p: float) -> None:
    for k in {-1, 0, 1, n // 2, int(0.9 * n), n - 1, n, n + 1}:
        want = float(scipy_stats.binom.cdf(k, n, p))
        assert proportion.binomial_cdf(k, n, p) == pytest.approx(want, rel=1e-9, abs=1e-300)


# -- power -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "usual", "strict"),
    [
        (0.006, 0.53, 1.01),
        (0.02, 0.97, 1.84),
        (0.035, 1.28, 2.44),
        (0.05, 1.53, 2.92),
        (0.1, 2.17, 4.12),
    ],
)
def test_detectable_drop_published(d: float, usual: float, strict: float) -> None:
    see = power.smallest_detectable_drop
    assert 100 * see(1319, d, 0.05, 0.8) == pytest.approx(usual, abs=0.01)
    assert 100 * see(1319, d, 0.001, 0.95) == pytest.approx(strict, abs=0.01)


def test_required_questions_inverts() -> None:
    drop = power.smallest_detectable_drop(1319, 0.035, 0.05, 0.8)
    assert power.required_questions(drop * 1.0000001, 0.035, 0.05, 0.8) == 1319


@pytest.mark.parametrize(("noise_", "drop"), [(0.005, 0.01), (0.035, 0.0), (0.1, 0.02)])
def test_mcnemar_power_against_draws(noise_: float, drop: float) -> None:
    rng = np.random.default_rng(1)
    n, draws = 800, 20_000
    cells = rng.multinomial(n, [noise_ / 2 + drop, noise_ / 2, 1 - noise_ - drop], size=draws)
    p = scipy_stats.binom.sf(cells[:, 0] - 1, cells[:, 0] + cells[:, 1], 0.5)
    assert power.mcnemar_power(n, noise_, drop, 0.05) == pytest.approx((p <= 0.05).mean(), abs=0.01)


def test_detectable_drop_on_top_reaches_its_power_and_costs_more() -> None:
    drop = power.detectable_drop_on_top(1319, 0.035, 0.05, 0.8)
    assert power.mcnemar_power(1319, 0.035, drop, 0.05) >= 0.8
    assert power.mcnemar_power(1319, 0.035, drop - 1e-4, 0.05) < 0.8
    assert drop > power.smallest_detectable_drop(1319, 0.035, 0.05, 0.8)


def test_detectable_drop_from_se_agrees_with_single_runs() -> None:
    se = math.sqrt(0.035 / 1319)
    assert power.detectable_drop_from_se(se, 1319, 0.05, 0.8) == pytest.approx(
        power.detectable_drop_on_top(1319, 0.035, 0.05, 0.8), abs=0.0015
    )


def test_a_verdict_does_not_wait_for_scipy_stats() -> None:
    code = (
        "import sys\n"
        "from evalsuite.gates.absolute import Floor, threshold_gate\n"
        "from evalsuite.gates.base import Counts\n"
        "threshold_gate(Counts(1200, 0, 1319), Floor(0.9, 0.02, None, 0.05, 0.8))\n"
        "print('scipy.stats' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
