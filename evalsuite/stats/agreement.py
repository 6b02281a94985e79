"""What two replays of one build share against two of another: a shift that noise cannot make.

Receives log-probabilities of the same tokens, replayed twice by each build; returns how much the
two differences agree. The gate on it is `replay.py`; tests on right and wrong answers are
`paired.py`.

The first difference is between the first replay of each build, the second between the second ones,
so that they share no replay. Of noise alone, either sign of either difference is as likely
(exchange the two first replays), whatever its size: their agreement is symmetric about zero,
exactly. What the builds themselves differ by is in both, with the same sign. Averages over tokens
and questions make it visible far below the noise of one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def sign_agreement(first: Sequence[float], second: Sequence[float], least: float) -> float:
    """Mean over tokens of the product of two shifts' signs, from -1 to 1.

    Signs, because the noise of tokens differs by factors of thousands: in a sum of products the
    few tokens next to a tie would drown the rest.

    Args:
        first: Shift of each token between the first replays.
        second: Between the second ones.
        least: Smaller shifts are no shift, in nats.
    """
    total = 0
    for one, two in zip(first, second, strict=True):
        if abs(one) > least and abs(two) > least:
            total += 1 if (one > 0) == (two > 0) else -1
    return total / len(first)


def common_share(agreement: float) -> float:
    """Share of a shift's variance that both have in common, 0 where they do not agree.

    Sheppard's formula for two normal numbers of correlation r, whose signs agree by
    (2 / pi) asin(r); a guide where shifts are not normal.
    """
    return math.sin(math.pi / 2 * min(max(agreement, 0.0), 1.0))


def shift_in_noise(agreement: float) -> float:
    """Common shift in standard deviations of the noise between two replays, as a guide."""
    share = common_share(agreement)
    return math.sqrt(share / (1.0 - share)) if share < 1.0 else math.inf
