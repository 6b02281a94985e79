"""What a reader must see beside a verdict: truncation, noise, thresholds that mean little.

Receives a verdict with its numbers, the config and the ledger; returns sentences. None of them
changes the verdict; what does is in `judge.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from evalsuite.baseline import BaselinePair
from evalsuite.config import Calibration, EvalConfig
from evalsuite.evaluators.base import EvalResult
from evalsuite.ledger import LedgerRecord
from evalsuite.verdict import Status, Verdict

# A tolerance of more standard errors than this hides real losses: at 4, a build that lost the
# whole tolerance fails only half the time and an unchanged one fails once in 30,000.
WIDE_TOLERANCE_SE = 4.0
# The reading that takes numbers as numbers; the gating reading is compared with it.
RIGHT_READING = "numeric"
# Questions named one by one in a remark; the ledger has them all.
MAX_NAMED = 10
# Characters of a reply in a remark; its end holds the number.
SHOWN_REPLY = 80


def remarks(
    verdict: Verdict,
    config: EvalConfig,
    records: Sequence[LedgerRecord],
    baseline: BaselinePair | None = None,
) -> tuple[str, ...]:
    """Collect every remark that applies, the ones about the answers first."""
    result = verdict.result
    if result is None:
        return ()
    found = _answers(result, config, records)
    if verdict.status is Status.FAIL:
        found += not_right(result, records)
    found += _noise(verdict, result, config)
    if verdict.evidence.ignored_switches:
        found.append("the server ignored: " + ", ".join(verdict.evidence.ignored_switches))
    if baseline is not None and verdict.gate in ("paired", "equal"):
        found += [
            f"the {kind} was made on {reference.hardware!r}, this run on {verdict.hardware!r}"
            for kind, reference in baseline.references().items()
            if reference.hardware and verdict.hardware and reference.hardware != verdict.hardware
        ]
    return tuple(found)


def not_right(result: EvalResult, records: Sequence[LedgerRecord]) -> list[str]:
    """What the answers of a FAIL look like: another number or none, and the first of them."""
    asked = [record for record in records if record.repeat == 0 and record.is_answered]
    missed = [record for record in asked if record.scores.get(result.metric) != "correct"]
    if not missed:
        return []
    first = min(missed, key=lambda record: record.index)
    silent = sum(record.scores.get(result.metric) == "no_answer" for record in missed)
    reply = " ".join((first.text or "").split())
    end = reply if len(reply) <= SHOWN_REPLY else f"...{reply[-SHOWN_REPLY:]}"
    value = first.extracted.get(result.metric) or "no number"
    counted = f"{len(missed) - silent} with another number, {silent} without one"
    return [
        f"{len(missed)} of {len(asked)} replies are not right: {counted}; the first, question "
        f"{first.index}, wants {first.target} and has {value} in {end!r}"
    ]


def _answers(result: EvalResult, config: EvalConfig, records: Sequence[LedgerRecord]) -> list[str]:
    found = []
    n = result.num_questions
    if result.num_truncated:
        # By the right reading: the field's takes the last number of half a calculation.
        cut = sum(
            record.repeat == 0
            and record.status == "truncated"
            and record.scores.get(RIGHT_READING, record.scores.get(result.metric)) == "no_answer"
            for record in records
        )
        found.append(
            f"{result.num_truncated} of {n} replies ({result.num_truncated / n:.1%}) were cut by "
            f"max_tokens {config.max_tokens}"
            + (f"; {cut} of them hold no answer because they were cut" if records else "")
        )
    if result.num_empty:
        found.append(f"{result.num_empty} of {n} replies ({result.num_empty / n:.1%}) are empty")
    if result.num_failed:
        low, high = result.accuracy_bounds
        found.append(
            f"{result.num_failed} of {n} answers are missing: accuracy between {low:.4f} and "
            f"{high:.4f}; first error: {result.first_error}"
        )
    found += result.notes
    if result.retries:
        found.append(f"{result.retries} requests were retried")
    found += _readings(result, records)
    return found


def _readings(result: EvalResult, records: Sequence[LedgerRecord]) -> list[str]:
    """Where the right reading says something else than the one that gates."""
    gating = result.num_correct[result.metric]
    right = result.num_correct.get(RIGHT_READING, gating)
    apart = sorted(
        record.index
        for record in records
        if record.repeat == 0
        and RIGHT_READING in record.scores
        and (record.scores[RIGHT_READING] == "correct")
        != (record.scores.get(result.metric) == "correct")
    )
    if right == gating and not apart:
        return []
    named = ", ".join(map(str, apart[:MAX_NAMED])) + (", ..." if len(apart) > MAX_NAMED else "")
    plural = "" if len(apart) == 1 else "s"
    where = f"; they differ on {len(apart)} question{plural}: {named}" if apart else ""
    return [
        f"the gating reading {result.metric!r} counts {gating} right, the reading "
        f"{RIGHT_READING!r} {right}{where}"
    ]


def _noise(verdict: Verdict, result: EvalResult, config: EvalConfig) -> list[str]:
    found = []
    n = result.num_questions
    assert verdict.interval is not None and verdict.floor is not None  # noqa: PT018
    low, high = verdict.interval
    calibration = config.calibration
    # Of a measured configuration the noise of the same questions is known, and far smaller.
    is_measured = isinstance(calibration, Calibration) and calibration.num_questions == n
    is_absolute = verdict.gate in ("threshold", "statistical")
    if is_absolute and not is_measured and low <= verdict.floor <= high:
        found.append(
            f"the floor {verdict.floor:g} lies inside the noise of {n} questions: standard error "
            f"{verdict.stderr or 0.0:.4f}, 95 % interval {low:.4f} to {high:.4f}"
        )
    if verdict.stderr and config.tolerance > WIDE_TOLERANCE_SE * verdict.stderr:
        found.append(
            f"tolerance {config.tolerance:g} is {config.tolerance / verdict.stderr:.1f} standard "
            "errors: smaller losses pass unseen"
        )
    if isinstance(calibration, Calibration) and calibration.num_questions != n:
        found.append(
            f"the calibration was made on {calibration.num_questions} questions, this run asked {n}"
        )
    return found
