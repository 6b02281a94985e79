"""Reports: read back by other people's parsers, safe for any text, complete."""

from __future__ import annotations

import io
import json
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from rich.console import Console
from verdict_helpers import make_job, make_record, make_result

from evalsuite.errors import ConfigError, ServerError
from evalsuite.evidence import BackendEvidence
from evalsuite.flips import Flip
from evalsuite.judge import RunContext, judge
from evalsuite.ledger import LedgerRecord
from evalsuite.report import RunMeta, html, json_report, junit, markdown, write_all
from evalsuite.report.history import load_history
from evalsuite.report.terminal import print_verdicts
from evalsuite.run_folder import RunFolder
from evalsuite.session import RunRequest
from evalsuite.verdict import Status, Verdict

HOSTILE = (
    "</script><script>alert(1)</script>\x00\x1b[31m\ud800\ufffe ]]> & \" ' | "
    "`````` [red]x[/] {{7*7}}"
)
META = RunMeta("run-1", "2026-01-02T03:04:05+00:00", "evalsuite run --config config-cpu.txt")


def verdicts() -> list[Verdict]:
    nothing = BackendEvidence("triton", "TRITON", ignored_switches=("VLLM_OLD",))
    context = RunContext("abc", "h100", "vllm 0.26", 12.5, 3.0, "evalsuite run --config x.yaml")
    died = ServerError(f"died {HOSTILE}", "cmd", -9, [HOSTILE, "last line"])
    return [
        judge(make_job(), make_result(1190, 1319, retries=3), nothing, context=context),
        judge(make_job(), make_result(900, 1319, num_truncated=40), nothing, context=context),
        judge(make_job(), None, nothing, context=replace(context, error=died)),
        judge(make_job("no such pool"), None, nothing),
        Verdict("suite/unsure", Status.INCONCLUSIVE, "too few questions"),
    ]  # fmt: skip


def test_results_json_reads_back(tmp_path: Path) -> None:
    found = verdicts()
    found[0] = judge(
        make_job(), make_result(1, 2, per_question={0: (True, None), 1: (False, True)}),
        BackendEvidence(),
    )  # fmt: skip
    write_all(tmp_path, found, {}, META)
    assert json_report.read(tmp_path) == found
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["schema"] == "evalsuite.results/1"
    assert data["exit_code"] == 1
    assert data["counts"] == {"PASS": 0, "FAIL": 2, "ERROR": 1, "INCONCLUSIVE": 1, "SKIP": 1}
    assert data["run"]["command"] == META.command


def test_results_of_another_schema_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no results\.json"):
        json_report.read(tmp_path)
    (tmp_path / "results.json").write_text('{"schema": "evalsuite.results/9"}')
    with pytest.raises(ConfigError, match="results/9"):
        json_report.read(tmp_path)


def test_what_another_version_or_an_editor_wrote_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, verdicts(), {}, META)
    path = tmp_path / "results.json"
    data = json.loads(path.read_text())
    del data["verdicts"][0]["evidence"]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"results\.json: not a verdict .*'evidence'"):
        json_report.read(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.keep(verdicts()[0])
    assert folder.kept(verdicts()[0].job_id) == verdicts()[0]
    (kept,) = folder.path.rglob("verdict.json")
    for content in ("{", "[]", '{"job_id": 3}'):
        kept.write_text(content)
        with pytest.raises(ConfigError, match=r"verdict\.json: .*delete it to run the job again"):
            folder.kept(verdicts()[0].job_id)
    with pytest.raises(ConfigError, match=r"run\.json: limit 'z' is not what"):
        RunRequest.from_json({"configs": ["x"], "limit": "z", "of another version": 1})
    with pytest.raises(ConfigError, match=r"run\.json: configs 'x' is not what"):
        RunRequest.from_json({"configs": "x"})


def test_ledger_copy_reads_back(tmp_path: Path) -> None:
    records = [
        make_record(1, HOSTILE, token_logprobs=(-0.5,)),
        make_record(0, None, status="timeout", retries=2, retry_errors=("TimeoutError: a", "b")),
        make_record(0, "18", repeat=1),
    ]
    write_all(tmp_path, [], {"suite/job": records, "suite/none": []}, META)
    path = tmp_path / "questions" / "suite__job.jsonl"
    assert json_report.read_questions(path) == [records[1], records[0], records[2]]
    assert [p.name for p in path.parent.iterdir()] == ["suite__job.jsonl"]
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ConfigError, match=r"jsonl:4"):
        json_report.read_questions(path)


