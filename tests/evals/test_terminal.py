"""The verdict table: what it holds, what a narrow terminal leaves out, what README shows."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from verdict_helpers import make_job, make_result

from evalsuite.evidence import BackendEvidence
from evalsuite.judge import RunContext, judge
from evalsuite.report.terminal import print_verdicts
from evalsuite.verdict import Status, Verdict

README = Path(__file__).resolve().parents[2] / "README.md"


# As in the demo's files: repeats on one machine are equal to the bit.
CALIBRATION = {
    "sigma_run": 0.0,
    "discordant": 0.0,
    "repeats": 5,
    "num_questions": 330,
    "hardware": "AMD EPYC",
    "date": "2026-12-01",
}


def demo() -> list[Verdict]:
    """What `make demo` ended with on two cores."""
    ran = (("cpu", "cpu", 8.31, 10.2), ("torch-grouped-mm", "torch_grouped_mm", 7.73, 10.8))
    return [
        replace(
            judge(
                make_job(accuracy_threshold=0.94, tolerance=0.01, calibration=CALIBRATION),
                make_result(310, 330, duration_s=asked_s),
                BackendEvidence(backend, backend),
                context=RunContext(duration_s=duration_s),
            ),
            job_id=f"moe-refactor/MiniGSM-tiny-{name}",
        )
        for name, backend, asked_s, duration_s in ran
    ]


def printed(verdicts: list[Verdict], width: int) -> list[str]:
    stream = io.StringIO()
    print_verdicts(verdicts, Console(file=stream, width=width, force_terminal=False))
    return stream.getvalue().splitlines()


def test_a_wide_terminal_has_everything() -> None:
    head, *_ = [line for line in printed(demo(), 200) if "verdict" in line]
    wanted = "job verdict accuracy interval floor margin sees_drop asked ran questions/s time"
    assert all(word.replace("_", " ") in head for word in wanted.split())
    row = next(line for line in printed(demo(), 200) if "MiniGSM-tiny-cpu" in line)
    # 0.9394 is 0.9 points above 0.93; the standard error of 310 of 330 is 1.31 points.
    for text in ("0.9394", "0.9082 to 0.9604", "+0.7 SE", "1.0 points", "39.7", "10.2 s"):
        assert text in row
    assert row.count(" cpu ") == 2


def test_the_requested_backend_stands_beside_the_one_that_ran() -> None:
    verdict = judge(make_job(), make_result(1200, 1319), BackendEvidence("", "triton"))
    other = judge(make_job(), make_result(1200, 1319), BackendEvidence("cutlass", "triton"))
    lines = printed([verdict, other], 200)
    assert any("auto" in line and "triton" in line for line in lines)
    assert any("cutlass" in line and "triton" in line and "ERROR" in line for line in lines)


@pytest.mark.parametrize("width", [200, 170, 160, 140, 120, 100, 80, 60, 40])
def test_nothing_is_folded_inside_a_number_or_a_name(width: int) -> None:
    lines = printed(demo(), width)
    text = "\n".join(lines)
    assert max(map(cell_len, lines)) <= width
    # The longest name is 42 characters; below that it has to be broken.
    names = [v.job_id for v in demo() if len(v.job_id) + len("PASS ") <= width]
    for word in ("0.9394", "0.93", "PASS", "torch_grouped_mm", *names):
        assert word in text
    assert text.count("PASS") == 2


def test_columns_leave_a_narrow_terminal_in_order_of_weight() -> None:
    heads = {
        width: next(line for line in printed(demo(), width) if "verdict" in line)
        for width in (200, 160, 140, 120)
    }
    assert "time" in heads[200]
    assert "time" not in heads[160]
    assert "margin" in heads[140]
    assert all("accuracy" in head and "ran" in head for head in heads.values())


@pytest.mark.parametrize("width", [200, 60])
def test_what_is_to_be_copied_is_not_folded(width: int) -> None:
    command = "A=1 python -m moeserve " + " ".join(f"--option-{i} value" for i in range(30))
    detail: dict[str, object] = {"server_command": command, "server_log": "results/r/001.log"}
    dead = Verdict("s/j", Status.ERROR, "it died", detail=detail, reproduce="evalsuite run x")
    assert printed([dead], width)[-3:] == [
        f"  server command: {command}",
        "  server log: results/r/001.log",
        "  reproduce: evalsuite run x",
    ]


def test_short_lines_without_an_accuracy() -> None:
    skip = Verdict("suite/far", Status.SKIP, "needs 2 B200")
    text = "\n".join(printed([skip], 20))
    assert "SKIP suite/far" in text
    assert "accuracy" not in text


def test_readme_shows_what_is_printed() -> None:
    table = [line for line in printed(demo(), 200) if line[0] in "┏┃┡│└"]
    assert len(table) == 6
    assert "\n".join(table) in README.read_text(encoding="utf-8")
