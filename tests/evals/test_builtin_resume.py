"""The built-in evaluator goes on from a ledger: after failures, other prompts, a kill."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import eval_helpers
import pytest
from eval_helpers import GOLD, by_question, config, evaluate, gold_script, samples
from fake_server import Action, FakeServer, Request, error

from evalsuite.errors import ConfigError
from evalsuite.ledger import read_ledger

FAILED = (5, 7, 8, 11, 13, 17)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_a_resumed_run_asks_only_what_has_no_answer(path: Path) -> None:
    settings = config(max_retries=0)
    known = samples(settings)
    special = {index: [error(500, "x"), GOLD] for index in FAILED}
    with FakeServer(by_question(known, special)) as server:
        first = evaluate(server.url, path, settings)
        content = path.read_bytes()
        path.write_bytes(content[:-10])
        second = evaluate(server.url, path, settings)
        third = evaluate(server.url, path, settings)
    assert (first.num_failed, second.num_failed, third.num_failed) == (6, 0, 0)
    # The six failures, and the one whose line was cut.
    assert (second.reused, third.reused) == (13, 20)
    assert len(server.requests) == 20 + 7
    assert second.per_question == third.per_question
    assert second.prompt_hash == first.prompt_hash


def test_a_resumed_run_with_other_prompts_is_refused(path: Path) -> None:
    with FakeServer(lambda request: Action(("#### 1",))) as server:
        evaluate(server.url, path, config())
        with pytest.raises(ConfigError, match="question 0 was answered to prompt"):
            evaluate(server.url, path, config(num_fewshot=3))
        with pytest.raises(ConfigError, match=r"max_tokens 256 .now 512."):
            evaluate(server.url, path, config(max_tokens=512))


RUNNER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from eval_helpers import config, evaluate
evaluate(sys.argv[2], Path(sys.argv[3]), config(num_questions=200, max_concurrency=8))
"""


def test_a_killed_run_goes_on_where_it_was(path: Path) -> None:
    settings = config(num_questions=200, max_concurrency=8)
    gold = gold_script(samples(settings))
    half = threading.Event()

    def script(request: Request) -> Action:
        if request.number == 100:
            half.set()
        return Action(gold(request).texts, delay_s=0.02)

    support = str(Path(eval_helpers.__file__).parent)
    with FakeServer(script) as server:
        command = [sys.executable, "-c", RUNNER, support, server.url, str(path)]
        child = subprocess.Popen(command)
        assert half.wait(60)
        child.kill()
        child.wait(10)
        recorded = {record.index for record in read_ledger(path)}
        asked_before = [request.prompts[0] for request in server.requests]
        result = evaluate(server.url, path, settings)
    assert (result.accuracy, result.num_answered, result.reused) == (1.0, 200, len(recorded))
    again = [r.prompts[0] for r in server.requests[len(asked_before) :]]
    assert len(again) == 200 - len(recorded)
    # At most what was in flight is asked a second time.
    assert len(set(asked_before) & set(again)) <= 8
    assert 80 <= len(recorded) < 200