def test_junit_is_read_by_junitparser(tmp_path: Path) -> None:
    path = junit.write(tmp_path / "junit.xml", verdicts(), META)
    suite = next(iter(JUnitXml.fromfile(str(path))))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (5, 1, 2, 1)
    cases = list(suite)
    kinds = [type(case.result[0]) if case.result else None for case in cases]
    assert kinds == [None, Failure, Error, Skipped, Error]
    assert cases[0].name == "test_accuracy[suite/job]"
    assert cases[0].classname == "evalsuite.test_accuracy"
    case = ET.parse(path).find("testsuite/testcase")
    assert case is not None
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["retries"] == "3"
    assert properties["status"] == "PASS"
    assert (properties["backend_asked"], properties["backend"]) == ("triton", "TRITON")
    assert "last line" in cases[2].result[0].text
    assert "evalsuite run --config x.yaml" in cases[1].result[0].text
    assert cases[4].result[0].type == "INCONCLUSIVE"


def test_junit_shows_every_retry(tmp_path: Path) -> None:
    errors = ("HTTP 500: boom", f"ClientOSError: {HOSTILE}")
    records = [
        make_record(7, retries=2, retry_errors=errors),
        make_record(3, None, status="timeout", retry_errors=("TimeoutError: no full reply",)),
        make_record(5),
    ]
    verdict = judge(make_job(), make_result(1190, 1319, retries=2), BackendEvidence())
    paths = write_all(tmp_path, [verdict], {"suite/job": records}, META)
    (case,) = next(iter(JUnitXml.fromfile(str(paths["junit"]))))
    lines = str(case.system_out).splitlines()
    assert "question 3, repeat 0, attempt 1: TimeoutError: no full reply" in lines
    assert "question 7, repeat 0, attempt 1: HTTP 500: boom" in lines
    assert any(line.startswith("question 7, repeat 0, attempt 2: ClientOSE") for line in lines)
    assert sum(line.startswith("question") for line in lines) == 3
    many = [make_record(i, retry_errors=("HTTP 429: busy",)) for i in range(1319)]
    text = junit.render([verdict], META, {"suite/job": many})
    assert text.count("HTTP 429: busy") == junit.MAX_RETRY_LINES
    assert f"... {1319 - junit.MAX_RETRY_LINES} more" in text


def test_junit_has_the_form_pytest_writes(pytester_xml: ET.Element) -> None:
    ours = ET.fromstring(junit.render(verdicts(), META))
    for path in (".", "testsuite", "testsuite/testcase"):
        theirs, own = pytester_xml.find(path), ours.find(path)
        assert theirs is not None
        assert own is not None
        assert theirs.tag == own.tag
        assert set(theirs.attrib) <= set(own.attrib)
    tags = {child.tag for case in pytester_xml.iter("testcase") for child in case}
    assert tags == {"failure", "error", "skipped"}
    assert {c.tag for case in ours.iter("testcase") for c in case} <= {
        *tags, "properties", "system-out",
    }  # fmt: skip


@pytest.fixture
def pytester_xml(tmp_path: Path) -> ET.Element:
    test = tmp_path / "test_x.py"
    test.write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise RuntimeError('start')\n"
        "def test_fail(): assert 0\n"
        "def test_error(broken): pass\n"
        "def test_skip(): pytest.skip('why')\n"
        "def test_ok(): pass\n"
    )
    import subprocess
    import sys

    out = tmp_path / "out.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    command += [f"--junitxml={out}", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    return ET.parse(out).getroot()


