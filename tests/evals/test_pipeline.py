"""The straight line of a job against scripted servers: what becomes PASS, FAIL, ERROR, SKIP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import NUM_QUESTIONS, Suite, is_alive, pids_in

from evalsuite import session
from evalsuite.errors import ConfigError
from evalsuite.executors import local
from evalsuite.progress import PlainDisplay
from evalsuite.run_folder import RunFolder
from evalsuite.verdict import Status, Verdict, exit_code


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    suite = Suite(tmp_path)
    monkeypatch.setenv("PATH", suite.environ["PATH"])
    yield suite
    left = [pid for path in tmp_path.glob("*pids*") for pid in pids_in(path) if is_alive(pid)]
    assert not left, f"processes {left} outlived their run"


def execute(suite: Suite, name: str = "config-cpu.txt", **more: object) -> dict[str, Verdict]:
    request = session.RunRequest(configs=(name,), root=str(suite.root), **more)  # type: ignore[arg-type]
    prepared = session.prepare(request, suite.environ)
    folder = RunFolder(suite.results / "run")
    folder.begin(request.to_json())
    verdicts = local.execute(prepared.jobs, prepared.options, folder, PlainDisplay(print))
    folder.finish(verdicts, "test", 1.0)
    return {verdict.job_id: verdict for verdict in verdicts}


def test_right_answers_pass_and_wrong_ones_fail(suite: Suite) -> None:
    suite.add("right", suite.right())
    suite.add("wrong")
    verdicts = execute(suite)
    assert verdicts["s/right"].status is Status.PASS
    assert verdicts["s/right"].accuracy == 1.0
    assert verdicts["s/wrong"].status is Status.FAIL
    assert exit_code(list(verdicts.values())) == 1
    assert verdicts["s/right"].startup_s > 0
    assert "evalsuite run --config" in verdicts["s/wrong"].reproduce


def test_server_killed_at_a_third_is_an_error_without_accuracy(suite: Suite) -> None:
    pids = suite.folder / "pids"
    third = NUM_QUESTIONS // 3
    args = f"{suite.right()} --exit-after-requests {third} --exit-code 9 --pids-file {pids}"
    suite.add("dies", f"{args} --grandchildren 1 --say 'about to die'", max_concurrency=1)
    began = time.monotonic()
    verdict = execute(suite)["s/dies"]
    assert time.monotonic() - began < 10
    assert verdict.status is Status.ERROR
    assert verdict.accuracy is None
    assert "evaluation: the server process ended with exit code 9" in verdict.reason
    # What was answered is counted, and is no accuracy.
    assert f"{NUM_QUESTIONS - third} of {NUM_QUESTIONS} questions have no answer" in verdict.reason
    assert verdict.result is not None
    assert (verdict.result.num_answered, verdict.result.num_failed) == (third, 2 * third)
    assert verdict.log_tail[-1] == "out of luck"
    assert exit_code([verdict]) == 75
    assert len(pids_in(pids)) == 2
    assert not any(is_alive(pid) for pid in pids_in(pids))


def test_failed_start_is_an_error_and_the_next_job_runs(suite: Suite) -> None:
    suite.add("broken", "--exit-code 3 --say 'no weights'")
    suite.add("right", suite.right())
    verdicts = execute(suite)
    assert verdicts["s/broken"].status is Status.ERROR
    assert verdicts["s/broken"].log_tail == ("no weights",)
    assert verdicts["s/right"].status is Status.PASS


def test_one_server_serves_every_job_with_the_same_launch(suite: Suite) -> None:
    starts = suite.folder / "starts"
    args = f"{suite.right()} --pids-file {starts}"
    suite.add("a", args)
    suite.add("other", f"{suite.right()} --say different")
    suite.add("b", args, num_questions=10)
    verdicts = execute(suite)
    assert [v.status for v in verdicts.values()] == [Status.PASS] * 3
    assert list(verdicts) == ["s/a", "s/other", "s/b"]
    assert len(pids_in(starts)) == 1
    assert verdicts["s/a"].startup_s > 0
    assert verdicts["s/b"].startup_s == 0


def test_a_server_that_died_is_started_again_for_the_next_job(suite: Suite) -> None:
    starts = suite.folder / "starts"
    args = f"{suite.right()} --exit-after-requests 20 --pids-file {starts}"
    suite.add("a", args, num_questions=30)
    suite.add("b", args, num_questions=15)
    verdicts = execute(suite)
    assert verdicts["s/a"].status is Status.ERROR
    assert verdicts["s/b"].status is Status.PASS
    assert len(pids_in(starts)) == 2


def test_failing_requests_are_an_error(suite: Suite) -> None:
    suite.add("http500", "--status 500")
    verdict = execute(suite)["s/http500"]
    assert verdict.status is Status.ERROR
    assert verdict.accuracy is None
    assert "500" in verdict.reason


def test_pool_this_machine_is_not_is_a_skip(suite: Suite) -> None:
    suite.add("big", "--tensor-parallel-size 2", pool="b200")
    verdict = execute(suite, "config-b200.txt")["s/big"]
    assert verdict.status is Status.SKIP
    assert "needs pool b200" in verdict.reason
    assert exit_code([verdict]) == 5


def test_missing_engine_on_a_matching_pool_is_an_error(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.add("job", suite.right())
    (suite.bin / "vllm").unlink()
    verdict = execute(suite)["s/job"]
    assert verdict.status is Status.ERROR
    assert "no vllm on the PATH" in verdict.reason


def test_another_backend_than_expected_is_an_error(suite: Suite) -> None:
    log = "'Using TRITON Unquantized MoE backend out of potential backends: []'"
    args = f"{suite.right()} --say {log}"
    suite.add("other", args, expect_backend="flashinfer_cutlass")
    suite.add("same", args, expect_backend="triton")
    suite.add("silent", suite.right(), expect_backend="triton")
    verdicts = execute(suite)
    assert verdicts["s/other"].status is Status.ERROR
    assert "TRITON" in verdicts["s/other"].reason
    assert verdicts["s/same"].status is Status.PASS
    assert verdicts["s/same"].evidence.logged == "TRITON"
    assert verdicts["s/silent"].status is Status.ERROR


def test_rpc_checks_and_acceptance_length(suite: Suite) -> None:
    drafts = f"{suite.right()} --drafts-per-request 10"
    suite.add("rpc", suite.right(), startup_rpc_checks=["check_a"])
    suite.add("rpc-fails", f"{suite.right()} --failing-rpc check_a", startup_rpc_checks=["check_a"])
    suite.add("long", f"{drafts} --accepted-per-request 15", min_acceptance_length=2.5)
    suite.add("short", f"{drafts} --accepted-per-request 14", min_acceptance_length=2.5)
    suite.add("none", suite.right() + " --drafts-per-request 0", min_acceptance_length=2.5)
    verdicts = execute(suite)
    found = {name.removeprefix("s/"): (v.status, v.reason) for name, v in verdicts.items()}
    assert found["rpc"][0] is Status.PASS
    assert found["rpc-fails"][0] is Status.ERROR
    assert "startup_rpc_checks check_a answers 500" in found["rpc-fails"][1]
    assert found["long"][0] is Status.PASS
    assert found["short"] == (Status.FAIL, "acceptance length 2.400 is below 2.5")
    assert found["none"][0] is Status.ERROR


def test_limit_asks_only_the_first_questions(suite: Suite) -> None:
    count = suite.folder / "count"
    suite.add("job", f"{suite.right()} --count-file {count}")
    verdict = execute(suite, limit=7)["s/job"]
    assert verdict.result is not None
    assert verdict.result.num_questions == 7
    assert len(count.read_text()) == 7
    assert "--limit 7" in verdict.reproduce


def test_a_decided_job_is_not_run_again_and_a_failed_one_is(suite: Suite) -> None:
    count = suite.folder / "count"
    suite.add("done", f"{suite.right()} --count-file {count}")
    execute(suite)
    assert len(count.read_text()) == NUM_QUESTIONS
    again = execute(suite)["s/done"]
    assert again.status is Status.PASS
    assert len(count.read_text()) == NUM_QUESTIONS


def test_every_fault_is_found_before_anything_starts(suite: Suite) -> None:
    starts = suite.folder / "pids"
    suite.add("right", f"{suite.right()} --pids-file {starts}")
    suite.add("sglang", "--all2all-backend x", engine="sglang")
    suite.add("gate", gate="paired")
    with pytest.raises(ConfigError) as caught:
        execute(suite)
    text = str(caught.value)
    assert "--all2all-backend" in text
    assert "baseline" in text
    assert not starts.exists()


def test_options_that_cannot_be_meant_are_named_together(suite: Suite) -> None:
    suite.add("job")
    with pytest.raises(ConfigError) as caught:
        execute(suite, limit=0, base_url="host:1", executor="slurm")
    assert [part in str(caught.value) for part in ("--limit 0", "'host:1'", "'slurm'")] == [
        True
    ] * 3
