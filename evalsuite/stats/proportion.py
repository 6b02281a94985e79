"""One proportion: standard error, Wilson bounds, exact tails, exact comparison with a floor.

Receives counts, returns floats or integers. Two runs on the same questions are `paired.py`.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal
from statistics import NormalDist

_NORMAL = NormalDist()


def normal_quantile(probability: float) -> float:
    """Return the standard normal quantile of `probability` in (0, 1)."""
    return _NORMAL.inv_cdf(probability)


def normal_tail(z: float) -> float:
    """P(Z >= z) of a standard normal."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def binomial_se(p: float, n: int) -> float:
    """Standard error of a proportion over `n` questions, sqrt(p (1 - p) / n)."""
    if n < 1 or not 0.0 <= p <= 1.0:
        raise ValueError(f"binomial_se needs n >= 1 and 0 <= p <= 1, got n={n}, p={p}")
    return math.sqrt(p * (1.0 - p) / n)


def wilson_bound(num_right: float, n: int, confidence: float, side: str) -> float:
    """One-sided Wilson score bound.

    Args:
        num_right: Right answers; may be fractional for a mean over repeats.
        n: Questions.
        confidence: One-sided confidence in (0.5, 1).
        side: "lower" or "upper".
    """
    if n < 1 or not 0 <= num_right <= n:
        raise ValueError(f"a Wilson bound needs 0 <= num_right <= n, got {num_right} of {n}")
    z = normal_quantile(confidence)
    p = num_right / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    bound = (centre + half if side == "upper" else centre - half) / (1 + z * z / n)
    return min(1.0, max(0.0, bound))


def wilson_interval(num_right: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Wilson score interval."""
    one_sided = (1.0 + confidence) / 2.0
    return (
        wilson_bound(num_right, n, one_sided, "lower"),
        wilson_bound(num_right, n, one_sided, "upper"),
    )


def exact_decimal(value: float) -> Decimal:
    """Return the decimal that a person wrote: 0.9 is nine tenths, not the nearest double."""
    return Decimal(repr(value))


def min_correct(threshold: float, tolerance: float, n: int) -> int:
    """Fewest right answers of `n` with accuracy >= threshold - tolerance, without rounding."""
    floor = exact_decimal(threshold) - exact_decimal(tolerance)
    return max(0, int((floor * n).to_integral_value(rounding=ROUND_CEILING)))


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) of Binomial(n, p)."""
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    # Not scipy.stats: every verdict comes through here, and that import alone takes longer than
    # the whole of a quick job's judgement.
    from scipy.special import bdtr

    return float(bdtr(k, n, p))
