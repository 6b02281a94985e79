"""Error rates of gates on simulated runs: ours, vLLM's rule and TensorRT-LLM's on the same draws.

Receives a cell (true drop, noise, questions), returns how often each gate fails the build. The
command and the tables are `simulate.py`.

The process: a set of fixed questions, most of them answered the same way every time; a share
2 D is a coin toss each run, so that two runs of one build differ on a share D; a fault turns a
share `drop` of the stable right answers into wrong ones, on top of that noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evalsuite.gates.absolute import Floor
from evalsuite.gates.paired import PairedPlan, paired_gate, wants_repeat
from evalsuite.stats.noise import sigma_from_discordance, tolerance_for
from evalsuite.stats.rules import VLLM_TOLERANCE, TrtllmRule
from evalsuite.verdict import Status

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Flags = NDArray[np.bool_]

# Accuracy of the simulated build; Qwen3-30B-A3B's threshold, where the field's rules are used.
ACCURACY = 0.88


@dataclass(frozen=True)
class Cell:
    """One setting of the simulation.

    Attributes:
        drop: True drop, a fraction of all questions.
        noise: Discordant fraction of two runs of an unchanged build.
        n: Questions.
    """

    drop: float
    noise: float
    n: int

    @property
    def num_coins(self) -> int:
        """Questions that are a coin toss each run."""
        return round(2 * self.noise * self.n)

    @property
    def num_broken(self) -> int:
        """Stable right answers that the fault turns wrong."""
        return round(self.drop * self.n)

    @property
    def num_stable(self) -> int:
        """Questions right in every run of the healthy build."""
        return round(ACCURACY * self.n - self.num_coins / 2)

    @property
    def reference(self) -> float:
        """The healthy build's true accuracy on these questions."""
        return (self.num_stable + self.num_coins / 2) / self.n


@dataclass(frozen=True)
class Draws:
    """Counts of many simulated pairs of runs; arrays of equal length."""

    lost: NDArray[np.int64]
    gained: NDArray[np.int64]
    right: NDArray[np.int64]


def draw(cell: Cell, count: int, rng: np.random.Generator) -> Draws:
    """Simulate `count` pairs of one baseline run and one candidate run."""
    coins = rng.multinomial(cell.num_coins, [0.25] * 4, size=count)
    both, lost, gained = coins[:, 0], coins[:, 1], coins[:, 2]
    return Draws(
        lost=lost + cell.num_broken,
        gained=gained,
        right=cell.num_stable - cell.num_broken + both + gained,
    )


def _paired(alpha: float) -> Callable[[Cell, Draws], Flags]:
    def fails(cell: Cell, draws: Draws) -> Flags:
        from scipy.stats import binom

        p = binom.sf(draws.lost - 1, draws.lost + draws.gained, 0.5)
        return (draws.lost > 0) & (p <= alpha)  # type: ignore[no-any-return]

    return fails


def _calibrated(alpha: float) -> Callable[[Cell, Draws], Flags]:
    """The threshold gate with the tolerance that `calibrate` suggests for this rate."""

    def fails(cell: Cell, draws: Draws) -> Flags:
        tolerance = tolerance_for(alpha, sigma_from_discordance(cell.noise, cell.n), cell.n)
        return draws.right / cell.n < cell.reference - tolerance

    return fails


def _trtllm(cell: Cell, draws: Draws) -> Flags:
    return draws.right / cell.n < cell.reference + TrtllmRule(cell.n).offset


def _vllm(cell: Cell, draws: Draws) -> Flags:
    return draws.right / cell.n < cell.reference - VLLM_TOLERANCE


GATES: dict[str, Callable[[Cell, Draws], Flags]] = {
    "paired 5 %": _paired(0.05),
    "paired 0.1 %": _paired(0.001),
    "calibrated threshold 0.1 %": _calibrated(0.001),
    "TensorRT-LLM": _trtllm,
    "vLLM -8 points": _vllm,
}


def fail_rates(cell: Cell, count: int, seed: int) -> dict[str, float]:
    """Share of simulated pairs that each gate fails, all gates on the same draws."""
    import numpy as np

    draws = draw(cell, count, np.random.default_rng([seed, cell.n, cell.num_coins]))
    return {name: float(fails(cell, draws).mean()) for name, fails in GATES.items()}


@dataclass(frozen=True)
class PlanRates:
    """What a plan of repeats does: how often it fails a build, and how many repeats it took."""

    fail_rate: float
    mean_repeats: float
    draws: int


def plan_rates(
    cell: Cell, plan: PairedPlan, baseline_repeats: int, draws: int, seed: int
) -> PlanRates:
    """Run the real `paired` gate with its plan of repeats on simulated builds."""
    import numpy as np

    rng = np.random.default_rng(seed)
    floor = Floor(0.0, 0.0)
    failed = looks = 0
    for _ in range(draws):
        baseline = _runs(cell, 0, baseline_repeats, rng)
        candidate = _runs(cell, cell.num_broken, plan.max_repeats, rng)
        before = dict(enumerate(map(tuple, baseline.T.tolist())))
        for look in range(1, plan.max_repeats + 1):
            after = dict(enumerate(map(tuple, candidate[:look].T.tolist())))
            outcome = paired_gate(after, {"baseline": before}, floor, plan)
            if not wants_repeat(outcome, after, plan):
                break
        failed += outcome.status is Status.FAIL
        looks += look
    return PlanRates(failed / draws, looks / draws, draws)


def _runs(cell: Cell, num_broken: int, repeats: int, rng: np.random.Generator) -> Flags:
    import numpy as np

    runs = np.zeros((repeats, cell.n), dtype=bool)
    runs[:, num_broken : cell.num_stable] = True
    coins = slice(cell.num_stable, cell.num_stable + cell.num_coins)
    runs[:, coins] = rng.random((repeats, cell.num_coins)) < 0.5
    return runs


def upper_rate(rate: float, draws: int, confidence: float = 0.95) -> float:
    """Clopper-Pearson upper bound of a simulated rate."""
    from scipy.stats import beta

    hits = round(rate * draws)
    return 1.0 if hits == draws else float(beta.ppf(confidence, hits + 1, draws - hits))


def detectable(alpha: float, noise: float, n: int, power: float = 0.8) -> float:
    """The drop that the verdict states for this cell, rounded up to whole questions."""
    from evalsuite.stats.power import detectable_drop_on_top

    return math.ceil(detectable_drop_on_top(n, noise, alpha, power) * n) / n
