"""Progress: what a line says, and how often."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from verdict_helpers import make_result

from evalsuite.evaluators.base import Progress
from evalsuite.progress import LiveDisplay, PlainDisplay, closing_line, describe, duration
from evalsuite.verdict import Status, Verdict


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (65, "1 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7800, "2 h 10 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_line_has_count_rate_accuracy_failures_and_time_left() -> None:
    line = describe(Progress(done=60, total=100, correct=45, failed=10, elapsed_s=20.0))
    assert line == "60/100 questions, 3.0/s, accuracy so far 0.900, 10 failed, 13 s left"
    resumed = Progress(done=60, total=100, correct=60, failed=0, elapsed_s=10.0, reused=50)
    assert describe(resumed) == "60/100 questions, 1.0/s, accuracy so far 1.000, 40 s left"
    assert describe(Progress(0, 100, 0, 0, 0.0)) == "0/100 questions"


def test_the_last_line_has_the_rate_of_what_was_answered() -> None:
    # Ended early: no repeat is complete, and 40 of 100 questions were answered.
    result = make_result(0, 100, num_answered=40, repeats=0, duration_s=2.0)
    ended = Verdict("s/a", Status.FAIL, "broken", "threshold", result, duration_s=3.0)
    assert closing_line(ended) == "s/a: FAIL in 3.0 s, 20.0 questions/s: broken"


def test_plain_lines_are_seconds_apart() -> None:
    lines: list[str] = []
    display = PlainDisplay(lines.append, every_s=60.0)
    display.job_started("s/a", "1/2")
    for done in range(100):
        display.questions("s/a", Progress(done, 100, done, 0, 1.0))
    display.job_ended(Verdict("s/a", Status.FAIL, "0.5 < 0.9\nmore", accuracy=0.5, duration_s=3.0))
    assert lines == ["[1/2] s/a", "s/a: FAIL 0.5000 in 3.0 s: 0.5 < 0.9"]


def test_live_line_is_redrawn_and_the_closing_line_stays() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with LiveDisplay(console) as display:
        display.job_started("s/[a]", "1/1")
        display.waiting("s/[a]", 3.0, "still making progress")
        display.questions("s/[a]", Progress(5, 10, 5, 0, 1.0))
        display.job_ended(Verdict("s/[a]", Status.PASS, "", accuracy=1.0, duration_s=2.0))
    assert "s/[a]: PASS 1.0000 in 2.0 s" in screen.getvalue()
