"""The built-in evaluator against a scripted server: what is asked, scored, counted, failed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from eval_helpers import GOLD, by_question, config, evaluate, gold_script, samples
from fake_server import Action, FakeServer, Request, body, error

from evalsuite import evaluators
from evalsuite.errors import ConfigError
from evalsuite.evaluators.aggregate import percentile
from evalsuite.evaluators.base import Progress
from evalsuite.ledger import read_ledger
from evalsuite.tasks.base import DataSource

FAILED = (5, 7, 8, 11, 13, 17)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_right_answers_and_everything_that_is_counted(path: Path) -> None:
    settings = config(num_questions=50)
    with FakeServer(gold_script(samples(settings))) as server:
        result = evaluate(server.url, path, settings)
    assert (result.accuracy, result.num_answered, result.num_failed) == (1.0, 50, 0)
    assert result.num_correct == dict.fromkeys(result.num_correct, 50)
    assert (result.task, result.evaluator, result.metric) == ("minigsm", "builtin", "last-number")
    assert (result.profile, result.repeats, result.retries) == ("minigsm/script", 1, 0)
    assert (result.prompt_tokens, result.completion_tokens) == (350, 150)
    assert result.per_question == dict.fromkeys(range(50), (True,))
    assert 0 < result.latency_p50_s <= result.latency_p99_s <= result.duration_s
    assert {request.body["seed"] for request in server.requests} == {42}
    assert {request.body["max_tokens"] for request in server.requests} == {256}


def test_errors_that_pass_are_retried_and_counted(path: Path) -> None:
    settings = config(max_retries=2)
    special = {index: [error(500, "once"), GOLD] for index in FAILED}
    with FakeServer(by_question(samples(settings), special)) as server:
        result = evaluate(server.url, path, settings)
    assert (result.accuracy, result.num_failed, result.retries) == (1.0, 0, 6)
    listed = [record.index for record in read_ledger(path) if record.retry_errors]
    assert listed == list(FAILED)


@pytest.mark.parametrize(
    ("action", "status", "first_error"),
    [
        (error(500, "for ever"), "http_error", "HTTP 500: for ever"),
        (error(404, "no such route"), "http_error", "HTTP 404: no such route"),
        (Action(is_dropped=True), "connection_error", "ServerDisconnectedError: "),
        (Action(cut_after=20), "connection_error", "ClientPayloadError: "),
        (body({"choices": []}), "malformed", "Malformed: the body has no choices"),
        (body({"choices": [{"index": 0, "text": None}]}), "malformed", "Malformed: the text"),
        (body({"error": {"message": "gone"}}), "malformed", "Malformed: an error with status 200"),
    ],
)
def test_a_failure_is_neither_a_wrong_answer_nor_left_out(
    path: Path, action: Action, status: str, first_error: str
) -> None:
    settings = config(max_retries=0)
    with FakeServer(by_question(samples(settings), {i: [action] for i in FAILED})) as server:
        result = evaluate(server.url, path, settings)
    assert (result.num_questions, result.num_answered, result.num_failed) == (20, 14, 6)
    assert result.first_error.startswith(first_error)
    assert result.accuracy_bounds == (14 / 20, 1.0)
    assert [index for index, (right,) in result.per_question.items() if right is None] == [*FAILED]
    failed = [record for record in read_ledger(path) if not record.is_answered]
    assert [record.index for record in failed] == list(FAILED)
    assert {record.status for record in failed} == {status}
    assert {record.text for record in failed} == {None}
    assert all(record.scores == {} and record.error for record in failed)


def test_a_server_that_dies_half_way(path: Path) -> None:
    settings = config(max_retries=1, max_concurrency=1)
    gold = gold_script(samples(settings))

    def script(request: Request) -> Action:
        return Action(is_death=True) if request.number == 10 else gold(request)

    with FakeServer(script) as server:
        result = evaluate(server.url, path, settings)
    assert (result.num_answered, result.num_failed) == (10, 10)
    assert result.first_error.startswith("ClientConnectorError: Cannot connect to host")
    attempts = read_ledger(path)[10].retry_errors
    assert [text.split(":")[0] for text in attempts] == [
        "ServerDisconnectedError",
        "ClientConnectorError",
    ]
    assert result.accuracy_bounds == (0.5, 1.0)


def test_an_abort_ends_at_once_with_what_is_open_on_record(path: Path) -> None:
    settings = config(num_questions=30, max_concurrency=8, max_retries=3)
    gold = gold_script(samples(settings))
    dead = threading.Event()

    def script(request: Request) -> Action:
        if request.number < 10:
            return gold(request)
        dead.set()
        return Action(delay_s=60.0)

    with FakeServer(script) as server:
        started = time.perf_counter()
        result = evaluate(
            server.url,
            path,
            settings,
            should_abort=lambda: "the server died" if dead.is_set() else "",
        )
        assert time.perf_counter() - started < 10.0
    assert (result.num_answered, result.num_failed) == (10, 20)
    assert result.stopped == "the server died"
    assert result.first_error == "stopped: the server died"
    open_ones = [record for record in read_ledger(path) if not record.is_answered]
    assert len(open_ones) == 8
    assert {record.status for record in open_ones} == {"connection_error"}


def test_nobody_there_is_noticed_before_every_question_was_tried(path: Path) -> None:
    settings = config(num_questions=1000, max_concurrency=32, max_retries=0)
    with FakeServer(lambda request: Action()) as server:
        url = server.url
    result = evaluate(url, path, settings)
    assert result.num_answered == 0
    assert result.num_failed == 1000
    assert "64 requests in a row failed" in result.stopped
    assert len(read_ledger(path)) <= 64 + 32


def test_empty_truncated_and_wrong_are_kept_apart(path: Path) -> None:
    settings = config(metric="numeric")
    special = {
        0: [Action(("",))],
        1: [Action((" \n",))],
        2: [Action(("the sum is 5 and",), finish_reason="length")],
        3: [Action(("#### 987654321",))],
        4: [Action(("#### 987654321 is more",), finish_reason="length")],
    }
    with FakeServer(by_question(samples(settings), special)) as server:
        result = evaluate(server.url, path, settings)
    statuses = [record.status for record in read_ledger(path)]
    assert statuses[:6] == ["empty", "empty", "truncated", "answered", "truncated", "answered"]
    assert (result.num_empty, result.num_truncated, result.num_no_answer) == (2, 2, 3)
    assert result.num_correct["numeric"] == 15
    assert result.num_failed == 0


@pytest.mark.parametrize(("max_tokens", "right"), [(256, 0), (512, 20)])
def test_a_limit_too_low_shows_as_truncation_and_the_limit_is_what_is_sent(
    path: Path, max_tokens: int, right: int
) -> None:
    settings = config(max_tokens=max_tokens, metric="numeric")
    gold = gold_script(samples(settings))

    def script(request: Request) -> Action:
        if request.body["max_tokens"] < 300:
            return Action(("so first 3 and then 4",), finish_reason="length")
        return gold(request)

    with FakeServer(script) as server:
        result = evaluate(server.url, path, settings)
    assert result.num_correct["numeric"] == right
    assert result.num_truncated == result.num_no_answer == 20 - right


def test_the_readings_differ_where_the_stop_or_the_rule_does(tmp_path: Path) -> None:
    """The script's bare stop word cuts a reply that uses it; the script's rule loses decimals."""
    replies = "First I restate the Question. Then {}\n#### {}"
    settings = config(num_questions=5)
    with FakeServer(gold_script(samples(settings), replies)) as server:
        cut = evaluate(server.url, tmp_path / "a.jsonl", settings)
    with FakeServer(gold_script(samples(settings), replies), has_stop=False) as server:
        whole = evaluate(server.url, tmp_path / "b.jsonl", settings)
    assert cut.num_correct["numeric"] == cut.num_correct["last-number"] == 0
    assert whole.num_correct["numeric"] == whole.num_correct["last-number"] == 5
    with FakeServer(gold_script(samples(settings), "it is ${}.00.")) as server:
        money = evaluate(server.url, tmp_path / "c.jsonl", settings)
    assert (money.num_correct["last-number"], money.num_correct["numeric"]) == (0, 5)


def test_answers_are_paired_by_index_when_choices_are_shuffled(path: Path) -> None:
    settings = config()
    gold = gold_script(samples(settings))

    def script(request: Request) -> Action:
        return Action(gold(request).texts, order=(3, 1, 0, 2))

    with FakeServer(script) as server:
        result = evaluate(server.url, path, settings, batch_size=4)
    assert len(server.requests) == 5
    assert (result.accuracy, result.prompt_tokens) == (1.0, 35)


def test_chat_mode_sends_messages_and_reads_content(path: Path) -> None:
    settings = config(use_chat_completions=True)
    with FakeServer(gold_script(samples(settings))) as server:
        result = evaluate(server.url, path, settings)
        with pytest.raises(ConfigError, match="completions route"):
            evaluate(server.url, path, settings, batch_size=2)
    assert result.accuracy == 1.0
    assert {request.route for request in server.requests} == {"/v1/chat/completions"}


def test_repeats_and_shuffled_orders(path: Path) -> None:
    settings = config(num_questions=6, max_concurrency=1)
    known = samples(settings)
    special = {2: [Action(("#### 987654321",)), GOLD]}
    with FakeServer(by_question(known, special)) as server:
        result = evaluate(server.url, path, settings, repeats=3, order_seed=5)
    assert result.repeats == 3
    assert result.per_question[2] == (False, True, True)
    assert (result.accuracy, result.num_answered) == (5 / 6, 6)
    indices = {sample.prompt: sample.index for sample in known}
    asked = [indices[request.prompts[0]] for request in server.requests]
    orders = [asked[at : at + 6] for at in (0, 6, 12)]
    assert all(sorted(order) == [*range(6)] for order in orders)
    assert len({tuple(order) for order in orders} | {tuple(range(6))}) == 4


def test_the_limit_cuts_the_questions_and_progress_is_told(path: Path) -> None:
    seen: list[Progress] = []
    settings = config(max_concurrency=2)
    known = samples(settings)
    gold = gold_script(known)

    def script(request: Request) -> Action:
        return Action(gold(request).texts, delay_s=0.15)

    with FakeServer(script) as server:
        result = evaluate(server.url, path, settings, limit=7, on_progress=seen.append)
    assert result.num_questions == 7
    assert [item.done for item in seen] == sorted(item.done for item in seen)
    last = seen[-1]
    assert (last.done, last.total, last.correct, last.failed) == (7, 7, 7, 0)
    assert last.rate == pytest.approx(7 / last.elapsed_s)
    assert last.remaining_s == 0.0
    assert len(seen) >= 3


def test_any_bytes_in_a_reply_are_safe(path: Path) -> None:
    nasty = "\ud800\x00\x1b[31m\u2028]]>&\ufffe\n#### 5"
    with FakeServer(lambda request: Action((nasty,)), has_stop=False) as server:
        result = evaluate(server.url, path, config(num_questions=3))
    assert result.num_answered == 3
    assert [record.text for record in read_ledger(path)] == [nasty] * 3


def test_evaluators_are_found_by_name() -> None:
    assert evaluators.names() == ["builtin", "lm-eval"]
    with pytest.raises(ConfigError, match="'lm_eval'; did you mean 'lm-eval'"):
        evaluators.get("lm_eval")


def test_a_check_before_the_start_finds_what_evaluate_would(tmp_path: Path) -> None:
    empty = DataSource(data_dir=tmp_path)
    builtin = evaluators.get("builtin")
    builtin.check(config(), empty, None)
    with pytest.raises(ConfigError, match=r"no train\.jsonl"):
        builtin.check(config(task="gsm8k"), empty, 5)
    with pytest.raises(ConfigError, match=r"metric: .*'strict'; did you mean 'strict-match'"):
        builtin.check(config().model_copy(update={"metric": "strict"}), empty, 5)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) == 0.0
