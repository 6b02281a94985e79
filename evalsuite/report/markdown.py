"""`summary.md`: what a CI system shows beside a run.

Receives verdicts, returns Markdown: one table, then what went wrong in each job, then remarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalsuite.files import write_text
from evalsuite.report.text import (
    accuracy_cell,
    asked_cell,
    backend_cell,
    follow_up,
    interval_cell,
    points,
    rate,
    speed_cell,
    visible,
)
from evalsuite.verdict import Status, Verdict

if TYPE_CHECKING:
    from evalsuite.report import RunMeta

HEADER = (
    "job",
    "verdict",
    "accuracy",
    "95 % interval",
    "floor",
    "margin (SE)",
    "false alarm",
    "sees a drop of (points)",
    "asked",
    "ran",
    "questions/s",
    "time (s)",
)


def cell(text: str) -> str:
    """Escape one table cell: no pipe, line break or HTML of a reply may leave it."""
    text = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`").split())


def fenced(text: str) -> str:
    """Put text into a code fence longer than any run of backticks in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{visible(text)}\n{fence}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a Markdown table; cells are escaped here."""
    lines = ["| " + " | ".join(map(cell, header)) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def verdict_cells(verdict: Verdict) -> list[str]:
    """Cells of one verdict after its name and status, in the order of `HEADER`."""
    drop = points(verdict.detectable_drop)
    if verdict.detectable_drop is not None and verdict.power is not None:
        drop += f" at {verdict.power:.0%}"
    return [
        accuracy_cell(verdict),
        interval_cell(verdict),
        "-" if verdict.floor is None else f"{verdict.floor:g}",
        "-" if verdict.margin_se is None else f"{verdict.margin_se:+.1f}",
        rate(verdict.alpha),
        drop,
        asked_cell(verdict),
        backend_cell(verdict),
        speed_cell(verdict),
        f"{verdict.duration_s:.1f}",
    ]


def summary_line(verdicts: Sequence[Verdict]) -> str:
    """How many jobs ended how."""
    counts = [
        f"{sum(verdict.status is status for verdict in verdicts)} {status}"
        for status in Status
        if any(verdict.status is status for verdict in verdicts)
    ]
    return ", ".join(counts) or "no job ran"


def render(verdicts: Sequence[Verdict], meta: RunMeta) -> str:
    """Return the whole summary."""
    parts = [
        f"## Accuracy: {summary_line(verdicts)}",
        table(HEADER, [[v.job_id, v.status.value, *verdict_cells(v)] for v in verdicts]),
    ]
    for verdict in verdicts:
        if verdict.status is Status.PASS and not verdict.warnings:
            continue
        lines = [f"### {cell(verdict.job_id)}: {verdict.status}", cell(verdict.reason)]
        lines += [f"- {cell(warning)}" for warning in verdict.warnings]
        if verdict.log_tail:
            lines.append(fenced("\n".join(verdict.log_tail)))
        if following := follow_up(verdict):
            lines.append(fenced("\n".join(following)))
        parts.append("\n\n".join(lines))
    if meta.command:
        parts.append(f"Run {cell(meta.run_id)}:\n\n{fenced(meta.command)}")
    return "\n\n".join(parts) + "\n"


def write(path: Path, verdicts: Sequence[Verdict], meta: RunMeta) -> Path:
    """Write the summary."""
    return write_text(path, render(verdicts, meta))
