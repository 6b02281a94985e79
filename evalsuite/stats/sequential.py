"""Looking more than once: SPRT, spending over planned repeats, Holm over jobs.

Receives error rates and counts, returns boundaries, decisions and adjusted p-values. Which
repeats are run is decided by `gates/paired.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from evalsuite.stats.proportion import normal_quantile, normal_tail

SpendingName = Literal["obrien-fleming", "pocock"]


@dataclass(frozen=True)
class Sprt:
    """Wald's sequential test of a healthy against a broken accuracy, questions in random order.

    Attributes:
        p_healthy: Accuracy of a build that works.
        p_broken: Accuracy at which it is plainly broken.
        alpha: Rate at which a healthy build is called broken.
        beta: Rate at which a broken build is called healthy.
    """

    p_healthy: float
    p_broken: float
    alpha: float = 0.001
    beta: float = 0.001

    def __post_init__(self) -> None:
        """Refuse rates that make no test."""
        if not 0.0 < self.p_broken < self.p_healthy < 1.0:
            raise ValueError(
                f"needs 0 < broken < healthy < 1, got {self.p_broken} and {self.p_healthy}"
            )
        if not 0.0 < self.alpha < 0.5 or not 0.0 < self.beta < 0.5:
            raise ValueError(f"needs error rates in (0, 0.5), got {self.alpha}, {self.beta}")

    @property
    def step_right(self) -> float:
        """Log-likelihood ratio of a right answer (negative)."""
        return math.log(self.p_broken / self.p_healthy)

    @property
    def step_wrong(self) -> float:
        """Log-likelihood ratio of a wrong answer (positive)."""
        return math.log((1 - self.p_broken) / (1 - self.p_healthy))

    @property
    def upper(self) -> float:
        """At or above: broken."""
        return math.log((1 - self.beta) / self.alpha)

    @property
    def lower(self) -> float:
        """At or below: healthy."""
        return math.log(self.beta / (1 - self.alpha))

    def llr(self, num_right: int, num_wrong: int) -> float:
        """Log-likelihood ratio of broken against healthy after these answers."""
        return num_right * self.step_right + num_wrong * self.step_wrong

    def decide(self, num_right: int, num_wrong: int) -> Literal["broken", "healthy", "go on"]:
        """Decision after these answers."""
        llr = self.llr(num_right, num_wrong)
        if llr >= self.upper:
            return "broken"
        return "healthy" if llr <= self.lower else "go on"

    def expected_questions(self, p: float) -> float:
        """Wald's approximation of the questions asked when the true accuracy is one of the two."""
        drift = p * self.step_right + (1 - p) * self.step_wrong
        if p == self.p_healthy:
            ends = (1 - self.alpha) * self.lower + self.alpha * self.upper
        elif p == self.p_broken:
            ends = self.beta * self.lower + (1 - self.beta) * self.upper
        else:
            raise ValueError("the approximation holds at p_healthy and p_broken only")
        return ends / drift

    def questions_if_all_wrong(self) -> int:
        """Questions until "broken" when no answer is right."""
        return math.ceil(self.upper / self.step_wrong)


def outcome_decided(num_right: int, num_asked: int, total: int, needed: int) -> str:
    """Whether the rest can still change `num_right >= needed`: "pass", "fail" or "open"."""
    if num_right >= needed:
        return "pass"
    return "fail" if num_right + (total - num_asked) < needed else "open"


def _obrien_fleming(t: float, alpha: float) -> float:
    return 2.0 * normal_tail(normal_quantile(1 - alpha / 2) / math.sqrt(t))


def _pocock(t: float, alpha: float) -> float:
    return alpha * math.log(1.0 + (math.e - 1.0) * t)


_SPENDING: dict[str, Callable[[float, float], float]] = {
    "obrien-fleming": _obrien_fleming,
    "pocock": _pocock,
}


def information_fractions(baseline_repeats: int, max_repeats: int) -> list[float]:
    """Information of the paired difference after each candidate repeat, over that of the last.

    Var = s^2 (1 / R_baseline + 1 / k). The baseline is shared by all looks, so the first look
    already holds most of the information; increments stay independent (Cov(D_j, D_k) = Var(D_k)
    for j < k), which is all that the spending bounds ask.
    """
    if baseline_repeats < 1 or max_repeats < 1:
        raise ValueError(f"needs repeats >= 1, got {baseline_repeats} and {max_repeats}")
    last = 1 / baseline_repeats + 1 / max_repeats
    return [last / (1 / baseline_repeats + 1 / k) for k in range(1, max_repeats + 1)]


def spending_levels(
    fractions: Sequence[float], alpha: float, spending: SpendingName = "pocock"
) -> list[float]:
    """Nominal one-sided level of each look of a plan fixed in advance (Lan and DeMets).

    Args:
        fractions: Increasing information fractions, the last one 1.
        alpha: Rate over the whole plan.
        spending: "pocock" spends evenly (few looks, most information in the first);
            "obrien-fleming" keeps nearly all for the last look.

    Returns:
        Levels to which each look's p-value is compared; their joint false-alarm rate is `alpha`.
    """
    import numpy as np

    if any(b <= a for a, b in itertools.pairwise(fractions)) or not fractions:
        raise ValueError(f"information fractions must increase, got {list(fractions)}")
    if not math.isclose(fractions[-1], 1.0):
        raise ValueError(f"the last information fraction must be 1, got {fractions[-1]}")
    normal = NormalDist()
    spend = _SPENDING[spending]
    cumulative = [spend(t, alpha) for t in fractions[:-1]] + [alpha]
    # Density of the score B(t) = Z sqrt(t) on the paths that no earlier look stopped.
    grid = np.linspace(-8.0, 8.0, 4001)
    step = float(grid[1] - grid[0])
    first = fractions[0]
    levels = [cumulative[0]]
    bound = normal.inv_cdf(1 - levels[0]) * math.sqrt(first)
    density = np.exp(-(grid**2) / (2 * first)) / math.sqrt(2 * math.pi * first)
    density[grid >= bound] = 0.0
    for k in range(1, len(fractions)):
        sd = math.sqrt(fractions[k] - fractions[k - 1])
        width = math.ceil(8 * sd / step)
        kernel = np.exp(-((np.arange(-width, width + 1) * step) ** 2) / (2 * sd * sd))
        kernel /= kernel.sum()
        density = np.convolve(density, kernel, mode="same")
        tail = np.cumsum(density[::-1])[::-1] * step
        wanted = cumulative[k] - cumulative[k - 1]
        bound = float(np.interp(-wanted, -tail, grid))
        levels.append(normal_tail(bound / math.sqrt(fractions[k])))
        density[grid >= bound] = 0.0
    return levels


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p-values, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
