"""Questions that two runs answered with different outcomes, both replies side by side.

Receives two ledgers (or a baseline and a ledger), returns `Flip`s in question order. Why a
question flipped is `near_ties.py`; how flips are shown is `report/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalsuite.baseline import Baseline
from evalsuite.ledger import LedgerRecord


@dataclass(frozen=True)
class Flip:
    """One question that two runs answered with different outcomes.

    Attributes:
        index: Question index.
        target: Gold answer.
        was_right: Outcome in the first run (the baseline).
        is_right: Outcome in the second run.
        before: Reply of the first run, "" where it was not kept.
        after: Reply of the second run.
        note: Why, where known ("near-tie: margin 0.02").
    """

    index: int
    target: str
    was_right: bool
    is_right: bool
    before: str = ""
    after: str = ""
    note: str = ""


def flips_between(
    before: Sequence[LedgerRecord], after: Sequence[LedgerRecord], metric: str
) -> list[Flip]:
    """Flips of the first repeat; questions that either run did not answer are left out."""
    first = {r.index: r for r in before if r.repeat == 0 and r.is_answered}
    found = []
    for record in _answered(after):
        old = first.get(record.index)
        if old is None or (_is_right(old, metric) == _is_right(record, metric)):
            continue
        found.append(
            Flip(
                record.index,
                record.target,
                _is_right(old, metric),
                _is_right(record, metric),
                old.text or "",
                record.text or "",
            )
        )
    return found


def flips_from_baseline(
    baseline: Baseline,
    records: Sequence[LedgerRecord],
    metric: str,
    notes: Mapping[int, str] | None = None,
) -> list[Flip]:
    """Flips against the baseline's first repeat.

    Args:
        baseline: The stored run.
        records: The ledger of the run under test.
        metric: The gating metric.
        notes: Question index -> why, from a replay.
    """
    found = []
    for record in _answered(records):
        answer = baseline.answers.get(record.index)
        if answer is None or not answer.outcomes or answer.outcomes[0] is None:
            continue
        is_right = _is_right(record, metric)
        if answer.outcomes[0] != is_right:
            note = (notes or {}).get(record.index, "")
            found.append(
                Flip(
                    record.index,
                    record.target,
                    answer.outcomes[0],
                    is_right,
                    answer.text or "",
                    record.text or "",
                    note,
                )
            )
    return found


def _answered(records: Sequence[LedgerRecord]) -> list[LedgerRecord]:
    latest = {r.index: r for r in records if r.repeat == 0 and r.is_answered}
    return [latest[index] for index in sorted(latest)]


def _is_right(record: LedgerRecord, metric: str) -> bool:
    return record.scores.get(metric) == "correct"
