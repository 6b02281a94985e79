"""Whole runs against servers that answer oddly: what is an answer, what is a fault, which exit.

Every run goes the line of `evalsuite run --base-url`; the server is scripted byte by byte. A fault
of the server is an ERROR with exit 75, one that only the user can mend 4, and neither ever has an
accuracy. What is odd but complete is an answer like any other.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from eval_helpers import GOLD, by_question, gold_script
from fake_server import Action, FakeServer, Request, body, error

from evalsuite import http_reply, session, tasks
from evalsuite.executors import local
from evalsuite.ledger import LedgerRecord
from evalsuite.progress import PlainDisplay
from evalsuite.report import RunMeta, html, junit
from evalsuite.run_folder import RunFolder
from evalsuite.tasks.base import DataSource, Sample, TaskSettings
from evalsuite.verdict import Status, Verdict, exit_code

NUM_QUESTIONS = 20
FAILED = (5, 7, 8, 11, 13, 17)
CHOICE = {"index": 0, "text": "#### 18", "finish_reason": "stop"}


def known(num_questions: int = NUM_QUESTIONS) -> list[Sample]:
    return tasks.get("minigsm").samples(TaskSettings(num_questions, 2, "", DataSource()))


def run(
    folder: Path, script: Callable[[Request], Action], **keys: object
) -> tuple[Verdict, list[LedgerRecord], FakeServer]:
    """One job of 20 questions, threshold 0.9, against the script."""
    job = {
        "model_name": "fake", "accuracy_threshold": 0.9, "tolerance": 0.0, "task": "minigsm",
        "num_questions": NUM_QUESTIONS, "num_fewshot": 2, "engine": "external",
        "provenance": "test", "max_retries": 1, **keys,
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job))
    with FakeServer(script) as server:
        request = session.RunRequest(
            configs=(str(folder / "job.yaml"),), base_url=server.url, root=str(folder)
        )
        prepared = session.prepare(request, {"HOME": str(folder)})
        results = RunFolder(folder / "run")
        results.begin(request.to_json())
        (verdict,) = local.execute(prepared.jobs, prepared.options, results, PlainDisplay(print))
    return verdict, results.records(verdict.job_id), server


def raw(head: str, content: bytes = b"") -> Action:
    """A reply whose head is the test's own; the line is closed after it."""
    return Action(raw=head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + content)


def with_choice(**keys: object) -> Action:
    return body({"choices": [{**CHOICE, **keys}]})


ANSWER = json.dumps({"choices": [CHOICE]}).encode()
PAGE = b"<!DOCTYPE html><html><title>Sign in</title></html>"
OK = "HTTP/1.1 200 OK\ncontent-type: application/json"
CHUNKED = f"{OK}\ntransfer-encoding: chunked"


@pytest.mark.parametrize(
    ("action", "first_error"),
    [
        (error(500, "out of luck"), "HTTP 500: out of luck"),
        (body({"choices": []}), "Malformed: the body has no choices (choices: [])"),
        (with_choice(text=None), "Malformed: the text of a choice is None"),
        (body({"error": {"message": "gone"}}), "Malformed: an error with status 200: gone"),
    ],
    ids=["500", "no choices", "text null", "error with 200"],
)
def test_six_requests_that_fail_for_ever_are_an_error_and_no_accuracy(
    tmp_path: Path, action: Action, first_error: str
) -> None:
    """14 right of 14 answered is no pass, and 14 of 20 no failure of the model."""
    script = by_question(known(), {index: [action] for index in FAILED})
    verdict, records, server = run(tmp_path, script)
    assert (verdict.status, exit_code([verdict])) == (Status.ERROR, 75)
    assert verdict.accuracy is None
    assert "6 of 20 requests failed" in verdict.reason
    assert first_error in verdict.reason
    assert verdict.result is not None
    assert (verdict.result.num_answered, verdict.result.num_failed) == (14, 6)
    assert verdict.result.num_correct["last-number"] == 14
    assert [record.index for record in records if not record.is_answered] == [*FAILED]
    # Each was tried twice, and no other question was asked again.
    assert len(server.requests) == 14 + 2 * 6