@settings(max_examples=60, deadline=None)
@given(st.text(), st.binary(max_size=40))
def test_any_text_is_safe_in_every_format(text: str, raw: bytes) -> None:
    noisy = text + raw.decode("latin-1") + HOSTILE
    verdict = Verdict(
        f"suite/{noisy}", Status.ERROR, noisy, warnings=(noisy,), log_tail=(noisy,),
        reproduce=noisy, evidence=BackendEvidence(noisy, noisy),
    )  # fmt: skip
    root = ET.fromstring(junit.render([verdict], META))
    assert root.find("testsuite/testcase/error") is not None
    for page in (
        markdown.render([verdict], META),
        html.render([verdict], {verdict.job_id: [make_record(0, noisy, right=False)]}, META),
    ):
        page.encode("utf-8")
        assert "\x00" not in page
        outside_fences = re.sub(r"(?s)(`{3,})text\n.*?\n\1", "", page)
        assert "<script>alert" not in outside_fences
    table_lines = markdown.render([verdict], META).split("\n")[2:5]
    width = len(markdown.HEADER) + 1
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in table_lines] == [width] * 3


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "action", "xlink:href")]


def test_html_page_is_self_contained_and_complete() -> None:
    found = verdicts()
    flip = Flip(7, "18", True, False, "#### 18", f"#### 17 {HOSTILE}", "near-tie: margin 0.02")
    meta = RunMeta(
        "run-3", flips={"suite/job": [flip]},
        history={"suite/job": [("run-1", 0.89), ("run-2", 0.91)]},
    )  # fmt: skip
    page = html.render(found, {"suite/job": [make_record(7, "#### 17", right=False)]}, meta)
    links = _Links()
    links.feed(page)
    assert all(link.startswith("#") for link in links.found)
    assert not {"script", "img", "link", "iframe"} & set(links.tags)
    assert links.tags.count("svg") >= 3  # intervals, margins, trend
    for text in ("near-tie: margin 0.02", "last line", "evalsuite run --config x.yaml", "run-2"):
        assert text in page
    assert "{{7*7}}" in page
    assert "url(" not in page


def test_history_is_read_from_the_runs_themselves(tmp_path: Path) -> None:
    first = judge(make_job(), make_result(1190, 1319), BackendEvidence())
    error = judge(
        make_job(), None, BackendEvidence(), context=RunContext(error=ServerError("died"))
    )
    for number, verdict in enumerate([first, error, first]):
        write_all(tmp_path / f"run-{number}", [verdict], {}, RunMeta(f"run-{number}"))
        os.utime(tmp_path / f"run-{number}" / "results.json", (number, number))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    assert load_history(tmp_path, "run-9") == {
        "suite/job": [("run-0", 1190 / 1319), ("run-2", 1190 / 1319)]
    }
    assert load_history(tmp_path, "run-2") == {"suite/job": [("run-0", 1190 / 1319)]}


def test_flips_of_a_verdict_are_shown() -> None:
    flip = {
        "index": 7, "target": "18", "was_right": True, "is_right": False,
        "before": "so 18", "after": "so 17", "note": "",
    }  # fmt: skip
    verdict = Verdict("suite/job", Status.FAIL, "drop", gate="paired", detail={"flips": [flip]})
    page = html.render([verdict], {}, META)
    assert "so 18" in page
    assert "so 17" in page


def test_a_run_that_was_resumed_in_vain_has_a_page_with_the_replies_of_its_first_part() -> None:
    record = LedgerRecord(
        3, 0, "answered", "so 17", "18", {"numeric": "wrong"}, extracted={"numeric": "17"}
    )
    verdict = Verdict("suite/job", Status.ERROR, "the server did not start")
    page = html.render([verdict], {"suite/job": [record]}, META)
    assert "so 17" in page
    assert "numeric reads 17" in page


def test_markdown_names_what_failed() -> None:
    text = markdown.render(verdicts(), META)
    assert text.startswith("## Accuracy: 1 PASS, 1 FAIL, 1 ERROR, 1 INCONCLUSIVE, 1 SKIP")
    assert "0.6823 (40 cut)" in text
    assert "| asked | ran | questions/s | time (s) |" in text
    assert "| triton | TRITON | 1319.0 | 12.5 |" in text
    assert "### suite/job: FAIL" in text
    assert "evalsuite run --config x.yaml" in text


def test_terminal_prints_literal_text() -> None:
    stream = io.StringIO()
    print_verdicts(verdicts(), Console(file=stream, width=160, force_terminal=False))
    text = stream.getvalue()
    assert "[red]x[/]" in text
    assert "\x1b[31m" not in text
    assert "0.9022" in text
    assert "suite/unsure: INCONCLUSIVE: too few questions" in text
