"""Two runs of the same questions: exact McNemar, sign flips by question, stratified permutation.

Receives per-question outcomes of a baseline and a candidate, returns p-values against a drop
(one-sided) and the paired difference with its standard error. Positive drops mean that the
candidate is worse. What a test can see is `power.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evalsuite.stats.proportion import normal_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

Outcomes = Mapping[int, tuple[bool | None, ...]]

# Above this common denominator of the repeats' means the exact sign-flip distribution is drawn
# instead of computed; it takes more than 8 repeats with missing answers to get there.
MAX_DENOMINATOR = 1000
MONTE_CARLO_DRAWS = 20_000
MONTE_CARLO_SEED = 20_240_613


@dataclass(frozen=True)
class Discordance:
    """Counts of two single runs.

    Attributes:
        lost: Right in the baseline, wrong in the candidate (b).
        gained: The reverse (c).
        n: Questions that both answered.
    """

    lost: int
    gained: int
    n: int

    @property
    def fraction(self) -> float:
        """Share of questions on which the two runs differ."""
        return (self.lost + self.gained) / self.n

    @property
    def drop(self) -> float:
        """Accuracy lost by the candidate."""
        return (self.lost - self.gained) / self.n

    @property
    def stderr(self) -> float:
        """Standard error of the drop."""
        return paired_se(self.lost, self.gained, self.n)


def discordance(baseline: Sequence[bool], candidate: Sequence[bool]) -> Discordance:
    """Count how two runs of the same questions differ."""
    pairs = list(zip(baseline, candidate, strict=True))
    return Discordance(
        lost=sum(before and not after for before, after in pairs),
        gained=sum(after and not before for before, after in pairs),
        n=len(pairs),
    )


def mcnemar_exact(lost: int, gained: int) -> float:
    """One-sided exact p against a drop: P(X >= lost), X ~ Bin(lost + gained, 1/2)."""
    from scipy.stats import binom

    if lost < 0 or gained < 0:
        raise ValueError(f"discordant counts cannot be negative: {lost}, {gained}")
    return float(binom.sf(lost - 1, lost + gained, 0.5)) if lost else 1.0


def mcnemar_midp(lost: int, gained: int) -> float:
    """Mid-p form: half of the observed point is subtracted; slightly more powerful, not exact."""
    from scipy.stats import binom

    return mcnemar_exact(lost, gained) - 0.5 * float(binom.pmf(lost, lost + gained, 0.5))


def mcnemar_two_sided(lost: int, gained: int) -> float:
    """Two-sided exact p: twice the smaller tail, at most 1."""
    return min(1.0, 2.0 * min(mcnemar_exact(lost, gained), mcnemar_exact(gained, lost)))


def paired_se(lost: int, gained: int, n: int) -> float:
    """Standard error of the paired difference, sqrt(b + c - (b - c)^2 / n) / n."""
    return math.sqrt(max(0.0, lost + gained - (lost - gained) ** 2 / n)) / n


def drop_upper_bound(lost: int, gained: int, n: int, confidence: float) -> float:
    """Largest drop that the pairs leave possible at a one-sided confidence.

    Bonett and Price's adjusted Wald bound (one count added to each discordant cell), which
    stays above zero where no pair differs.
    """
    b, c, size = lost + 1, gained + 1, n + 2
    return (b - c) / size + normal_quantile(confidence) * paired_se(b, c, size)


@dataclass(frozen=True)
class RepeatsTest:
    """Test of per-question mean outcomes against a drop.

    Attributes:
        p_value: The larger of the two below: each is exact under its own null, so the larger
            one is valid under both.
        p_sign_flip: Questions as units; null: differences symmetric about zero.
        p_stratified: Answers as units within a question; null: equal chance in both builds.
        drop: Mean difference over questions.
        stderr: Of the drop, over questions.
        n: Questions with an answer on both sides.
    """

    p_value: float
    p_sign_flip: float
    p_stratified: float
    drop: float
    stderr: float
    n: int


def repeats_test(baseline: Outcomes, candidate: Outcomes) -> RepeatsTest:
    """Compare two builds from one or more repeats of each; equals exact McNemar for one of each.

    Missing outcomes (None) are left out of their question's mean; a question without an answer
    on either side is left out.
    """
    pairs = [
        (before, after)
        for index in sorted(baseline.keys() & candidate.keys())
        if (before := [x for x in baseline[index] if x is not None])
        and (after := [x for x in candidate[index] if x is not None])
    ]
    if not pairs:
        raise ValueError("the two runs share no answered question")
    strata = [(sum(b), len(b), sum(a), len(a)) for b, a in pairs]
    n = len(strata)
    means = [b / rb - a / ra for b, rb, a, ra in strata]
    drop = math.fsum(means) / n
    spread = math.fsum((x - drop) ** 2 for x in means)
    p_flip = _sign_flip_strata(strata)
    p_strata = stratified_permutation(strata)
    return RepeatsTest(
        p_value=max(p_flip, p_strata),
        p_sign_flip=p_flip,
        p_stratified=p_strata,
        drop=drop,
        stderr=math.sqrt(spread) / n,
        n=n,
    )


def _sign_flip_strata(strata: Sequence[tuple[int, int, int, int]]) -> float:
    denominator = math.lcm(*{size for _, rb, _, ra in strata for size in (rb, ra)})
    if denominator > MAX_DENOMINATOR:
        return sign_flip_monte_carlo([b / rb - a / ra for b, rb, a, ra in strata])
    return sign_flip_exact(
        [b * denominator // rb - a * denominator // ra for b, rb, a, ra in strata]
    )


def sign_flip_exact(differences: Sequence[int]) -> float:
    """One-sided exact p: share of all sign choices whose sum is at least the observed one.

    Args:
        differences: Integers, positive where the candidate is worse.
    """
    import numpy as np
    from scipy.stats import binom

    sizes = Counter(abs(d) for d in differences if d)
    # The sum of flipped differences is 2 S - total with S a sum of value x Bin(count, 1/2).
    pmf = np.ones(1)
    for value, count in sizes.items():
        chances = binom.pmf(np.arange(count + 1), count, 0.5)
        grown = np.zeros(len(pmf) + value * count)
        for k, chance in enumerate(chances):
            grown[value * k : value * k + len(pmf)] += chance * pmf
        pmf = grown
    positive = sum(d for d in differences if d > 0)
    return min(1.0, float(pmf[positive:].sum()))


def sign_flip_monte_carlo(
    differences: Sequence[float],
    draws: int = MONTE_CARLO_DRAWS,
    seed: int = MONTE_CARLO_SEED,
) -> float:
    """One-sided p from random sign choices with a fixed seed, (1 + hits) / (1 + draws)."""
    import numpy as np

    values = np.asarray([d for d in differences if d != 0.0], dtype=np.float64)
    if not values.size:
        return 1.0
    rng = np.random.default_rng(seed)
    observed = values.sum()
    slack = 1e-12 * np.abs(values).sum()
    hits = 0
    for start in range(0, draws, 2000):
        size = min(2000, draws - start)
        signs = rng.integers(0, 2, size=(size, values.size), dtype=np.int8) * 2 - 1
        hits += int((signs @ values >= observed - slack).sum())
    return (1 + hits) / (1 + draws)


def _power(pmf: FloatArray, count: int) -> FloatArray:
    """`count`-fold convolution by squaring."""
    import numpy as np

    result = np.ones(1)
    while count:
        if count & 1:
            result = np.convolve(result, pmf)
        count >>= 1
        if count:
            pmf = np.convolve(pmf, pmf)
    return result


def stratified_permutation(strata: Sequence[tuple[int, int, int, int]]) -> float:
    """Exact one-sided p of permuting answers between builds within each question.

    Args:
        strata: (right in baseline, baseline repeats, right in candidate, candidate repeats).

    Returns:
        P(candidate has at most the observed number of right answers): a sum of independent
        hypergeometrics, one a question.
    """
    import numpy as np
    from scipy.stats import hypergeom

    groups = Counter((b + a, rb, ra) for b, rb, a, ra in strata if 0 < b + a < rb + ra)
    observed = sum(a for b, rb, a, ra in strata if 0 < b + a < rb + ra)
    pmf = np.ones(1)
    for (right, rb, ra), count in groups.items():
        one = hypergeom.pmf(np.arange(ra + 1), rb + ra, right, ra)
        pmf = np.convolve(pmf, _power(one, count))
    return min(1.0, float(pmf[: observed + 1].sum()))
