"""Ledger records -> `EvalResult`; the one place where answers are counted.

Receives what was planned and the records there are; questions without a record count as failed.
Used by every evaluator and after a resume. Whether the counts pass is `verdict.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evalsuite.evaluators.base import EvalResult
from evalsuite.ledger import LedgerRecord


@dataclass(frozen=True)
class Plan:
    """What an evaluation set out to ask.

    Attributes:
        task: Task name.
        evaluator: Evaluator name.
        metric: The gating metric.
        metrics: All metrics of the task.
        profile: Prompt profile name.
        prompt_hash: Over all prompts.
        indices: Question indices.
        repeats: Times each is asked.
    """

    task: str
    evaluator: str
    metric: str
    metrics: tuple[str, ...]
    profile: str
    prompt_hash: str
    indices: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class Circumstances:
    """How the counting came to its records.

    Attributes:
        duration_s: Wall time of the questions in this run.
        reused: Records taken from an earlier run.
        stopped: Why the evaluation ended early, "" if it did not.
        notes: What a reader should know beside the counts.
    """

    duration_s: float
    reused: int = 0
    stopped: str = ""
    notes: tuple[str, ...] = ()


def aggregate(
    plan: Plan, records: Iterable[LedgerRecord], circumstances: Circumstances
) -> EvalResult:
    """Count the records of a plan; the last of each (index, repeat) counts, strangers do not."""
    wanted = set(plan.indices)
    latest = {(r.repeat, r.index): r for r in records if r.index in wanted}
    first = [latest[0, index] for index in plan.indices if (0, index) in latest]
    answered = [record for record in first if record.is_answered]
    everything = [record for (repeat, _), record in latest.items() if repeat < plan.repeats]
    errors = (record.error for record in everything if not record.is_answered and record.error)
    latencies = sorted(record.latency_s for record in everything if record.is_answered)
    per_question = {
        index: tuple(_is_right(latest.get((r, index)), plan.metric) for r in range(plan.repeats))
        for index in plan.indices
    }
    complete = sum(
        all(outcomes[repeat] is not None for outcomes in per_question.values())
        for repeat in range(plan.repeats)
    )
    return EvalResult(
        task=plan.task,
        evaluator=plan.evaluator,
        metric=plan.metric,
        profile=plan.profile,
        prompt_hash=plan.prompt_hash,
        num_questions=len(plan.indices),
        repeats=complete,
        num_correct={
            metric: sum(record.scores.get(metric) == "correct" for record in answered)
            for metric in plan.metrics
        },
        num_answered=len(answered),
        num_truncated=sum(record.finish_reason == "length" for record in answered),
        num_empty=sum(record.status == "empty" for record in answered),
        num_failed=len(plan.indices) - len(answered),
        num_no_answer=sum(record.scores.get(plan.metric) == "no_answer" for record in answered),
        retries=sum(record.retries for record in everything),
        first_error=next(errors, circumstances.stopped),
        duration_s=circumstances.duration_s,
        prompt_tokens=sum(record.prompt_tokens for record in everything),
        completion_tokens=sum(record.completion_tokens for record in everything),
        per_question=per_question,
        latency_p50_s=percentile(latencies, 0.5),
        latency_p99_s=percentile(latencies, 0.99),
        reused=circumstances.reused,
        stopped=circumstances.stopped,
        notes=circumstances.notes,
    )


def _is_right(record: LedgerRecord | None, metric: str) -> bool | None:
    if record is None or not record.is_answered:
        return None
    return record.scores.get(metric) == "correct"


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of sorted values, 0 for none."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0
