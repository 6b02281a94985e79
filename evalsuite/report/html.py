"""`report.html`: one page with everything in it, for a person who asks why.

Receives verdicts, ledgers and `RunMeta`; renders `page.html.j2` with escaping on. The page
loads nothing from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from evalsuite.files import write_text
from evalsuite.flips import Flip
from evalsuite.ledger import LedgerRecord
from evalsuite.remarks import RIGHT_READING
from evalsuite.report import svg
from evalsuite.report.markdown import HEADER, summary_line, verdict_cells
from evalsuite.report.text import points, rate, visible
from evalsuite.verdict import Verdict

if TYPE_CHECKING:
    from evalsuite.report import Ledgers, RunMeta

# Replies shown per job; the page stays readable and the ledger has them all.
MAX_FLIPS = 60
MAX_WRONG = 20


def environment() -> jinja2.Environment:
    """Template environment of all pages: everything is escaped, undefined is an error."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("evalsuite.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    env.filters["clean"] = lambda value: visible(str(value))
    env.filters["rate"] = rate
    env.filters["points"] = points
    return env


def style_sheet() -> Markup:
    """The style sheet of all pages; our own file, so it needs no escaping."""
    return Markup(resources.files("evalsuite.report").joinpath("page.css").read_text("utf-8"))


def flips_of(verdict: Verdict) -> list[Flip]:
    """Flips against the baseline that `judge.py` put into the verdict's detail."""
    found = verdict.detail.get("flips")
    return [Flip(**one) for one in found] if isinstance(found, list) else []


def _job(verdict: Verdict, records: Sequence[LedgerRecord], meta: RunMeta) -> dict[str, Any]:
    flips = list(meta.flips.get(verdict.job_id, ())) or flips_of(verdict)
    # A run that was resumed in vain has records of its first part, and no result.
    metric = verdict.result.metric if verdict.result else RIGHT_READING
    wrong = [r for r in records if r.repeat == 0 and r.scores.get(metric) != "correct"]
    history = list(meta.history.get(verdict.job_id, ()))
    if verdict.accuracy is not None:
        history.append((meta.run_id or "this run", verdict.accuracy))
    return {
        "verdict": verdict,
        "metric": metric,
        "cells": verdict_cells(verdict),
        "flips": flips[:MAX_FLIPS],
        "num_flips": len(flips),
        "wrong": wrong[:MAX_WRONG],
        "trend": svg.trend(history, verdict.floor, f"accuracy of {verdict.job_id} over runs"),
    }


def render(verdicts: Sequence[Verdict], ledgers: Ledgers, meta: RunMeta) -> str:
    """Return the whole page."""
    measured = [v for v in verdicts if v.accuracy is not None and v.interval is not None]
    rows = [
        svg.IntervalRow(
            v.job_id, v.accuracy or 0.0, *(v.interval or (0.0, 0.0)), v.floor, v.status.value
        )
        for v in measured
    ]
    margins = [(v.job_id, v.margin_se, v.status.value) for v in measured if v.margin_se is not None]
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            css=style_sheet(),
            headline=summary_line(verdicts),
            header=HEADER,
            meta=meta,
            jobs=[_job(v, ledgers.get(v.job_id, ()), meta) for v in verdicts],
            interval_plot=svg.intervals(rows, "accuracy with 95 % interval and floor"),
            margin_plot=svg.bars(margins, "margin to the floor in standard errors", "SE"),
        )
    )


def write(path: Path, verdicts: Sequence[Verdict], ledgers: Ledgers, meta: RunMeta) -> Path:
    """Write the page."""
    return write_text(path, render(verdicts, ledgers, meta))
