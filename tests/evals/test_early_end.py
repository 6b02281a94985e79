"""Early end: when it may end a run, what the verdict says then, and what it must not become."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from eval_helpers import config as make_config
from eval_helpers import evaluate, gold_script, samples
from fake_server import Action, FakeServer, Request
from run_helpers import NUM_QUESTIONS, Suite, statuses
from verdict_helpers import make_job, make_result

from evalsuite.baseline import identity_of, make_baseline
from evalsuite.config import Gate
from evalsuite.early_end import DECIDED, EarlyEnd, fewest_right
from evalsuite.errors import ConfigError
from evalsuite.evaluators.base import Progress
from evalsuite.evaluators.settled import Settled
from evalsuite.evidence import BackendEvidence
from evalsuite.gates.absolute import Floor, statistical_gate
from evalsuite.gates.base import Counts
from evalsuite.judge import judge
from evalsuite.ledger import read_ledger
from evalsuite.pipeline import watch_of
from evalsuite.report.json_report import read
from evalsuite.run_options import RunOptions
from evalsuite.stats.sequential import Sprt
from evalsuite.verdict import Status

FLOOR = Floor(0.88, 0.02)  # 1,135 of 1,319


def progress(
    done: int, correct: int, failed: int = 0, settled: tuple[int, int] = (0, 0)
) -> Progress:
    return Progress(done, 1319, correct, failed, 1.0, 0, *settled)


def test_ends_when_the_floor_is_out_of_reach() -> None:
    watch = EarlyEnd("threshold", FLOOR)
    watch.on_progress(progress(399, 215))  # 184 wrong, as many as may be
    assert watch.should_abort() == ""
    watch.on_progress(progress(400, 215))
    assert watch.should_abort() == (
        "decided: 185 of 400 answers are wrong, 1135 right of 1319 can no longer be reached"
    )


def test_a_run_that_passes_is_never_ended() -> None:
    watch = EarlyEnd("threshold", FLOOR)
    for done in range(1320):
        watch.on_progress(progress(done, done, settled=(done, 0)))
    assert watch.should_abort() == ""


def test_the_sequential_test_reads_settled_questions_alone() -> None:
    # Fifty wrong answers that arrived first may be the short ones; they are not in order yet.
    watch = EarlyEnd("threshold", FLOOR)
    watch.on_progress(progress(50, 0, settled=(0, 3)))
    assert watch.should_abort() == ""
    watch.on_progress(progress(60, 0, settled=(0, 40)))
    assert watch.should_abort().startswith(
        "decided: 0 right and 40 wrong are those of a broken build (sequential test, accuracy 0.78"
    )


def test_many_failed_requests_are_an_error_and_never_a_broken_build() -> None:
    watch = EarlyEnd("threshold", FLOOR)
    watch.on_progress(progress(400, 0, failed=27, settled=(0, 373)))
    assert watch.should_abort() == ""
    few = EarlyEnd("threshold", FLOOR)
    few.on_progress(progress(400, 0, failed=26, settled=(0, 374)))
    assert few.should_abort() != ""


@pytest.mark.parametrize("n", [1, 30, 200, 1319])
@pytest.mark.parametrize("sigma", [None, 0.004])
def test_fewest_right_is_where_each_gate_stops_failing(n: int, sigma: float | None) -> None:
    floor = Floor(0.9, 0.02, sigma, alpha=0.05)
    fewest = fewest_right("statistical", floor, n)
    for right in range(n + 1):
        fails = statistical_gate(Counts(right, 0, n), floor).status is Status.FAIL
        assert fails == (right < fewest)
    assert fewest_right("threshold", floor, n) == fewest_right("paired", floor, n) >= fewest


def test_a_build_at_its_floor_is_ended_by_mistake_as_rarely_as_stated() -> None:
    """2,000 runs of a build exactly at the floor: at most one in a thousand looks broken."""
    draw = random.Random(7)
    ended = 0
    for _ in range(2000):
        watch = EarlyEnd("threshold", FLOOR)
        right = 0
        for asked in range(1, 600):
            right += draw.random() < 1135 / 1319
            # Counts of all answers are kept out of it: only the sequential test may speak.
            watch.on_progress(progress(0, 0, settled=(right, asked - right)))
            if watch.should_abort():
                ended += 1
                break
    assert ended <= 8  # P(more | rate 0.001) < 0.0003


def test_settled_counts_stop_at_the_first_open_question() -> None:
    keys = [(5, 0), (2, 0), (9, 0), (1, 0)]
    settled = Settled(keys)
    settled.note((2, 0), False)
    settled.note((1, 0), True)
    assert (settled.num_right, settled.num_wrong) == (0, 0)
    settled.note((5, 0), True)
    assert (settled.num_right, settled.num_wrong) == (1, 1)
    settled.note((9, 0), None)  # no answer and none to come: neither right nor wrong
    assert (settled.num_right, settled.num_wrong) == (2, 1)


def test_verdict_names_the_questions_asked_and_gives_no_accuracy() -> None:
    stopped = f"{DECIDED}185 of 400 answers are wrong, 1135 right of 1319 can no longer be reached"
    result = make_result(215, 1319, failed=919, stopped=stopped)
    verdict = judge(make_job(), result, BackendEvidence())
    assert verdict.status is Status.FAIL
    assert verdict.reason.startswith("ended early after 400 of 1319 questions: 185 of 400")
    assert (verdict.accuracy, verdict.interval) == (None, None)
    assert verdict.detail["accuracy_bounds"] == [215 / 1319, (215 + 919) / 1319]
    assert "--no-early-end" in verdict.warnings[0]
    other = judge(
        make_job(), make_result(215, 1319, failed=919, stopped="Ctrl-C"), BackendEvidence()
    )
    assert other.status is Status.ERROR


def test_a_run_that_ended_early_never_becomes_a_baseline() -> None:
    # Even where every question happened to be answered before the abort.
    result = make_result(10, 30, stopped=f"{DECIDED}too many are wrong")
    identity = identity_of(make_job().config, result)
    with pytest.raises(ConfigError, match=r"ended early .*--no-early-end"):
        make_baseline(identity, result, [], engine="e", hardware="h", commit="c")


def test_order_is_seeded_and_the_ledger_keeps_the_questions(tmp_path: Path) -> None:
    settings = make_config(num_questions=40)
    with FakeServer(gold_script(samples(settings))) as server:
        first = evaluate(server.url, tmp_path / "a.jsonl", settings, order_seed=3)
        second = evaluate(server.url, tmp_path / "b.jsonl", settings, order_seed=3)
        plain = evaluate(server.url, tmp_path / "c.jsonl", settings)
    assert first.per_question == second.per_question == plain.per_question
    for name in ("a", "b", "c"):
        records = read_ledger(tmp_path / f"{name}.jsonl")
        assert [record.index for record in records] == list(range(40))


# The whole line, against a scripted engine.


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_a_broken_build_ends_early_and_a_good_one_does_not(suite: Suite) -> None:
    slow = "--delay-s 0.05"
    suite.add("broken", f"{slow} --say broken", max_concurrency=1)
    suite.add("good", f"{suite.right()} {slow}", max_concurrency=8)
    done = suite.run("run", "--config", "config-cpu.txt")
    assert done.returncode == 1, done.stdout + done.stderr
    folder = suite.run_folder()
    assert statuses(folder) == {"s/broken": "FAIL", "s/good": "PASS"}
    broken, good = read(folder)
    assert broken.result is not None
    asked = broken.result.num_answered
    # The floor of 0.7 is out of reach after the tenth wrong answer of 30; the test is quicker.
    assert asked <= 12
    assert broken.reason.startswith(f"ended early after {asked} of {NUM_QUESTIONS} questions")
    assert good.result is not None
    assert good.result.num_answered == NUM_QUESTIONS
    # What was open is on record as failed, nothing is there twice, nothing was invented.
    records = read_ledger(next((folder / "jobs").glob("*broken*/ledger.jsonl")))
    assert sum(record.is_answered for record in records) == asked
    assert {record.index for record in records if record.is_answered} == {
        index for index, outcomes in broken.result.per_question.items() if outcomes[0] is not None
    }
    refused = suite.run(
        "baseline", "save", "s/broken", "--run", str(folder), "--configs-root", str(suite.root)
    )
    assert refused.returncode == 4
    assert "ended early" in refused.stdout + refused.stderr


@pytest.mark.parametrize("where", ["command line", "file"])
def test_opt_out_asks_every_question(suite: Suite, where: str) -> None:
    gate = {"gate": {"name": "threshold", "early_end": False}} if where == "file" else {}
    suite.add("broken", max_concurrency=2, **gate)
    flags = ["--no-early-end"] if where == "command line" else []
    done = suite.run("run", "--config", "config-cpu.txt", *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    (verdict,) = read(suite.run_folder())
    assert verdict.result is not None
    assert verdict.result.num_answered == NUM_QUESTIONS
    assert verdict.accuracy == 0.0
    asked = json.loads((suite.run_folder() / "run.json").read_text())["asked"]
    assert asked["ends_early"] is (where == "file")
    assert ("--no-early-end" in verdict.reproduce) is (where == "command line")


def test_an_equal_gate_is_never_watched() -> None:
    options = RunOptions({})
    named = {name: make_job(gate=Gate(name=name)) for name in ("threshold", "paired", "equal")}
    assert {name: watch_of(job, options) is not None for name, job in named.items()} == {
        "threshold": True,
        "paired": True,
        "equal": False,
    }


def test_wrong_answers_that_arrive_first_do_not_end_a_healthy_run(tmp_path: Path) -> None:
    """Everything is in flight at once and the twelve wrong answers come first."""
    settings = make_config(num_questions=200)
    known = samples(settings)
    gold = gold_script(known)
    wrong = {sample.prompt for sample in known[:12]}

    def script(request: Request) -> Action:
        if request.prompts[0] in wrong:
            return Action((" no idea",))
        return replace(gold(request), delay_s=0.4)

    watch = EarlyEnd("threshold", Floor(0.95, 0.03))
    assert Sprt(0.92, 0.84).decide(0, 12) == "broken"  # what counting arrivals would make of it
    with FakeServer(script) as server:
        result = evaluate(
            server.url,
            tmp_path / "l.jsonl",
            settings,
            order_seed=1,
            on_progress=watch.on_progress,
            should_abort=watch.should_abort,
        )
    assert result.stopped == ""
    assert result.num_correct[result.metric] == 188