def test_six_requests_that_fail_once_pass_with_their_retries_reported(tmp_path: Path) -> None:
    script = by_question(known(), {index: [error(500, "once"), GOLD] for index in FAILED})
    verdict, records, _ = run(tmp_path, script)
    assert (verdict.status, verdict.accuracy) == (Status.PASS, 1.0)
    assert verdict.result is not None
    assert (verdict.result.num_failed, verdict.result.retries) == (0, 6)
    assert "6 requests were retried" in verdict.warnings
    retried = [record.index for record in records if record.retry_errors == ("HTTP 500: once",)]
    assert retried == [*FAILED]


def test_a_server_that_is_gone_after_ten_questions_is_an_error(tmp_path: Path) -> None:
    gold = gold_script(known())

    def script(request: Request) -> Action:
        return Action(is_death=True) if request.number >= 10 else gold(request)

    verdict, records, _ = run(tmp_path, script, max_concurrency=1, max_retries=0)
    assert (verdict.status, exit_code([verdict])) == (Status.ERROR, 75)
    assert verdict.accuracy is None
    assert verdict.result is not None
    assert (verdict.result.num_answered, verdict.result.num_failed) == (10, 10)
    assert "10 of 20 requests failed" in verdict.reason
    kinds = sorted(record.error.split(":")[0] for record in records if not record.is_answered)
    assert kinds == ["ClientConnectorError"] * 9 + ["ServerDisconnectedError"]


FAULTS: dict[str, tuple[Action, str, str]] = {
    "page with 200": (Action(payload=PAGE), "malformed", "beginning '<!DOCTYPE html><html"),
    "page with 502": (Action(status=502, payload=PAGE), "http_error", "HTTP 502: <!DOCTYPE"),
    "no body": (Action(status=204, payload=b""), "malformed", "not JSON (0 bytes)"),
    "half a body": (Action(cut_after=30), "connection_error", "ClientPayloadError: "),
    "reset in the body": (Action(cut_after=30, is_reset=True), "connection_error", ": "),
    "half a body of unknown length": (raw(OK, ANSWER[:-20]), "malformed", "not JSON (5"),
    "chunks without an end": (
        raw(CHUNKED, b"20\r\n" + ANSWER[:32] + b"\r\n"), "connection_error", "ClientPayloadError: ",
    ),
    "chunks of no number": (raw(CHUNKED, b"zz\r\n" + ANSWER), "connection_error", ": "),
    "no HTTP": (Action(raw=b"hello\n"), "connection_error", ": "),
    "nothing": (Action(raw=b""), "connection_error", "ServerDisconnectedError: "),
    "endless head": (raw(f"{OK}\nx: {'y' * 100_000}"), "connection_error", ": "),
    "gzip by name only": (
        Action(payload=ANSWER, headers={"content-encoding": "gzip"}), "connection_error", "400, ",
    ),
    "half a gzip": (
        Action(payload=gzip.compress(ANSWER)[:40], headers={"content-encoding": "gzip"}),
        "malformed", "not JSON (",
    ),
    "events": (Action(payload=b"data: " + ANSWER + b"\n\ndata: [DONE]\n\n"), "malformed", "JSON"),
    "two answers": (Action(payload=ANSWER + ANSWER), "malformed", "Extra data"),
    "two choices of one index": (
        body({"choices": [{"index": 0, "text": "#### 18"}] * 2}), "malformed", "index [0, 0]",
    ),
    "index of another": (with_choice(index=1), "malformed", "index [1]"),
    "index a text": (with_choice(index="0"), "malformed", "index ['0']"),
    "index a list": (with_choice(index=[0]), "malformed", "index [[0]]"),
    "index true": (with_choice(index=True), "malformed", "index [True]"),
    "text a list": (with_choice(text=["#### 18"]), "malformed", "text of a choice is ["),
    "given up": (with_choice(finish_reason="abort"), "malformed", "gave the request up"),
    "given up in SGLang's words": (
        with_choice(finish_reason={"type": "abort", "message": "x"}), "malformed", "gave the",
    ),
    "withheld": (with_choice(finish_reason="content_filter"), "malformed", "gave the request up"),
    "error beside an answer": (
        body({"error": {"message": "cut"}, "choices": [{"index": 0, "text": "#### 18"}]}),
        "malformed", "an error with status 200: cut",
    ),
    "error in a choice": (with_choice(error={"message": "cut"}), "malformed", "in a choice: cut"),
    "moved": (
        Action(status=308, payload=b"", headers={"Location": "https://elsewhere/v1"}),
        "http_error", "HTTP 308: redirected to https://elsewhere/v1",
    ),
    "moved without a word": (Action(status=302, payload=b""), "http_error", "HTTP 302: redirected"),
    "busy for ever": (error(429, "busy", Retry_After="0"), "http_error", "HTTP 429: busy"),
    "late": (Action(delay_s=30.0), "timeout", "TimeoutError: no full reply within 2 s"),
}  # fmt: skip


