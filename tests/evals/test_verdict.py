"""`judge`: what is an ERROR, what a gate may decide, what stands beside the verdict."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from verdict_helpers import make_job, make_record, make_result

from evalsuite.baseline import Answer, Baseline, BaselinePair, identity_of
from evalsuite.config import Calibration, ExpectBackend, Gate
from evalsuite.errors import ConfigError, EvalError, Problem, ServerError
from evalsuite.evaluators.base import EvalResult
from evalsuite.evidence import BackendEvidence
from evalsuite.family import hold_family_rate
from evalsuite.jobs import EvalJob
from evalsuite.judge import RunContext, judge, needs_repeat
from evalsuite.verdict import Status, Verdict, exit_code

NOTHING = BackendEvidence()


def with_outcomes(right: set[int], n: int, repeats: int = 1) -> EvalResult:
    return make_result(
        len(right), n, repeats=repeats, per_question={i: (i in right,) * repeats for i in range(n)}
    )


def baseline_of(job: EvalJob, right: set[int], n: int, **values: Any) -> BaselinePair:
    result = with_outcomes(right, n)
    answers = {i: Answer((i in right,), "18", "18", "") for i in range(n)}
    base = Baseline(identity_of(job.config, result), "moeserve", "h100", "abc", answers)
    return BaselinePair(replace(base, **values))


# -- ERROR before any gate -------------------------------------------------------------------


def test_skip_and_dead_server() -> None:
    skipped = judge(make_job("pool b200 is not here"), None, NOTHING)
    assert (skipped.status, skipped.reason) == (Status.SKIP, "pool b200 is not here")
    dead = judge(
        make_job(),
        None,
        NOTHING,
        context=RunContext(error=ServerError("died in evaluation", "cmd", -9, ["a", "b"])),
    )
    assert dead.status is Status.ERROR
    assert dead.log_tail == ("a", "b")
    assert dead.accuracy is None
    assert "died in evaluation" in dead.reason


def test_a_killed_server_never_passes_on_the_answers_it_gave() -> None:
    # 400 of 1,319 answered, all right; the error is what counts.
    result = make_result(400, 1319, failed=919)
    for error in (ServerError("died"), None):
        verdict = judge(make_job(), result, NOTHING, context=RunContext(error=error))
        assert verdict.status is Status.ERROR
        assert verdict.accuracy is None
        assert exit_code([verdict]) == 75


@pytest.mark.parametrize("right", [14, 3])
def test_api_failures_are_an_error_not_a_score(right: int) -> None:
    # Case 4: 6 of 20 requests fail for ever; neither a pass from 14/14 nor a fail of 0.70.
    job = make_job(accuracy_threshold=0.9, tolerance=0.0, num_questions=20)
    verdict = judge(job, make_result(right, 20, failed=6), NOTHING)
    assert verdict.status is Status.ERROR
    assert verdict.accuracy is None
    assert "6 of 20 requests failed" in verdict.reason
    assert "HTTP 500: boom" in verdict.reason


def test_retried_requests_are_reported_and_count() -> None:
    job = make_job(accuracy_threshold=0.9, tolerance=0.0, num_questions=20)
    verdict = judge(job, make_result(20, 20, retries=6), NOTHING)
    assert verdict.status is Status.PASS
    assert verdict.accuracy == 1.0
    assert "6 requests were retried" in verdict.warnings


def test_few_missing_answers_give_bounds() -> None:
    verdict = judge(make_job(), make_result(1200, 1319, failed=5), NOTHING)
    assert verdict.status is Status.PASS
    assert verdict.detail["accuracy_bounds"] == [1200 / 1319, 1205 / 1319]
    # Needs 1135 right: 1133 with five missing may be either.
    assert judge(make_job(), make_result(1133, 1319, failed=5), NOTHING).status is Status.ERROR
    assert judge(make_job(), make_result(1100, 1319, failed=5), NOTHING).status is Status.FAIL


def test_incomplete_and_stopped_runs_are_errors() -> None:
    short = make_result(1200, 1319, num_answered=1300)
    assert judge(make_job(), short, NOTHING).status is Status.ERROR
    stopped = make_result(1300, 1319, failed=2, stopped="the server process ended")
    verdict = judge(make_job(), stopped, NOTHING)
    assert verdict.status is Status.ERROR
    assert "the server process ended" in verdict.reason
    error = judge(
        make_job(), None, NOTHING, context=RunContext(error=EvalError("no data", 0, 0, ""))
    )
    assert error.status is Status.ERROR


def test_another_backend_is_an_error_with_the_three_levels() -> None:
    job = make_job(expect_backend=ExpectBackend(name="triton", level="logged"))
    good = make_result(1250, 1319)
    verdict = judge(job, good, BackendEvidence("triton", "FlashInfer CUTLASS"))
    assert verdict.status is Status.ERROR
    assert "declared triton, logged FlashInfer CUTLASS, executed unknown" in verdict.reason
    assert judge(job, good, BackendEvidence("triton", "TRITON")).status is Status.PASS


# -- the score -------------------------------------------------------------------------------


def test_0898_against_090_fails_without_rounding() -> None:
    job = make_job(accuracy_threshold=0.9, tolerance=0.0, num_questions=1000)
    verdict = judge(job, make_result(898, 1000), NOTHING)
    assert verdict.status is Status.FAIL
    assert verdict.floor == 0.9
    assert "0.8980 < floor 0.9" in verdict.reason
    assert exit_code([verdict]) == 1


def test_effective_floor_is_printed() -> None:
    job = make_job(accuracy_threshold=0.92, tolerance=0.08)
    verdict = judge(job, make_result(1200, 1319), NOTHING)
    assert verdict.floor == 0.84
    assert "floor 0.84" in verdict.reason


@pytest.mark.parametrize(("n", "is_warned"), [(50, True), (200, True), (1319, False)])
def test_floor_inside_the_noise_is_said(n: int, is_warned: bool) -> None:
    # Case 43: true accuracy 0.92 against 0.90.
    job = make_job(accuracy_threshold=0.9, tolerance=0.0, num_questions=n)
    verdict = judge(job, make_result(round(0.92 * n), n), NOTHING)
    assert any("inside the noise" in text for text in verdict.warnings) is is_warned


@pytest.mark.parametrize(("measured_on", "is_warned"), [(200, False), (1319, True)])
def test_a_measured_noise_is_the_runs_own(measured_on: int, is_warned: bool) -> None:
    noise = {"sigma_run": 0.001, "discordant": 0.0004, "repeats": 5, "num_questions": measured_on}
    job = make_job(accuracy_threshold=0.92, tolerance=0.01, num_questions=200, calibration=noise)
    verdict = judge(job, make_result(183, 200), NOTHING)
    assert verdict.status is Status.PASS
    assert any("inside the noise" in text for text in verdict.warnings) is is_warned


def test_numbers_of_a_verdict() -> None:
    verdict = judge(make_job(), make_result(1190, 1319), NOTHING, context=RunContext("abc", "h"))
    assert verdict.stderr == pytest.approx(0.00818, abs=1e-5)
    assert verdict.margin_se == pytest.approx((1190 / 1319 - 0.86) / 0.00818, rel=1e-3)
    assert verdict.interval == pytest.approx((0.8850, 0.9171), abs=1e-3)
    assert verdict.alpha == pytest.approx(0.0145, abs=0.002)
    assert verdict.detectable_drop == pytest.approx(0.02 + 0.8416 * 0.00895, abs=1e-4)
    assert verdict.power == 0.8
    assert (verdict.commit, verdict.hardware) == ("abc", "h")


def test_truncation_stands_beside_the_accuracy_and_apart_from_wrong() -> None:
    # Case 10: every reply needs 300 tokens and gets 256.
    records = [
        make_record(i, "cut", right=False, status="truncated", scores={"numeric": "no_answer"})
        for i in range(19)
    ] + [make_record(19, "17", right=False, status="truncated")]
    result = make_result(0, 20, num_truncated=20, num_no_answer=19)
    job = make_job(num_questions=20, max_tokens=256)
    verdict = judge(job, result, NOTHING, records=records)
    assert verdict.status is Status.FAIL
    assert verdict.warnings[0] == (
        "20 of 20 replies (100.0%) were cut by max_tokens 256; 19 of them hold no answer "
        "because they were cut"
    )


def test_a_fail_shows_what_its_replies_look_like() -> None:
    broken = "so it is " + "no word " * 20
    records = [
        make_record(0, "The answer is 18.", right=True),
        make_record(1, broken, right=False, scores={"numeric": "no_answer"}),
        make_record(2, "The\nanswer is 17.", right=False),
    ]
    job = make_job(num_questions=3)
    verdict = judge(job, make_result(1, 3, num_no_answer=1), NOTHING, records=records)
    assert verdict.status is Status.FAIL
    (said,) = [text for text in verdict.warnings if "are not right" in text]
    assert said.startswith(
        "2 of 3 replies are not right: 1 with another number, 1 without one; the first, question "
        f"1, wants {records[1].target} and has no number in '... no word no word"
    )
    # A pass needs no explanation.
    good = judge(job, make_result(3, 3), NOTHING, records=records)
    assert good.status is Status.PASS
    assert not any("are not right" in text for text in good.warnings)


def test_what_the_server_refused_is_said_once_and_without_a_severity() -> None:
    error = ConfigError(Problem("error", "it refuses every request", "x.yaml", 3, "model_name"))
    verdict = judge(make_job(), None, NOTHING, context=RunContext(error=error))
    assert verdict.reason == "ConfigError: x.yaml:3: model_name: it refuses every request"


def test_other_remarks() -> None:
    calibration = Calibration(sigma_run=0.0036, discordant=0.035, repeats=5, num_questions=1319)
    job = make_job(
        accuracy_threshold=0.92, tolerance=0.08, num_questions=200, calibration=calibration
    )
    result = make_result(
        180, 200, num_correct={"last-number": 170, "numeric": 180}, metric="last-number",
        num_empty=3,
    )  # fmt: skip
    verdict = judge(job, result, BackendEvidence(ignored_switches=("VLLM_OLD",)))
    text = "\n".join(verdict.warnings)
    assert "3 of 200 replies (1.5%) are empty" in text
    assert "'last-number' counts 170 right, the reading 'numeric' 180" in text
    assert "calibration was made on 1319 questions, this run asked 200" in text
    assert "the server ignored: VLLM_OLD" in text
    wide = judge(
        make_job(accuracy_threshold=0.92, tolerance=0.08), make_result(1214, 1319), NOTHING
    )
    assert any("standard errors: smaller losses pass unseen" in w for w in wide.warnings)


# -- gates with a baseline -------------------------------------------------------------------


def test_paired_gate_through_judge() -> None:
    job = make_job(gate=Gate(name="paired"), accuracy_threshold=0.5, num_questions=400)
    base = baseline_of(job, set(range(360)), 400)
    lost = judge(job, with_outcomes(set(range(12, 360)), 400), NOTHING, baseline=base)
    assert lost.status is Status.FAIL
    assert lost.p_value == pytest.approx(2**-12)
    assert (lost.alpha, lost.power) == (0.05, 0.8)
    assert lost.detectable_drop is not None
    records = [make_record(i, "17", right=12 <= i < 360) for i in range(400)]
    shown = judge(
        job, with_outcomes(set(range(12, 360)), 400), NOTHING, baseline=base, records=records
    ).detail["flips"]
    assert isinstance(shown, list)
    assert [flip["index"] for flip in shown] == list(range(12))
    assert (shown[0]["before"], shown[0]["after"]) == ("18", "17")
    same = judge(job, with_outcomes(set(range(360)), 400), NOTHING, baseline=base)
    assert same.status is Status.PASS
    assert judge(job, with_outcomes(set(), 400), NOTHING).status is Status.ERROR


@pytest.mark.parametrize("name", ["threshold", "statistical", "paired", "equal"])
@pytest.mark.parametrize("right", [360, 200])
def test_every_verdict_on_a_score_states_its_rates(name: str, right: int) -> None:
    job = make_job(gate=Gate(name=name), accuracy_threshold=0.9, tolerance=0.05, num_questions=400)
    base = baseline_of(job, set(range(360)), 400)
    result = with_outcomes(set(range(right)), 400)
    records = [make_record(i, "18" if i < right else "17", right=i < right) for i in range(400)]
    verdict = judge(job, result, NOTHING, baseline=base, records=records)
    assert verdict.status in (Status.PASS, Status.FAIL)
    if name != "equal":
        assert verdict.status is (Status.PASS if right == 360 else Status.FAIL)
        assert verdict.detectable_drop is not None
        assert 0.0 < verdict.detectable_drop < 0.2
    assert verdict.alpha is not None
    assert verdict.power is not None
    assert 0.0 <= verdict.alpha <= 0.05
    assert 0.8 <= verdict.power <= 1.0
    assert verdict.detectable_drop is not None


def test_a_run_that_was_ended_states_the_rates_of_what_ended_it() -> None:
    job = make_job(accuracy_threshold=0.9, tolerance=0.0, num_questions=400)
    result = replace(with_outcomes(set(range(20)), 60), num_questions=400, stopped="decided: x")
    verdict = judge(job, result, NOTHING)
    assert (verdict.status, verdict.accuracy) == (Status.FAIL, None)
    assert verdict.alpha == 0.001
    assert verdict.power == 0.999
    assert verdict.detectable_drop == 0.08


def test_not_comparable_is_refused_with_what_differs() -> None:
    job = make_job(gate=Gate(name="paired"), num_questions=400)
    base = baseline_of(job, set(range(360)), 400)
    other = with_outcomes(set(range(360)), 400)
    other = replace(other, prompt_hash="feedfeedfeedfeed")
    verdict = judge(job, other, NOTHING, baseline=base)
    assert verdict.status is Status.ERROR
    assert "prompt_hash: '0123456789abcdef' -> 'feedfeedfeedfeed'" in verdict.reason
    hotter = make_job(gate=Gate(name="paired"), num_questions=400, temperature=0.7)
    verdict = judge(hotter, with_outcomes(set(range(360)), 400), NOTHING, baseline=base)
    assert "sampling.temperature: 0.0 -> 0.7" in verdict.reason


def test_other_hardware_is_remarked_not_refused() -> None:
    job = make_job(gate=Gate(name="paired"), accuracy_threshold=0.5, num_questions=400)
    base = baseline_of(job, set(range(360)), 400)
    verdict = judge(
        job, with_outcomes(set(range(360)), 400), NOTHING, baseline=base,
        context=RunContext(hardware="h200"),
    )  # fmt: skip
    assert verdict.status is Status.PASS
    assert "the baseline was made on 'h100', this run on 'h200'" in verdict.warnings


def test_needs_repeat_follows_the_plan() -> None:
    plain = make_job(num_questions=400)
    job = make_job(
        gate=Gate(name="paired", max_repeats=3), accuracy_threshold=0.5, num_questions=400
    )
    base = baseline_of(job, set(range(360)), 400)
    near = with_outcomes(set(range(5, 360)) | {390}, 400)
    assert needs_repeat(job, near, base)
    assert not needs_repeat(plain, near, base)
    assert not needs_repeat(job, with_outcomes(set(range(360)), 400), base)


# -- many jobs, early ends -------------------------------------------------------------------


def paired_verdict(name: str, p: float, status: Status, **detail: object) -> Verdict:
    return Verdict(
        name, status, "drop", gate="paired", p_value=p, alpha=0.05,
        detail={"level": 0.05, **detail},
    )  # fmt: skip


def test_holm_withdraws_what_the_number_of_jobs_explains() -> None:
    verdicts = [
        paired_verdict("real", 0.0001, Status.FAIL),
        paired_verdict("luck", 0.03, Status.FAIL),
        paired_verdict("floor", 0.04, Status.FAIL, below_floor=True),
        *[paired_verdict(f"ok{i}", 0.5, Status.PASS) for i in range(57)],
        Verdict("threshold", Status.FAIL, "low"),
    ]
    held = {v.job_id: v for v in hold_family_rate(verdicts)}
    assert held["real"].status is Status.FAIL
    assert held["luck"].status is Status.PASS
    assert "Holm-adjusted" in held["luck"].reason
    assert held["floor"].status is Status.FAIL
    assert held["threshold"].status is Status.FAIL
    assert [v.job_id for v in hold_family_rate(verdicts)] == [v.job_id for v in verdicts]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ("PASS", 0), ("PASS FAIL ERROR", 1), ("PASS ERROR INCONCLUSIVE", 75),
        ("PASS INCONCLUSIVE SKIP", 76), ("SKIP SKIP", 5), ("PASS SKIP", 0), ("", 5),
    ],
)  # fmt: skip
def test_exit_codes(statuses: str, code: int) -> None:
    assert exit_code([Verdict("j", Status(s), "") for s in statuses.split()]) == code


def test_what_a_retry_cannot_mend_is_not_75() -> None:
    too_long = ConfigError("prompt and max_tokens do not fit the server's context")
    faulty = judge(make_job(), None, BackendEvidence(), context=RunContext(error=too_long))
    crashed = judge(
        make_job(), None, BackendEvidence(), context=RunContext(error=ServerError("died"))
    )
    assert (faulty.status, crashed.status) == (Status.ERROR, Status.ERROR)
    assert [exit_code([faulty]), exit_code([crashed])] == [4, 75]
    assert exit_code([faulty, crashed, Verdict("j", Status.PASS, "")]) == 4
    assert exit_code([faulty, Verdict("j", Status.FAIL, "")]) == 1
    assert exit_code([faulty, Verdict("j", Status.INCONCLUSIVE, "")]) == 4


def test_checking_a_config_loads_no_scipy_and_no_torch() -> None:
    code = (
        "import sys, evalsuite.judge, evalsuite.report, evalsuite.baseline_store, "
        "evalsuite.validate\n"
        "print([m for m in ('scipy', 'numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
