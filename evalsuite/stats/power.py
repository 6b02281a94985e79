"""What a paired test can see: smallest detectable drop and the questions it takes.

Receives sizes, discordance and error rates, returns drops as fractions. Two readings of
"discordant": the field's formula takes it as the whole discordance of the pair, the drop
included; a real fault adds its drop on top of the noise, which is harder to see.
"""

from __future__ import annotations

import math

from evalsuite.stats.proportion import normal_quantile


def smallest_detectable_drop(n: int, discordant: float, alpha: float, power: float) -> float:
    """(z_alpha + z_power) sqrt(D / n), the usual planning formula (normal approximation).

    Args:
        n: Questions.
        discordant: Whole discordant fraction of the pair, drop included.
        alpha: One-sided false-alarm rate.
        power: Chance to see the drop.
    """
    _check(n, discordant, alpha, power)
    return (normal_quantile(1 - alpha) + normal_quantile(power)) * math.sqrt(discordant / n)


def required_questions(drop: float, discordant: float, alpha: float, power: float) -> int:
    """Questions needed to see `drop`; the inverse of `smallest_detectable_drop`."""
    if drop <= 0:
        raise ValueError(f"a drop to be seen must be positive, got {drop}")
    _check(1, discordant, alpha, power)
    z_sum = normal_quantile(1 - alpha) + normal_quantile(power)
    return math.ceil(discordant * (z_sum / drop) ** 2)


def mcnemar_power(n: int, noise: float, drop: float, alpha: float) -> float:
    """Exact rejection rate of the exact one-sided McNemar test.

    Args:
        n: Questions.
        noise: Discordant fraction of two runs of an unchanged build, half of it either way.
        drop: True drop on top: this share of the questions goes from right to wrong.
        alpha: Level of the test.
    """
    import numpy as np
    from scipy.stats import binom

    total = min(1.0, noise + drop)
    if total == 0.0:
        return 0.0
    pairs = np.arange(n + 1)
    critical = binom.isf(alpha, pairs, 0.5) + 1  # smallest count whose tail is <= alpha
    share_lost = (noise / 2 + drop) / total
    rejected = binom.sf(critical - 1, pairs, share_lost)
    return float((binom.pmf(pairs, n, total) * np.nan_to_num(rejected)).sum())


def detectable_drop_on_top(n: int, noise: float, alpha: float, power: float) -> float:
    """Smallest drop, on top of the noise, that the exact McNemar test sees at `power`.

    Exact by bisection to 1e-5; 1.0 where no drop is seen.
    """
    _check(n, noise, alpha, power)
    low, high = 0.0, 1.0 - noise
    if mcnemar_power(n, noise, high, alpha) < power:
        return 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        if mcnemar_power(n, noise, middle, alpha) < power:
            low = middle
        else:
            high = middle
    return high


def detectable_drop_from_se(stderr: float, n: int, alpha: float, power: float) -> float:
    """Smallest drop on top of a measured standard error (repeats), normal approximation.

    A drop d that flips single questions adds d / n to the variance of the difference.
    """
    z_alpha, z_power = normal_quantile(1 - alpha), normal_quantile(power)
    drop = (z_alpha + z_power) * stderr
    for _ in range(50):  # a contraction for every size in use; ends when it has settled
        grown = (z_alpha + z_power) * math.sqrt(stderr**2 + drop / n)
        if abs(grown - drop) < 1e-9:
            break
        drop = grown
    return min(1.0, drop)


def _check(n: int, discordant: float, alpha: float, power: float) -> None:
    if n < 1 or not 0.0 <= discordant <= 1.0 or not 0.0 < alpha < 1.0 or not 0.0 < power < 1.0:
        raise ValueError(
            "needs n >= 1, 0 <= discordant <= 1 and rates in (0, 1), got "
            f"n={n}, discordant={discordant}, alpha={alpha}, power={power}"
        )