@pytest.mark.parametrize("evaluator", ["builtin", pytest.param("lm-eval", marks=pytest.mark.slow)])
def test_no_fault_of_a_reply_is_an_answer(tmp_path: Path, evaluator: str) -> None:
    """One question for each fault; every other question is answered rightly."""
    num_questions = 2 * len(FAULTS)
    faulty = dict(zip(range(0, num_questions, 2), FAULTS.items(), strict=True))
    script = by_question(
        known(num_questions), {index: [action] for index, (_, (action, _, _)) in faulty.items()}
    )
    if evaluator == "lm-eval":
        pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    verdict, records, _ = run(
        tmp_path, script, num_questions=num_questions, evaluator=evaluator,
        max_retries=0, request_timeout_seconds=2,
    )  # fmt: skip
    assert [record.index for record in records] == [*range(num_questions)]
    for index, (name, (_, status, words)) in faulty.items():
        record = records[index]
        assert (record.status, record.text, record.scores) == (status, None, {}), name
        assert words in record.error, (name, record.error)
        # A type and something after it.
        assert len(record.error.split(": ", 1)[1]) > 3, (name, record.error)
    assert all(record.scores["last-number"] == "correct" for record in records[1::2])
    assert (verdict.status, exit_code([verdict]), verdict.accuracy) == (Status.ERROR, 75, None)


def test_what_is_odd_but_complete_is_an_answer(tmp_path: Path) -> None:
    samples = known()
    targets = {sample.prompt: sample.target for sample in samples}

    def dressed(request: Request) -> Action:
        index = next(s.index for s in samples if s.prompt == request.prompts[0])
        choice: dict[str, object] = {"index": 0, "text": f"#### {targets[request.prompts[0]]}"}
        plain = {"choices": [{**choice, "finish_reason": "stop"}]}
        payload = json.dumps(plain).encode()
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload)
        faults = [error(503, "loading"), error(429, "wait", Retry_After="0.1")]
        faults += [Action(cut_after=9, is_reset=True), Action(payload=PAGE)]
        if index < len(faults) and request.attempt == 0:
            return faults[index]
        return [
            body({"choices": [choice]}),
            body({"choices": [{**choice, "finish_reason": None, "index": None}], "usage": None}),
            body({**plain, "usage": {"prompt_tokens": "many", "completion_tokens": -3}}),
            body({**plain, "usage": {"prompt_tokens": True}, "error": None, "stranger": [1]}),
            Action(payload=gzip.compress(payload), headers={"content-encoding": "gzip"}),
            Action(payload=zlib.compress(payload), headers={"content-encoding": "deflate"}),
            raw(CHUNKED, chunks),
            raw("HTTP/1.0 200 OK", payload),
            raw(f"HTTP/1.1 201 Created\ncontent-type: text/html\nContent-Length: {len(payload)}",
                payload),
            Action(payload=b"\xef\xbb\xbf" + payload),
            Action(payload=json.dumps(plain, indent=8).encode() + b"\r\n\r\n"),
            Action(payload=payload, delay_s=1.0),
            body({"choices": [{**choice, "logprobs": {"token_logprobs": [None, "x"]}}]}),
            body({"choices": [{**choice, "finish_reason": {"type": "stop", "matched": 5}}]}),
            body({"choices": [{**choice, "text": "x" * 2_000_000 + "\n" + str(choice["text"])}]}),
            body({"choices": [{**choice, "text": f"\x00\ud800\u2028]]>{choice['text']}"}]}),
            raw(f"HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\nContent-Length: {len(payload)}",
                payload),
            raw(f"{OK}\nset-cookie: a=b\ncontent-length: {len(payload)}\nconnection: close",
                payload),
        ][index % 18]  # fmt: skip

    verdict, records, _ = run(tmp_path, dressed)
    assert [record.error for record in records if not record.is_answered] == []
    assert {record.scores["last-number"] for record in records} == {"correct"}
    assert (verdict.status, verdict.accuracy) == (Status.PASS, 1.0)
    assert [record.retries for record in records] == [1] * 4 + [0] * 16
    assert {(record.prompt_tokens, record.completion_tokens) for record in records} == {(0, 0)}


