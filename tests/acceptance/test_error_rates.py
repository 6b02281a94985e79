"""Our gates keep their stated error rates on simulated runs; the two public rules beside them.

A sample runs always; the full grid is marked slow and is part of `make acceptance`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from evalsuite.gates.paired import PairedPlan
from evalsuite.simulate import DROPS, NOISES, SIZES, render
from evalsuite.simulation import (
    ACCURACY,
    Cell,
    detectable,
    draw,
    fail_rates,
    plan_rates,
    upper_rate,
)
from evalsuite.stats.power import mcnemar_power

STATED = {"paired 5 %": 0.05, "paired 0.1 %": 0.001, "calibrated threshold 0.1 %": 0.001}
# Four standard errors: over some hundred cells one is expected to miss in thirty thousand.
SIGMAS = 4.0


def assert_rates(n: int, noise: float, draws: int) -> None:
    rates = fail_rates(Cell(0.0, noise, n), draws, seed=1)
    for name, stated in STATED.items():
        room = SIGMAS * np.sqrt(stated * (1 - stated) / draws)
        assert rates[name] <= stated + room, (name, n, noise)
    for name, alpha in (("paired 5 %", 0.05), ("paired 0.1 %", 0.001)):
        drop = detectable(alpha, noise, n)
        seen = fail_rates(Cell(drop, noise, n), draws, seed=2)[name]
        assert seen >= 0.8 - SIGMAS * np.sqrt(0.16 / draws), (name, n, noise)


@pytest.mark.parametrize(("n", "noise"), [(200, 0.01), (500, 0.05), (1319, 0.035)])
def test_sample_of_the_grid(n: int, noise: float) -> None:
    assert_rates(n, noise, 20_000)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "noise"), list(itertools.product(SIZES, NOISES)))
def test_whole_grid(n: int, noise: float) -> None:
    assert_rates(n, noise, 400_000)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "noise"), list(itertools.product(SIZES, NOISES)))
def test_detection_grows_with_the_drop(n: int, noise: float) -> None:
    rates = [fail_rates(Cell(drop, noise, n), 100_000, seed=3) for drop in DROPS]
    for name in rates[0]:
        series = [rate[name] for rate in rates]
        assert all(b >= a - 0.01 for a, b in itertools.pairwise(series)), name


def test_the_simulated_process_is_what_it_says() -> None:
    cell = Cell(drop=0.02, noise=0.035, n=1319)
    draws = draw(cell, 50_000, np.random.default_rng(0))
    assert cell.reference == pytest.approx(ACCURACY, abs=0.5 / 1319)
    assert draws.right.mean() / 1319 == pytest.approx(ACCURACY - 0.02, abs=0.001)
    assert (draws.lost + draws.gained).mean() / 1319 == pytest.approx(0.055, abs=0.001)
    healthy = draw(Cell(0.0, 0.035, 1319), 50_000, np.random.default_rng(0))
    # Two runs differ on D; one run's spread is sqrt(D / 2n).
    assert (healthy.right / 1319).std() == pytest.approx(np.sqrt(0.035 / 2 / 1319), rel=0.02)


def test_public_rules_miss_what_ours_see() -> None:
    rates = fail_rates(Cell(0.02, 0.035, 1319), 20_000, seed=4)
    assert rates["paired 5 %"] > 0.9
    assert rates["TensorRT-LLM"] < 0.01
    assert rates["vLLM -8 points"] == 0.0
    seven = fail_rates(Cell(0.07, 0.035, 1319), 20_000, seed=4)
    assert seven["vLLM -8 points"] < 0.01
    assert seven["paired 0.1 %"] == 1.0


def test_simulation_agrees_with_the_power_formula() -> None:
    # Questions are fixed here and drawn there, so the formula is the wider of the two.
    cell = Cell(0.02, 0.035, 1319)
    seen = fail_rates(cell, 40_000, seed=5)["paired 5 %"]
    assert seen >= mcnemar_power(1319, 0.035, 0.02, 0.05) - 0.01


def test_planned_repeats_sample() -> None:
    plan = PairedPlan(alpha=0.05, power=0.8, max_repeats=4)
    healthy = plan_rates(Cell(0.0, 0.05, 300), plan, baseline_repeats=2, draws=120, seed=6)
    assert healthy.fail_rate <= 0.05 + 3.1 * np.sqrt(0.05 * 0.95 / 120)
    assert 1.0 <= healthy.mean_repeats < 3.0
    broken = plan_rates(Cell(0.06, 0.05, 300), plan, baseline_repeats=2, draws=60, seed=6)
    assert broken.fail_rate > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.005, 0.1])
@pytest.mark.parametrize("baseline_repeats", [1, 4])
def test_planned_repeats_keep_their_rate(noise: float, baseline_repeats: int) -> None:
    plan = PairedPlan(alpha=0.05, power=0.8, max_repeats=4)
    found = plan_rates(Cell(0.0, noise, 1319), plan, baseline_repeats, draws=400, seed=7)
    assert found.fail_rate <= 0.05 + SIGMAS * np.sqrt(0.05 * 0.95 / 400)


def test_upper_rate_is_clopper_pearson() -> None:
    assert upper_rate(0.0, 3000) == pytest.approx(1 - 0.05 ** (1 / 3000))
    assert upper_rate(1.0, 10) == 1.0


def test_report_text_names_machine_and_command() -> None:
    text = render(draws=200, plan_draws=1, seed=1, plot_name="verdicts.svg")
    assert "python -m evalsuite.simulate --draws 200" in text
    assert "cores" in text
    assert text.count("\n| 1319 |") == len(NOISES) * (2 + len(DROPS) - 1)
