"""What a pytest run of the suite prints, beside pytest's own lines.

Receives verdicts and pytest's terminal reporter; returns text or writes lines. When it is
called, and with what, is `pytest_run.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from evalsuite.jobs import EvalJob
from evalsuite.names import suggestion
from evalsuite.report.text import follow_up
from evalsuite.verdict import Verdict


def explain(verdict: Verdict) -> str:
    """What a failed or errored test shows: reason, log, how to run it again."""
    head = f"{verdict.status}: {verdict.reason}"
    tail = [f"  | {line}" for line in verdict.log_tail]
    return "\n".join([head, *verdict.warnings, *tail, *follow_up(verdict)])


def unmatched(keyword: str, jobs: Sequence[EvalJob]) -> str:
    """What to say of a `-k` that leaves no job."""
    return f"no job matches -k {keyword!r}{suggestion(keyword, [job.id for job in jobs])}"


def write_table(reporter: Any, verdicts: Sequence[Verdict]) -> None:
    """The verdict table in a section of its own."""
    from rich.console import Console

    from evalsuite.report.terminal import LOG_WIDTH, print_verdicts

    reporter.section("verdicts")
    screen = reporter._tw
    console = Console(
        file=screen._file,
        force_terminal=screen.hasmarkup,
        width=max(screen.fullwidth, LOG_WIDTH) if not screen.hasmarkup else None,
    )
    print_verdicts(verdicts, console)


def write_line(config: pytest.Config, line: str) -> None:
    """A line on pytest's own terminal, captured output or not; workers have none."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None:
        return
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        reporter.ensure_newline()
        reporter.write_line(line)
