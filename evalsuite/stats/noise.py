"""Run-to-run noise of one build on fixed questions, from repeats.

Receives one outcome matrix (repeats x questions), returns sigma and discordance. What the
numbers are written into is `calibrate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from evalsuite.stats.proportion import normal_quantile


@dataclass(frozen=True)
class Noise:
    """Noise of one configuration.

    Attributes:
        sigma_run: Standard deviation of one run's accuracy that a gate should count with.
        sigma_questions: From the flips: sqrt(D / 2n); precise, blind to shifts common to a run.
        sigma_repeats: Sample standard deviation of the accuracies; sees such shifts, imprecise.
        discordant: Mean share of questions on which two repeats differ.
        mean_accuracy: Over all repeats.
        repeats: Repeats used.
        n: Questions.
        p_overdispersed: Chance of accuracies spread at least this wide if only single questions
            flip; below 0.01 the repeats' own spread is used for `sigma_run`.
    """

    sigma_run: float
    sigma_questions: float
    sigma_repeats: float
    discordant: float
    mean_accuracy: float
    repeats: int
    n: int
    p_overdispersed: float


def sigma_from_discordance(discordant: float, n: int) -> float:
    """sqrt(D / 2n): two runs of one build differ by twice one run's variance."""
    return math.sqrt(discordant / (2 * n))


def tolerance_for(alpha: float, sigma_run: float, n: int) -> float:
    """Tolerance below the true accuracy at which an unchanged build fails at rate `alpha`.

    z sigma plus half a question: right answers come whole, and without it the rate would be
    above alpha.
    """
    return normal_quantile(1 - alpha) * sigma_run + 0.5 / n


def measure_noise(repeats: Sequence[Sequence[bool]]) -> Noise:
    """Estimate the noise from two or more repeats of the same questions."""
    from scipy.stats import chi2

    count, n = len(repeats), len(repeats[0]) if repeats else 0
    if count < 2 or n < 1 or any(len(row) != n for row in repeats):
        raise ValueError("noise needs two or more repeats of the same, one or more questions")
    accuracies = [sum(row) / n for row in repeats]
    # Pairs of repeats that differ on a question with s right of R: s (R - s) of R (R - 1) / 2.
    pairs = count * (count - 1) / 2
    differing = sum(
        right * (count - right) for right in (sum(column) for column in zip(*repeats, strict=True))
    )
    discordant = differing / pairs / n
    by_questions = sigma_from_discordance(discordant, n)
    by_repeats = stdev(accuracies)
    p_over = (
        float(chi2.sf((count - 1) * (by_repeats / by_questions) ** 2, count - 1))
        if by_questions > 0
        else 1.0
    )
    return Noise(
        sigma_run=by_repeats if p_over < 0.01 else by_questions,
        sigma_questions=by_questions,
        sigma_repeats=by_repeats,
        discordant=discordant,
        mean_accuracy=sum(accuracies) / count,
        repeats=count,
        n=n,
        p_overdispersed=p_over,
    )
