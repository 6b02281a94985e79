"""The real lm-eval against a scripted server: same prompts, same scores, nothing lost."""

from __future__ import annotations

import importlib.util
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from eval_helpers import (
    GOLD,
    by_question,
    config,
    evaluate,
    gold_script,
    needs_gsm8k,
    real_source,
    samples,
)
from fake_server import Action, FakeServer, Request, error

from evalsuite import tasks
from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError, EvalError
from evalsuite.evaluators import lm_eval, lm_eval_job
from evalsuite.evaluators.base import EvalResult, Progress
from evalsuite.ledger import read_ledger
from evalsuite.tasks import gsm8k
from evalsuite.tasks.base import DataSource, Sample, profile_of
from evalsuite.tasks.readings import PatternReading

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval is not installed: pip install 'moe-evalsuite[lm-eval]'",
)

# Replies that pull the readings apart; {} is the gold answer.
REPLIES = (
    " So it is {}.\n#### {}",
    " The answer is {}.",
    " The answer is {}",
    " #### {}.",
    " #### ${}",
    " it is ${}.00.",
    " #### -{}",
    " #### 5 no, #### {}",
    "\n#### {}\n\nQuestion: and 7?\nAnswer: 8",
    " the answer is {} I think 3",
    " #### 1{}",
    " no number at all",
    "",
    " ....",
    " #### {},",
    "####{}",
    " The answer is {}, or 12.",
    " <think>#### 4</think>#### {}",
    " ANSWER {} \ud800 \x00",
    " #### {0:,} 9",
)


def mixed_script(known: list[Sample]) -> object:
    by_prompt = {sample.prompt: sample for sample in known}

    def script(request: Request) -> Action:
        sample = by_prompt[request.prompts[0]]
        gold: object = int(sample.target)
        return Action((REPLIES[sample.index % len(REPLIES)].format(gold, gold),))

    return script


def check_equal_to_our_own(name: str, shots: int, num_questions: int, path: Path) -> EvalResult:
    """Run lm-eval on mixed replies; our prompts and scores must be lm-eval's."""
    settings = config(
        task=name,
        evaluator="lm-eval",
        num_questions=num_questions,
        num_fewshot=shots,
        max_concurrency=128,
    )
    source = DataSource() if name == "minigsm" else real_source()
    own_name = {"gsm8k": "gsm8k-lm-eval"}.get(name, name)
    own = samples(settings.model_copy(update={"task": own_name}), source)
    with FakeServer(mixed_script(own)) as server:  # type: ignore[arg-type]
        result = evaluate(server.url, path, settings, data=source)
    task = tasks.get(own_name)
    # lm-eval's prompts, hashed in the child, against ours.
    assert result.prompt_hash == profile_of(task, own).prompt_hash
    assert (result.profile, result.num_failed) == (task.profile, 0)
    records = read_ledger(path)
    assert [record.index for record in records] == list(range(num_questions))
    for record in records:
        assert record.text is not None
        for metric in task.metrics:
            ours = task.score(metric, record.target, record.text, record.finish_reason)
            assert (record.scores[metric], record.extracted[metric]) == (
                ours.outcome,
                ours.extracted,
            ), (record.index, metric)
    # A line per question and the head: lm-eval's scores never called for a correction.
    assert len(path.read_bytes().splitlines()) == num_questions + 1
    assert {request.body["stop"][0] for request in server.requests} == {task.stop[0]}
    for metric in ("strict-match", "flexible-extract"):
        assert 0 < result.num_correct[metric] < num_questions
    return result


@needs_gsm8k
def test_gsm8k_prompts_and_scores_are_lm_evals(tmp_path: Path) -> None:
    result = check_equal_to_our_own("gsm8k", 5, 60, tmp_path / "ledger.jsonl")
    assert (result.task, result.evaluator, result.metric) == ("gsm8k", "lm-eval", "strict-match")


@needs_gsm8k
@pytest.mark.slow
@pytest.mark.parametrize(("name", "shots"), [("gsm8k", 5), ("gsm8k_cot", 8), ("gsm8k", 0)])
def test_all_1319_prompts_and_scores_are_lm_evals(tmp_path: Path, name: str, shots: int) -> None:
    check_equal_to_our_own(name, shots, 1319, tmp_path / "ledger.jsonl")


@pytest.mark.slow
def test_minigsm_prompts_and_scores_are_the_scripts(tmp_path: Path) -> None:
    check_equal_to_our_own("minigsm", 5, 1319, tmp_path / "ledger.jsonl")


@pytest.mark.slow
def test_lm_evals_own_score_stands_against_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours are made to read nothing; the child's library still does, and its word is kept."""
    never = PatternReading(re.compile("never"), 0)
    monkeypatch.setattr(gsm8k, "READINGS", replace(gsm8k.READINGS, strict=never))
    path = tmp_path / "ledger.jsonl"
    settings = lm_eval_config(num_questions=6)
    known = samples(settings)
    script = by_question(known, {4: [Action(("#### 987654321",))]})
    with FakeServer(script) as server:
        result = evaluate(server.url, path, settings, repeats=2)
        asked = len(server.requests)
        again = evaluate(server.url, path, settings, repeats=2)
    assert result.num_correct["strict-match"] == 5
    assert result.repeats == 2
    records = read_ledger(path)
    assert records[4].scores["strict-match"] == "wrong"
    assert records[4].extracted["strict-match"] == "987654321"
    assert records[0].scores["strict-match"] == "correct"
    # A second line for each record that had to be corrected.
    assert len(path.read_bytes().splitlines()) == 1 + 2 * 12
    assert (again.num_correct, again.reused) == (result.num_correct, 12)
    assert len(server.requests) == asked == 12


