"""`equal`: replies bit for bit, for a change that must change nothing.

Receives the run's ledger and the baseline's reply hashes, returns `GateOutcome`. It makes no
statement about accuracy; a numeric change belongs to `paired.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evalsuite.baseline import LOGPROB_DIGITS, Answer, text_sha256
from evalsuite.gates.base import GateOutcome
from evalsuite.ledger import LedgerRecord
from evalsuite.verdict import Status

SHOWN = 10


def equal_gate(
    records: Sequence[LedgerRecord], answers: Mapping[int, Answer], *, has_logprobs: bool = True
) -> GateOutcome:
    """PASS where every reply of every repeat equals the baseline's first one.

    Log-probabilities are compared too where both sides recorded them, to the digits a baseline
    keeps, unless `has_logprobs` is false (the baseline's are of a replay). A missing answer
    decides nothing unless nothing else differs: then it is an ERROR.
    """
    seen = {record.index for record in records}
    missing = sorted(answers.keys() - seen) + [r.index for r in records if not r.is_answered]
    extra = sorted(seen - answers.keys())
    texts, numbers = [], []
    for record in sorted(records, key=lambda one: (one.repeat, one.index)):
        answer = answers.get(record.index)
        if answer is None or record.text is None:
            continue
        if text_sha256(record.text) != answer.text_sha256:
            texts.append(record.index)
        elif (
            has_logprobs and answer.logprobs and record.token_logprobs and not _same(record, answer)
        ):
            numbers.append(record.index)
    detail: dict[str, object] = {
        "texts_differ": texts,
        "logprobs_differ": numbers,
        "missing": missing,
        "compared": len(records) - len(missing),
    }
    if texts or numbers:
        first = ", ".join(map(str, (texts or numbers)[:SHOWN]))
        reason = (
            f"{len(texts)} replies and the log-probabilities of {len(numbers)} more differ from "
            f"the baseline; first questions: {first}"
        )
        return _certain(Status.FAIL, reason, detail)
    if missing or extra:
        reason = (
            f"{len(missing)} replies are missing and {len(extra)} have no counterpart; "
            "the rest is equal"
        )
        return GateOutcome(Status.ERROR, reason, detail=detail)
    reason = f"all {len(records)} replies equal the baseline's"
    return _certain(Status.PASS, reason, detail)


def _same(record: LedgerRecord, answer: Answer) -> bool:
    return tuple(round(x, LOGPROB_DIGITS) for x in record.token_logprobs) == answer.logprobs


def _certain(status: Status, reason: str, detail: dict[str, object]) -> GateOutcome:
    """No sampling, no error rate: any change of a reply is seen, so any drop at all is."""
    return GateOutcome(status, reason, alpha=0.0, power=1.0, detectable_drop=0.0, detail=detail)
