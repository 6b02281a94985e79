"""Progress while a run goes on: a live line on a terminal, plain lines for a log.

Receives events of the pipeline; prints. The table at the end is `report/terminal.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from evalsuite.evaluators.base import Progress
from evalsuite.report.text import speed_cell
from evalsuite.verdict import Status, Verdict

# A CI log shows that the run lives, and stays readable.
PLAIN_EVERY_S = 5.0


class Display(Protocol):
    """What the pipeline tells while it runs; called in its thread."""

    def job_started(self, job_id: str, position: str) -> None:
        """A job begins; `position` is "3/12"."""
        ...

    def waiting(self, job_id: str, waited_s: float, seen: str) -> None:
        """Its server starts; called several times a second."""
        ...

    def questions(self, job_id: str, progress: Progress) -> None:
        """Questions were answered; called several times a second."""
        ...

    def job_ended(self, verdict: Verdict) -> None:
        """The job has its verdict."""
        ...

    def note(self, text: str) -> None:
        """Something to be read beside the verdicts."""
        ...


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def describe(progress: Progress) -> str:
    """Questions done, rate, accuracy so far, failures, time left."""
    answered = progress.done - progress.failed
    parts = [f"{progress.done}/{progress.total} questions"]
    if progress.elapsed_s > 0:
        parts.append(f"{progress.rate:.1f}/s")
    if answered > 0:
        parts.append(f"accuracy so far {progress.correct / answered:.3f}")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.remaining_s is not None and progress.done < progress.total:
        parts.append(f"{duration(progress.remaining_s)} left")
    return ", ".join(parts)


def closing_line(verdict: Verdict) -> str:
    """One line for a job that has ended."""
    speed = speed_cell(verdict)
    rate = "" if speed == "-" else f", {speed} questions/s"
    score = "" if verdict.accuracy is None else f" {verdict.accuracy:.4f}"
    took = f" in {verdict.duration_s:.1f} s" if verdict.status is not Status.SKIP else ""
    reason = "" if verdict.status is Status.PASS else f": {verdict.reason.splitlines()[0]}"
    return f"{verdict.job_id}: {verdict.status}{score}{took}{rate}{reason}"


class PlainDisplay:
    """Whole lines, a few seconds apart; safe in any log."""

    def __init__(self, write: Callable[[str], None], every_s: float = PLAIN_EVERY_S) -> None:
        self._write = write
        self._every_s = every_s
        self._last = time.monotonic()

    def job_started(self, job_id: str, position: str) -> None:
        """Say which job begins."""
        self._last = time.monotonic()
        self._write(f"[{position}] {job_id}")

    def waiting(self, job_id: str, waited_s: float, seen: str) -> None:
        """Say, now and then, how long the server has been starting."""
        self._now_and_then(f"{job_id}: server starting for {duration(waited_s)}, {seen}")

    def questions(self, job_id: str, progress: Progress) -> None:
        """Say, now and then, how far it is."""
        self._now_and_then(f"{job_id}: {describe(progress)}")

    def job_ended(self, verdict: Verdict) -> None:
        """Say how it ended."""
        self._write(closing_line(verdict))

    def note(self, text: str) -> None:
        """Say it."""
        self._write(text)

    def _now_and_then(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last >= self._every_s:
            self._last = now
            self._write(line)


class LiveDisplay:
    """One line that is redrawn, for a terminal; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._position = ""
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def job_started(self, job_id: str, position: str) -> None:
        """Show which job begins."""
        self._position = position
        self._show(job_id, "starting")

    def waiting(self, job_id: str, waited_s: float, seen: str) -> None:
        """Show how long the server has been starting."""
        self._show(job_id, f"server starting for {duration(waited_s)}, {seen}")

    def questions(self, job_id: str, progress: Progress) -> None:
        """Show how far it is."""
        self._show(job_id, describe(progress))

    def job_ended(self, verdict: Verdict) -> None:
        """Leave one line behind."""
        self._live.update(Text(""))
        self._console.print(Text(closing_line(verdict)))

    def note(self, text: str) -> None:
        """Leave it behind."""
        self._console.print(Text(text))

    def _show(self, job_id: str, what: str) -> None:
        line = Text(f"[{self._position}] {job_id}: {what}", no_wrap=True, overflow="ellipsis")
        self._live.update(line)