def test_a_body_without_end_is_left_after_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_reply, "MAX_REPLY_BYTES", 100_000)
    endless = Action(payload=b" " * 5_000_000 + ANSWER)
    small = Action(payload=gzip.compress(b" " * 5_000_000), headers={"content-encoding": "gzip"})
    verdict, records, _ = run(
        tmp_path, by_question(known(), {3: [endless], 4: [small]}), max_retries=0
    )
    found = [record.error for record in records if not record.is_answered]
    assert found == ["Malformed: the body is longer than 100000 bytes"] * 2
    assert verdict.status is Status.ERROR


def test_a_reply_of_all_tokens_without_a_reason_counts_as_cut(tmp_path: Path) -> None:
    full = Action(("there are 5 and then",), finish_reason="", usage=(7, 64))
    short = Action(("there are 5 and then",), finish_reason="", usage=(7, 63))
    silent = Action(("there are 5 and then",), finish_reason="", usage=None)
    script = by_question(known(), {0: [full], 1: [short], 2: [silent]})
    _, records, _ = run(tmp_path, script, max_tokens=64, metric="numeric")
    assert [record.status for record in records[:3]] == ["truncated", "answered", "answered"]
    assert [record.scores["numeric"] for record in records[:2]] == ["no_answer", "wrong"]


def test_replies_cut_by_the_limit_stand_apart_from_wrong_ones(tmp_path: Path) -> None:
    """A model that needs 300 tokens, under the field's reading: all cut at 256, right at 512."""
    gold = gold_script(known())

    def script(request: Request) -> Action:
        if request.body["max_tokens"] < 300:
            return Action(("so first 3 and then 4",), finish_reason="length")
        return gold(request)

    (tmp_path / "a").mkdir()
    verdict, _, _ = run(tmp_path / "a", script, gate={"name": "threshold", "early_end": False})
    assert (verdict.status, verdict.accuracy) == (Status.FAIL, 0.0)
    assert verdict.warnings[0] == (
        "20 of 20 replies (100.0%) were cut by max_tokens 256; 20 of them hold no answer because "
        "they were cut"
    )
    (tmp_path / "b").mkdir()
    verdict, _, server = run(tmp_path / "b", script, max_tokens=512)
    assert (verdict.status, verdict.accuracy) == (Status.PASS, 1.0)
    assert {request.body["max_tokens"] for request in server.requests} == {512}


def test_the_report_says_on_which_questions_the_right_reading_differs(tmp_path: Path) -> None:
    """The field's rule loses one right answer and takes one wrong one: the totals are equal."""
    script = by_question(
        known(),
        {4: [Action((f"it is ${known()[4].target}.00.",))],
         9: [Action((f"#### -{known()[9].target}",))],
         12: [Action((f"#### 5{known()[12].target}",))]},
    )  # fmt: skip
    verdict, records, _ = run(tmp_path, script)
    assert verdict.status is Status.PASS
    assert (
        "the gating reading 'last-number' counts 18 right, the reading 'numeric' 18; they differ "
        "on 2 questions: 4, 9"
    ) in verdict.warnings
    page = html.render([verdict], {verdict.job_id: records}, RunMeta("r"))
    gold = known()[12].target
    assert f"gold\n{gold}, last-number reads 5{gold}, numeric reads 5{gold}</span>" in page
    # The raw reply stands below.
    assert f"<pre>#### 5{gold}</pre>" in page


