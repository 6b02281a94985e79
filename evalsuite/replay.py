"""Replay: the baseline's own answers, teacher-forced through the server under test.

Receives log-probabilities of the same tokens from two builds, returns a gate on their shift. A
hundred thousand paired numbers see what 1,319 right-or-wrong bits cannot. Requests are
`replay_client.py`; why a reply of a sampled run flipped is `near_ties.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from evalsuite.stats.agreement import shift_in_noise, sign_agreement
from evalsuite.stats.paired import sign_flip_monte_carlo
from evalsuite.stats.proportion import binomial_cdf
from evalsuite.verdict import Status

Logprobs = Mapping[int, Sequence[float]]

# Questions further out than this many median deviations count as that far: one garbled
# question must not decide, and must not hide the rest.
CLIP_DEVIATIONS = 8.0
# Share of questions that may lie beyond `noise_factor` times the noise of all but this share.
MAX_BEYOND = 0.01
# Spread of an answer, nats, that other kernels of one precision cause in no more than MAX_BEYOND
# of the answers: measured between MoE backends on an H200 (docs/verdicts.md).
OTHER_KERNELS_SPREAD = 0.01


@dataclass(frozen=True)
class ReplayLimits:
    """What a build may differ by.

    Attributes:
        alpha: False-alarm rate, shared by the tests that are made.
        max_mean_shift: Mean loss of log-probability per token that passes, in nats. Answers were
            chosen by the baseline's own rounding, so any other build gives them slightly less:
            0.00005 on the embedded model, more where many tokens are near-ties.
        max_spread: Root mean square shift per token that passes where the baseline's own noise
            is unknown, in nats; None for no such limit.
        noise_factor: Where it is known, the spread may be this many times the noise. At 1 the
            test is exact for an unchanged build; above it is room for other kernels.
        min_spread: Root mean square shift per token that always passes, in nats: four times what
            another rounding of float32 does at most, and above the digits a baseline keeps.
        max_agreement: Agreement of two independent shifts that passes (`stats/agreement.py`). At
            0 the test is exact for an unchanged build.
        has_other_kernels: The build computes the same by other kernels, whose rounding is no
            fault: only the mean loss, and the answers beyond `OTHER_KERNELS_SPREAD`, are tested.
        min_aligned: Share of questions that must have the same tokens on both sides.
    """

    alpha: float = 0.001
    max_mean_shift: float = 0.002
    max_spread: float | None = None
    noise_factor: float = 1.5
    min_spread: float = 1e-6
    max_agreement: float = 0.0
    has_other_kernels: bool = False
    min_aligned: float = 0.95


@dataclass(frozen=True)
class ReplayOutcome:
    """Result of a replay.

    Attributes:
        status: PASS, FAIL, or ERROR where too few questions could be aligned.
        reason: One sentence with the numbers.
        mean_shift: Mean loss of log-probability per token over questions, nats.
        spread: Root mean square shift per token over questions, nats.
        p_mean: One-sided p of the mean against `max_mean_shift`.
        p_spread: One-sided p of the spread against its limit, None without one.
        num_beyond: Questions whose spread is beyond what all but a few of the noise's have.
        p_beyond: One-sided p of that many at a rate of `MAX_BEYOND`, None where the noise is
            unknown. A confident model shows a fault in a few questions with a near-tie alone.
        agreement: Of the shifts in two independent pairs of replays, mean over questions; None
            where each build was replayed once.
        p_agreement: One-sided p of it against `max_agreement`.
        num_tokens: Tokens compared.
        num_questions: Questions compared.
        num_unaligned: Questions whose tokens differ in number.
        largest: (question, mean shift) of the most changed questions, largest first.
    """

    status: Status
    reason: str
    mean_shift: float = 0.0
    spread: float = 0.0
    p_mean: float = 1.0
    p_spread: float | None = None
    num_beyond: int = 0
    p_beyond: float | None = None
    agreement: float | None = None
    p_agreement: float | None = None
    num_tokens: int = 0
    num_questions: int = 0
    num_unaligned: int = 0
    largest: tuple[tuple[int, float], ...] = field(default=())


def clipped(values: Sequence[float]) -> list[float]:
    """Pull values in to `CLIP_DEVIATIONS` median absolute deviations around the median."""
    centre = median(values)
    width = CLIP_DEVIATIONS * median(abs(x - centre) for x in values)
    if width == 0.0:
        return list(values)
    return [min(max(x, centre - width), centre + width) for x in values]


def rms(values: Sequence[float]) -> float:
    """Root mean square."""
    return math.sqrt(math.fsum(x * x for x in values) / len(values))


def compare_logprobs(
    before: Logprobs,
    after: Logprobs,
    limits: ReplayLimits,
    noise: Mapping[int, float] | None = None,
    again: tuple[Logprobs, Logprobs] | None = None,
) -> ReplayOutcome:
    """Gate on the shift of per-token log-probabilities, questions as units.

    Args:
        before: Question -> log-probabilities of its answer's tokens in the baseline.
        after: The same from the server under test.
        limits: What passes.
        noise: Question -> root mean square shift between two replays of the baseline's build.
        again: Both once more, from a second replay of each build under the same load.
    """
    asked = [index for index in before if before[index]]
    pairs = {
        index: [old - new for old, new in zip(before[index], after[index], strict=True)]
        for index in asked
        if index in after and len(after[index]) == len(before[index])
    }
    unaligned = len(asked) - len(pairs)
    if not pairs or len(pairs) < limits.min_aligned * len(asked):
        return ReplayOutcome(
            Status.ERROR,
            f"{unaligned} of {len(asked)} answers have other tokens than the baseline's; the "
            "tokenizers differ",
            num_unaligned=unaligned,
        )
    means = {index: math.fsum(shift) / len(shift) for index, shift in pairs.items()}
    spreads = {index: rms(shift) for index, shift in pairs.items()}
    p_mean = sign_flip_monte_carlo(clipped([x - limits.max_mean_shift for x in means.values()]))
    excess = _excess(spreads, limits, noise)
    p_spread = sign_flip_monte_carlo(clipped(excess)) if excess else None
    num_beyond, p_beyond = _beyond(spreads, limits, noise)
    agreed = _agreements(pairs, again, limits) if again and not limits.has_other_kernels else []
    outcome = ReplayOutcome(
        Status.PASS,
        "",
        mean_shift=math.fsum(means.values()) / len(means),
        spread=rms(list(spreads.values())),
        p_mean=p_mean,
        p_spread=p_spread,
        num_beyond=num_beyond,
        p_beyond=p_beyond,
        agreement=math.fsum(agreed) / len(agreed) if agreed else None,
        p_agreement=_p_above(agreed, limits.max_agreement) if agreed else None,
        num_tokens=sum(map(len, pairs.values())),
        num_questions=len(pairs),
        num_unaligned=unaligned,
        largest=tuple(sorted(means.items(), key=lambda item: -abs(item[1]))[:10]),
    )
    tests = (p_mean, p_spread, p_beyond, outcome.p_agreement)
    p_values = [p for p in tests if p is not None]
    level = limits.alpha / len(p_values)
    status = Status.FAIL if min(p_values) <= level else Status.PASS
    return replace(outcome, status=status, reason=_reason(outcome, limits, level))


def _reason(outcome: ReplayOutcome, limits: ReplayLimits, level: float) -> str:
    spread = "" if outcome.p_spread is None else f", p {outcome.p_spread:.4g}"
    if outcome.p_beyond is not None:
        spread += f"; {outcome.num_beyond} answers beyond the noise, p {outcome.p_beyond:.4g}"
    if outcome.agreement is not None:
        spread += (
            f"; two shifts agree by {outcome.agreement:+.4f}, as of one of "
            f"{shift_in_noise(outcome.agreement):.2g} times the noise (passes "
            f"{limits.max_agreement:g}, p {outcome.p_agreement:.4g})"
        )
    return (
        f"{outcome.num_tokens} tokens of {outcome.num_questions} answers: mean loss "
        f"{outcome.mean_shift:+.5f} nats a token (passes {limits.max_mean_shift:g}, p "
        f"{outcome.p_mean:.4g}), spread {outcome.spread:.5f}{spread}; level {level:.4g} each"
    )


def _excess(
    spreads: Mapping[int, float], limits: ReplayLimits, noise: Mapping[int, float] | None
) -> list[float]:
    """Logarithm of the spread over what passes, for the questions that have a limit.

    Spreads of questions differ by factors of thousands, so that their sum is that of a few. In
    ratios every question counts alike, and for an unchanged build, whose spread and noise are two
    draws of one kind, they are symmetric about the limit's own factor.
    """
    excess: list[float] = []
    if limits.has_other_kernels:
        return excess
    for index, spread in spreads.items():
        limit = limits.max_spread
        if noise is not None and index in noise:
            limit = max(limits.min_spread, limits.noise_factor * noise[index])
        if limit is not None:
            excess.append(math.log(max(spread, limits.min_spread / 10) / limit))
    return excess


def _p_above(values: Sequence[float], limit: float) -> float:
    return sign_flip_monte_carlo([x - limit for x in values])


def _agreements(
    pairs: Mapping[int, Sequence[float]], again: tuple[Logprobs, Logprobs], limits: ReplayLimits
) -> list[float]:
    """Agreement of each question's two shifts, where both replays have all its tokens."""
    old, new = again
    return [
        sign_agreement(
            shift,
            [x - y for x, y in zip(old[index], new[index], strict=True)],
            limits.min_spread,
        )
        for index, shift in pairs.items()
        if len(old.get(index, ())) == len(new.get(index, ())) == len(shift)
    ]


def _beyond(
    spreads: Mapping[int, float], limits: ReplayLimits, noise: Mapping[int, float] | None
) -> tuple[int, float | None]:
    """Questions beyond the noise of nearly all questions, and the chance of so many."""
    known = sorted(noise[index] for index in spreads if index in noise) if noise else []
    limit = limits.min_spread
    if limits.has_other_kernels:
        limit = OTHER_KERNELS_SPREAD
    elif not known:
        return 0, None
    if known:
        largest = known[min(len(known) - 1, math.ceil((1 - MAX_BEYOND) * len(known)) - 1)]
        limit = max(limit, limits.noise_factor * largest)
    count = sum(spread > limit for spread in spreads.values())
    return count, 1.0 - binomial_cdf(count - 1, len(spreads), MAX_BEYOND) if count else 1.0


def noise_between(first: Logprobs, second: Logprobs) -> dict[int, float]:
    """Question -> root mean square shift between two replays of one build."""
    return {
        index: rms([a - b for a, b in zip(first[index], second[index], strict=True)])
        for index in first
        if first[index] and len(first[index]) == len(second.get(index, ()))
    }
