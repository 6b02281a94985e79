"""`junit.xml` in the form that pytest writes (junit_family xunit2).

Receives verdicts; a FAIL is a <failure>, an ERROR or INCONCLUSIVE an <error>, a SKIP a
<skipped>. Characters that XML cannot hold are shown as #xNN, as pytest does.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalsuite.files import write_text
from evalsuite.ledger import LedgerRecord
from evalsuite.report.text import follow_up, visible
from evalsuite.verdict import Status, Verdict

if TYPE_CHECKING:
    from evalsuite.report import Ledgers, RunMeta

# xunit2 knows no fifth outcome. An inconclusive run must not look green, and is no failure.
# Attempts listed in a test case; more than this is a broken server, and the ledger has them all.
MAX_RETRY_LINES = 500
_ELEMENT = {
    Status.FAIL: "failure",
    Status.ERROR: "error",
    Status.INCONCLUSIVE: "error",
    Status.SKIP: "skipped",
}


def _properties(verdict: Verdict) -> dict[str, str]:
    values: dict[str, object] = {
        "status": verdict.status.value,
        "gate": verdict.gate,
        "accuracy": verdict.accuracy,
        "threshold": verdict.threshold,
        "tolerance": verdict.tolerance,
        "stderr": verdict.stderr,
        "p_value": verdict.p_value,
        "backend_asked": verdict.evidence.declared,
        "backend": verdict.evidence.observed,
        "hardware": verdict.hardware,
        "engine": verdict.engine,
        "commit": verdict.commit,
    }
    sampling = verdict.detail.get("sampling")
    if isinstance(sampling, dict):
        values |= sampling
    result = verdict.result
    if result is not None:
        values |= {
            "num_questions": result.num_questions,
            "num_failed": result.num_failed,
            "num_truncated": result.num_truncated,
            "num_empty": result.num_empty,
            "retries": result.retries,
            "first_error": result.first_error,
        }
    return {key: str(value) for key, value in values.items() if value not in (None, "")}


def _body(verdict: Verdict) -> str:
    parts = [verdict.reason]
    if verdict.log_tail:
        parts.append("server log:\n" + "\n".join(verdict.log_tail))
    if lines := follow_up(verdict):
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _retries(records: Sequence[LedgerRecord]) -> list[str]:
    """One line for each attempt that failed, whether the question was answered later or not."""
    lines = [
        f"question {record.index}, repeat {record.repeat}, attempt {number}: {error}"
        for record in sorted(records, key=lambda record: (record.repeat, record.index))
        for number, error in enumerate(record.retry_errors, start=1)
    ]
    if len(lines) > MAX_RETRY_LINES:
        more = f"... {len(lines) - MAX_RETRY_LINES} more, all of them in questions/*.jsonl"
        lines = [*lines[:MAX_RETRY_LINES], more]
    return lines


def _case(parent: ET.Element, verdict: Verdict, records: Sequence[LedgerRecord]) -> None:
    case = ET.SubElement(
        parent,
        "testcase",
        classname="evalsuite.test_accuracy",
        name=visible(f"test_accuracy[{verdict.job_id}]"),
        time=f"{verdict.duration_s:.3f}",
    )
    properties = ET.SubElement(case, "properties")
    for key, value in _properties(verdict).items():
        ET.SubElement(properties, "property", name=key, value=visible(value))
    element = _ELEMENT.get(verdict.status)
    if element is not None:
        message = visible(f"{verdict.status}: {verdict.reason}")
        kind = "pytest.skip" if element == "skipped" else verdict.status.value
        ET.SubElement(case, element, message=message, type=kind).text = visible(_body(verdict))
    if lines := [*verdict.warnings, *_retries(records)]:
        ET.SubElement(case, "system-out").text = visible("\n".join(lines))


def render(verdicts: Sequence[Verdict], meta: RunMeta, ledgers: Ledgers | None = None) -> str:
    """Return the whole document; the ledgers give the attempts that failed."""
    tags = [_ELEMENT.get(verdict.status) for verdict in verdicts]
    root = ET.Element("testsuites", name="evalsuite")
    suite = ET.SubElement(
        root,
        "testsuite",
        name="evalsuite",
        errors=str(tags.count("error")),
        failures=str(tags.count("failure")),
        skipped=str(tags.count("skipped")),
        tests=str(len(verdicts)),
        time=f"{meta.duration_s:.3f}",
        timestamp=meta.started_at,
        hostname=visible(meta.host),
    )
    for verdict in verdicts:
        _case(suite, verdict, (ledgers or {}).get(verdict.job_id, ()))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def write(
    path: Path, verdicts: Sequence[Verdict], meta: RunMeta, ledgers: Ledgers | None = None
) -> Path:
    """Write the document."""
    return write_text(path, render(verdicts, meta, ledgers))
