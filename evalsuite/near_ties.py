"""Why a reply flipped: a near-tie between two builds, or a real change.

Receives flips of a sampled run and both replies scored by the server under test, returns flips
with a note. The gate on all tokens is `replay.py`; which questions flipped is `flips.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from evalsuite.errors import EvalError
from evalsuite.flips import Flip
from evalsuite.replay_client import Scored

# Two continuations whose log-probabilities differ by less than this are a toss between builds
# that differ by rounding in bf16 alone: nine in ten of their replies part at such a token
# (measured by `noise_study.py`; docs/verdicts.md).
NEAR_TIE_NATS = 0.5


def explain_flip(flip: Flip, before: Scored, after: Scored) -> str:
    """Say whether a flip is a near-tie, from both replies scored on the server under test.

    Both replies share every token up to the first that differs, so its two log-probabilities
    are alternatives after the same text; the server under test chose the second.

    Raises:
        EvalError: The replies have no token to compare.
    """
    if flip.before == flip.after:
        return "same reply, read differently"
    pairs = zip(before.tokens, after.tokens, strict=False)
    at = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
    if at is None:
        if not before.tokens or not after.tokens:
            raise EvalError(f"question {flip.index}: a reply without a token cannot be explained")
        return "one reply ends where the other goes on"
    margin = after.logprobs[at] - before.logprobs[at]
    kind = "near-tie" if abs(margin) < NEAR_TIE_NATS else "real"
    return (
        f"{kind}: margin {margin:+.3f} nats at token {at} "
        f"({before.tokens[at]!r} -> {after.tokens[at]!r})"
    )


def explain_flips(
    flips: Sequence[Flip], before: Mapping[int, Scored], after: Mapping[int, Scored]
) -> list[Flip]:
    """Add the explanation to every flip whose two replies were scored."""
    return [
        replace(flip, note=explain_flip(flip, before[flip.index], after[flip.index]))
        if flip.index in before and flip.index in after and flip.before and flip.after
        else flip
        for flip in flips
    ]