@pytest.mark.parametrize("evaluator", ["builtin", pytest.param("lm-eval", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("named", "note"),
    [("gpt-x", ["replies name the model 'gpt-x', asked was 'fake'"]), ("org/fake", []), (5, [])],
)
def test_replies_of_another_model_are_remarked(
    tmp_path: Path, evaluator: str, named: object, note: list[str]
) -> None:
    if evaluator == "lm-eval":
        pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    targets = {sample.prompt: sample.target for sample in known()}

    def script(request: Request) -> Action:
        choice = {**CHOICE, "text": f"#### {targets[request.prompts[0]]}"}
        return body({"model": named, "choices": [choice]})

    verdict, _, _ = run(tmp_path, script, evaluator=evaluator)
    assert verdict.status is Status.PASS
    assert [warning for warning in verdict.warnings if "replies name" in warning] == note


def test_a_prompt_too_long_is_the_users_to_mend(tmp_path: Path) -> None:
    words = (
        "This model's maximum context length is 512 tokens. However, you requested 1157 tokens "
        "(901 in the messages, 256 in the completion). Please reduce the length."
    )
    verdict, _, server = run(tmp_path, lambda request: error(400, words))
    assert (verdict.status, exit_code([verdict])) == (Status.ERROR, 4)
    assert verdict.accuracy is None
    assert "by at least 645 tokens" in verdict.reason
    assert len(server.requests) <= NUM_QUESTIONS


@pytest.mark.parametrize("status", [302, 401, 404, 422])
def test_a_server_that_refuses_every_request_is_the_users_to_mend(
    tmp_path: Path, status: int
) -> None:
    verdict, _, _ = run(tmp_path, lambda request: error(status, "no"))
    assert (verdict.status, exit_code([verdict])) == (Status.ERROR, 4)
    assert f"the server refuses every request: HTTP {status}: " in verdict.reason


@pytest.mark.parametrize("kind", ["hangs", "fails"])
def test_a_server_that_answers_nothing_is_left_after_64_in_a_row(tmp_path: Path, kind: str) -> None:
    action = Action(delay_s=60.0) if kind == "hangs" else error(500, "engine is dead")
    began = time.monotonic()
    verdict, _, server = run(
        tmp_path, lambda request: action,
        num_questions=1000, max_concurrency=32, max_retries=0, request_timeout_seconds=1,
    )  # fmt: skip
    assert time.monotonic() - began < 15.0
    assert (verdict.status, exit_code([verdict])) == (Status.ERROR, 75)
    assert "64 requests in a row failed" in verdict.reason
    assert len(server.requests) <= 64 + 32


def test_seed_and_limit_of_the_file_are_in_every_request_and_in_the_reports(
    tmp_path: Path,
) -> None:
    verdict, _, server = run(tmp_path, gold_script(known()), seed=977, max_tokens=300)
    asked = {(r.body["seed"], r.body["max_tokens"], r.body["temperature"]) for r in server.requests}
    assert asked == {(977, 300, 0.0)}
    assert verdict.detail["sampling"] == {"max_tokens": 300, "temperature": 0.0, "seed": 977}
    meta = RunMeta("r")
    assert '<property name="seed" value="977" />' in junit.render([verdict], meta)
    assert '<property name="max_tokens" value="300" />' in junit.render([verdict], meta)
    assert "max_tokens 300, temperature 0.0, seed 977" in html.render([verdict], {}, meta)
    (ledger,) = (tmp_path / "run").glob("jobs/*/ledger.jsonl")
    assert json.loads(ledger.read_text().splitlines()[0])["ledger"]["seed"] == 977
    assert verdict.status is Status.PASS