def lm_eval_config(**keys: object) -> EvalConfig:
    return config(evaluator="lm-eval", **keys)


def test_failures_empties_and_cuts_are_on_record_and_a_second_run_asks_only_those(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.jsonl"
    settings = lm_eval_config(max_retries=1, request_timeout_seconds=2, num_questions=24)
    known = samples(settings)
    malformed = Action(payload=b'{"choices": []}')
    special = {
        2: [error(500, "once"), GOLD],
        3: [error(500, "twice"), error(500, "twice"), GOLD],
        5: [Action(("",))],
        7: [malformed, malformed, GOLD],
        11: [Action((" so 5",), finish_reason="length")],
        13: [Action(is_dropped=True), Action(is_dropped=True), GOLD],
        17: [Action(delay_s=20.0), GOLD],
        19: [error(413, "too big"), GOLD],
    }
    seen: list[Progress] = []
    with FakeServer(by_question(known, special)) as server:
        first = evaluate(server.url, path, settings, on_progress=seen.append)
        records = read_ledger(path)
        asked = len(server.requests)
        second = evaluate(server.url, path, settings)
    assert (first.num_answered, first.num_failed, first.num_empty) == (19, 5, 1)
    assert first.num_truncated == 1
    assert first.num_correct["strict-match"] == 17
    assert (first.prompt_tokens, first.completion_tokens) == (19 * 7, 19 * 3)
    found = {record.index: (record.status, record.error) for record in records}
    assert found[3] == ("http_error", "HTTP 500: twice")
    assert found[5] == ("empty", "")
    assert found[7][0] == "malformed"
    assert found[11] == ("truncated", "")
    assert found[13][0] == "connection_error"
    assert found[17] == ("timeout", "TimeoutError: no full reply within 2 s")
    assert found[19] == ("http_error", "HTTP 413: too big")
    assert records[2].retry_errors == ("HTTP 500: once",)
    assert all(not record.scores for record in records if not record.is_answered)
    assert (seen[-1].done, seen[-1].failed, seen[-1].total) == (24, 5, 24)
    assert (second.num_failed, second.reused, len(server.requests) - asked) == (0, 19, 5)
    assert second.num_correct["strict-match"] == 22
    assert second.prompt_hash == first.prompt_hash
    bodies = [request.body for request in server.requests]
    assert {(b["model"], b["seed"], b["max_tokens"], b["temperature"]) for b in bodies} == {
        ("fake", 42, 256, 0.0)
    }


def test_the_key_that_a_server_quotes_is_in_no_record(tmp_path: Path) -> None:
    key = "sk-secret-of-mine"
    path = tmp_path / "ledger.jsonl"
    refused = error(401, f"Incorrect API key:\n {key}")
    with FakeServer(lambda request: refused) as server:
        with pytest.raises(ConfigError, match=r"HTTP 401: Incorrect API key: \*\*\*") as caught:
            evaluate(server.url, path, lm_eval_config(num_questions=8), api_key=key)
        assert {r.headers["authorization"] for r in server.requests} == {f"Bearer {key}"}
    assert key not in str(caught.value) + path.read_text()
    assert {record.error for record in read_ledger(path)} == {"HTTP 401: Incorrect API key: ***"}


def test_an_abort_ends_the_child_at_once(tmp_path: Path) -> None:
    settings = lm_eval_config(num_questions=30, max_concurrency=4)
    gold = gold_script(samples(settings))
    dead = threading.Event()

    def script(request: Request) -> Action:
        if request.number < 10:
            return gold(request)
        dead.set()
        return Action(delay_s=60.0)

    with FakeServer(script) as server:
        result = evaluate(
            server.url,
            tmp_path / "ledger.jsonl",
            settings,
            should_abort=lambda: "the server died" if dead.is_set() else "",
        )
    assert (result.num_answered, result.num_failed) == (10, 20)
    assert result.stopped == result.first_error == "the server died"


def test_a_child_that_fails_is_an_error_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval_job, "lm_eval_task_file", lambda name: tmp_path / "gone.yaml")
    with (
        FakeServer(lambda request: Action()) as server,
        pytest.raises(EvalError, match=r"(?s)exit status 1 .*20 of 20 .*Error"),
    ):
        evaluate(server.url, tmp_path / "ledger.jsonl", lm_eval_config())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"use_chat_completions": True}, "use_chat_completions"),
        ({"gen_prefix": " Hm."}, "gen_prefix"),
        ({"task": "gsm8k-border"}, "task: lm-eval has no task 'gsm8k-border'"),
    ],
)
def test_what_lm_eval_cannot_do_is_refused_by_key(
    tmp_path: Path, keys: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        lm_eval.check(lm_eval_config(**keys), DataSource(), None)
    with pytest.raises(ConfigError, match=named):
        evaluate("http://127.0.0.1:9", tmp_path / "l.jsonl", lm_eval_config(**keys))
    assert not (tmp_path / "l.jsonl").exists()
    with pytest.raises(ConfigError, match="evaluator: "):
        evaluate("http://127.0.0.1:9", tmp_path / "l.jsonl", lm_eval_config(), order_seed=1)
