"""Compare: lm-eval's table, exact pairwise tests, flips with both texts, three renderings."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from verdict_helpers import make_job, make_record, make_result

from evalsuite.compare import Comparison, compare, load
from evalsuite.errors import ConfigError
from evalsuite.evidence import BackendEvidence
from evalsuite.judge import judge
from evalsuite.report import RunMeta, write_all
from evalsuite.report.comparison import print_comparison, render_html, render_markdown
from evalsuite.stats.paired import mcnemar_two_sided

N = 200


def write_run(folder: Path, right: set[int], **values: Any) -> Path:
    result = make_result(
        len(right), N, per_question={i: (i in right,) for i in range(N)},
        num_correct={"numeric": len(right), "strict-match": len(right) - 5}, **values,
    )  # fmt: skip
    records = [
        make_record(i, f"#### {18 if i in right else 17} <b>{folder.name}</b>", right=i in right)
        for i in range(N)
    ]
    verdict = judge(make_job(num_questions=N), result, BackendEvidence())
    write_all(folder, [verdict], {"suite/job": records}, RunMeta())
    return folder


@pytest.fixture
def comparisons(tmp_path: Path) -> list[Comparison]:
    runs = [
        write_run(tmp_path / "triton", set(range(180))),
        write_run(tmp_path / "cutlass", set(range(12, 180)) | {190, 191}),
        write_run(tmp_path / "aiter", set(range(1, 180))),
    ]
    return compare(load(runs))


def test_pairs_are_exact_and_holm_adjusted(comparisons: list[Comparison]) -> None:
    (only,) = comparisons
    assert [one.label for one in only.contenders] == ["triton", "cutlass", "aiter"]
    first = only.pairs[0]
    assert (first.first, first.second, first.n) == ("triton", "cutlass", N)
    assert first.p_value == pytest.approx(mcnemar_two_sided(12, 2))
    assert first.p_holm == pytest.approx(3 * first.p_value)
    assert first.difference == pytest.approx(-0.05)
    assert [flip.index for flip in first.flips] == [*range(12), 190, 191]
    assert first.flips[0].before == "#### 18 <b>triton</b>"
    assert first.flips[0].after == "#### 17 <b>cutlass</b>"
    assert first.num_same_text == 0
    assert only.pairs[1].p_value == 1.0


def test_table_has_lm_evals_form(comparisons: list[Comparison]) -> None:
    text = render_markdown(comparisons)
    assert "| Tasks | run | Filter | n-shot | Metric |  | Value |  | Stderr |" in text
    # lm-eval's standard error divides by n - 1: sqrt(0.9 * 0.1 / 199).
    assert "| gsm8k | triton | numeric * | 5 | exact_match | ↑ | 0.9000 | ± | 0.0213 |" in text
    assert "| gsm8k | triton | strict-match | 5 | exact_match | ↑ | 0.8750 | ± | 0.0234 |" in text


def test_html_and_terminal(comparisons: list[Comparison]) -> None:
    page = render_html(comparisons)
    assert page.count("<svg") == 2
    assert "&lt;b&gt;cutlass&lt;/b&gt;" in page
    assert "<b>cutlass" not in page
    assert "http" not in page.replace("http-equiv", "")
    # A bar and its interval for each pair; one that three pairs do not explain has a colour.
    assert page.count('class="whisker"') == 3
    assert re.findall(r'class="block (\w*)"', page) == ["FAIL", "", "PASS"]
    widths = [float(x) for x in re.findall(r'class="block \w*" .*? width="([\d.]+)"', page)]
    assert widths[0] == pytest.approx(10 * widths[1], rel=0.01)  # -5.0 and -0.5 points
    # Each reply of a flip stands under the name of its run.
    assert page.count("<div><strong>triton</strong><pre>") == 14 + 1
    stream = io.StringIO()
    print_comparison(comparisons, Console(file=stream, width=200))
    assert "first 5 of 14 flips" in stream.getvalue()


def test_a_log_is_no_narrow_terminal(
    comparisons: list[Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    print_comparison(comparisons)
    told = capsys.readouterr().out
    assert "p (two-sided)" in told
    assert "paired SE" in told


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", set(range(180)))
    b = write_run(tmp_path / "b", set(range(180)), prompt_hash="feed")
    with pytest.raises(ConfigError, match="prompts feed"):
        compare(load([a, b]))
    with pytest.raises(ConfigError, match="no results"):
        load([tmp_path])
