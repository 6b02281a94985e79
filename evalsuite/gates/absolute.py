"""Gates that compare one run with the config's number: `threshold` and `statistical`.

Receives `Counts` and the settings; returns `GateOutcome`. Comparison with a stored run is
`paired.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from evalsuite.gates.base import Counts, GateOutcome
from evalsuite.stats.proportion import (
    binomial_cdf,
    binomial_se,
    min_correct,
    normal_quantile,
    normal_tail,
    wilson_bound,
)
from evalsuite.verdict import Status


@dataclass(frozen=True)
class Floor:
    """The config's side of the comparison.

    Attributes:
        threshold: Expected accuracy.
        tolerance: What may be lost below it.
        sigma_run: Run-to-run standard deviation from `calibrate`, None where not measured.
        alpha: Asked false-alarm rate (used by `statistical`).
        power: Power at which the detectable drop is stated.
    """

    threshold: float
    tolerance: float
    sigma_run: float | None = None
    alpha: float = 0.05
    power: float = 0.8

    @property
    def value(self) -> float:
        """Threshold minus tolerance, for display; comparisons use exact decimals."""
        return round(self.threshold - self.tolerance, 12)

    def noise(self, n: int) -> float:
        """Standard deviation of one run's accuracy: measured, else binomial at the threshold."""
        if self.sigma_run is not None:
            return self.sigma_run
        return binomial_se(min(1.0, max(0.0, self.threshold)), n)


def false_alarm_rate(floor: Floor, n: int) -> float:
    """Rate at which a build whose true accuracy is the threshold falls below the floor.

    Exact binomial without a calibration; with one, normal with the measured sigma, because on
    fixed questions only the run-to-run noise moves the score.
    """
    needed = min_correct(floor.threshold, floor.tolerance, n)
    if floor.sigma_run is None:
        return binomial_cdf(needed - 1, n, floor.threshold) if needed > 0 else 0.0
    if floor.sigma_run == 0.0:
        return 0.0
    return normal_tail((floor.threshold - (needed - 0.5) / n) / floor.sigma_run)


def _missing(counts: Counts, needed: int, name: str) -> GateOutcome:
    low, high = counts.num_right / counts.n, (counts.num_right + counts.num_failed) / counts.n
    return GateOutcome(
        Status.ERROR,
        f"{counts.num_failed} of {counts.n} answers are missing and decide the outcome: accuracy "
        f"is between {low:.4f} and {high:.4f}, {name} needs {needed} right",
    )


def threshold_gate(counts: Counts, floor: Floor) -> GateOutcome:
    """Accuracy >= threshold - tolerance, compared as integers.

    Missing answers count as wrong and as right in turn; where the two disagree the outcome is
    ERROR, so that a FAIL is never made of failed requests.
    """
    n = counts.n
    needed = min_correct(floor.threshold, floor.tolerance, n)
    passes_low = counts.num_right >= needed
    passes_high = counts.num_right + counts.num_failed >= needed
    if passes_low != passes_high:
        return _missing(counts, needed, "the floor")
    sign = ">=" if passes_low else "<"
    missing = f" ({counts.num_failed} missing, either way)" if counts.num_failed else ""
    return GateOutcome(
        Status.PASS if passes_low else Status.FAIL,
        f"accuracy {counts.num_right}/{n} = {counts.num_right / n:.4f}{missing} {sign} floor "
        f"{floor.value:g} (threshold {floor.threshold:g} - tolerance {floor.tolerance:g}, "
        f"needs {needed} right)",
        alpha=false_alarm_rate(floor, n),
        power=floor.power,
        detectable_drop=max(0.0, floor.tolerance + normal_quantile(floor.power) * floor.noise(n)),
        detail={
            "needed": needed,
            "noise": floor.noise(n),
            "calibrated": floor.sigma_run is not None,
        },
    )


def _statistical_status(num_right: int, n: int, floor: Floor) -> Status:
    if floor.sigma_run is None:
        lower = wilson_bound(num_right, n, 1 - floor.alpha, "lower")
        upper = wilson_bound(num_right, n, 1 - floor.alpha, "upper")
    else:
        # Right answers come whole: without half a question the rate would be above alpha, by a
        # third on the embedded model (docs/verdicts.md).
        half = normal_quantile(1 - floor.alpha) * floor.sigma_run + 0.5 / n
        lower, upper = num_right / n - half, num_right / n + half
    if lower >= floor.value:
        return Status.PASS
    return Status.FAIL if upper < floor.value else Status.INCONCLUSIVE


def statistical_gate(counts: Counts, floor: Floor) -> GateOutcome:
    """PASS where the lower confidence bound reaches the floor, FAIL where the upper does not.

    In between the run is too small to say: INCONCLUSIVE. `alpha` bounds both wrong decisions for
    a build exactly at the floor.
    """
    n = counts.n
    status = _statistical_status(counts.num_right, n, floor)
    if _statistical_status(counts.num_right + counts.num_failed, n, floor) != status:
        return _missing(counts, min_correct(floor.threshold, floor.tolerance, n), "a clear result")
    noise = floor.noise(n)
    z_sum = normal_quantile(1 - floor.alpha) + normal_quantile(floor.power)
    text = {
        Status.PASS: "is above the floor",
        Status.FAIL: "is below the floor",
        Status.INCONCLUSIVE: "cannot be told from the floor",
    }[status]
    return GateOutcome(
        status,
        f"accuracy {counts.num_right}/{n} = {counts.num_right / n:.4f} {text} {floor.value:g} at "
        f"{1 - floor.alpha:.1%} confidence (noise {noise:.4f} a run)",
        alpha=floor.alpha,
        power=floor.power,
        detectable_drop=max(0.0, floor.tolerance + z_sum * noise),
        p_value=normal_tail((floor.value - counts.num_right / n) / noise) if noise > 0 else None,
        detail={"noise": noise, "calibrated": floor.sigma_run is not None},
    )
