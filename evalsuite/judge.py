"""`EvalJob` + `EvalResult` + evidence (+ baseline) -> `Verdict`. Pure, no I/O.

The one place where run status and score meet. What cannot carry a verdict (a dead server,
missing answers, another backend) is ERROR before any gate is asked; the gates are `gates/`, the
remarks beside a verdict `remarks.py`, the types `verdict.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from evalsuite.baseline import BaselinePair, differences, identity_of
from evalsuite.config import Calibration
from evalsuite.early_end import DECIDED, ended_verdict
from evalsuite.errors import ConfigError, ServerError
from evalsuite.evaluators.base import MAX_FAILED_SHARE, EvalResult
from evalsuite.evidence import BackendEvidence, contradiction
from evalsuite.flips import flips_from_baseline
from evalsuite.gates.absolute import Floor, statistical_gate, threshold_gate
from evalsuite.gates.base import Counts, GateOutcome
from evalsuite.gates.equal import equal_gate
from evalsuite.gates.paired import PairedPlan, paired_gate, wants_repeat
from evalsuite.jobs import EvalJob
from evalsuite.ledger import LedgerRecord
from evalsuite.remarks import not_right, remarks
from evalsuite.stats.proportion import binomial_se, wilson_interval
from evalsuite.verdict import Status, Verdict

# Flips kept in a verdict with both replies; the ledger and the baseline have them all.
MAX_FLIPS = 200


@dataclass(frozen=True)
class RunContext:
    """What is known of a run beside its answers; copied into the verdict.

    Attributes:
        commit: Version-control revision of the code under test, "" if unknown.
        hardware: Accelerator or CPU name.
        engine: Engine name and version.
        duration_s: Whole job, server start included.
        startup_s: Server start to ready.
        reproduce: Command line that runs this job again.
        log_tail: Last lines of the server's log.
        family_size: Jobs of this run that share one false-alarm rate (Bonferroni); 1 for none.
            A whole run is better judged with 1 and then with `family.hold_family_rate`.
        model_revision: Revision or hash of the weights, "" if unknown.
        server_build: What the server said of its code, "" if nothing.
        error: What kept the job from its end (`ServerError`, `EvalError`, ...), None otherwise.
    """

    commit: str = ""
    hardware: str = ""
    engine: str = ""
    duration_s: float = 0.0
    startup_s: float = 0.0
    reproduce: str = ""
    log_tail: tuple[str, ...] = ()
    family_size: int = 1
    model_revision: str = ""
    server_build: str = ""
    error: Exception | None = None


def judge(
    job: EvalJob,
    result: EvalResult | None,
    evidence: BackendEvidence,
    *,
    baseline: BaselinePair | None = None,
    records: Sequence[LedgerRecord] = (),
    context: RunContext | None = None,
) -> Verdict:
    """Decide one job.

    Args:
        job: The job; `job.skip_reason` makes it a SKIP.
        result: Counts, None where no evaluation took place.
        evidence: What is known of the backend.
        baseline: For the `paired` and `equal` gates.
        records: The job's ledger, for remarks and the `equal` gate.
        context: Commit, hardware, durations, and the error that ended the job.
    """
    context = context or RunContext()
    verdict = _undecided(job, result, evidence, context)
    if job.skip_reason:
        return verdict
    problem = _problem(job, result, evidence, context.error)
    if problem or result is None:
        return _error(verdict, problem, context, _is_config_fault(context.error))
    if result.stopped.startswith(DECIDED):
        ended = ended_verdict(verdict, result, floor_of(job))
        return replace(ended, warnings=(*ended.warnings, *not_right(result, records)))
    outcome = ask_gate(job, result, baseline, records, context)
    if outcome.status is Status.ERROR:
        return _error(verdict, outcome.reason, context, outcome.is_config_fault)
    decided = _with_numbers(verdict, job, result, outcome)
    if baseline is not None and records:
        flips = flips_from_baseline(baseline.current, records, result.metric)
        shown = [asdict(flip) for flip in flips[:MAX_FLIPS]]
        decided = replace(decided, detail={**decided.detail, "flips": shown})
    return replace(decided, warnings=remarks(decided, job.config, records, baseline))


def _error(verdict: Verdict, reason: str, context: RunContext, is_fault: bool) -> Verdict:
    verdict = replace(verdict, status=Status.ERROR, reason=reason, is_config_fault=is_fault)
    error = context.error
    if not isinstance(error, ServerError):
        return replace(verdict, log_tail=context.log_tail)
    known = {"server_command": error.command, "server_log": error.log_path}
    detail = {**verdict.detail, **{key: text for key, text in known.items() if text}}
    return replace(verdict, log_tail=tuple(error.log_tail) or context.log_tail, detail=detail)


def _is_config_fault(error: Exception | None) -> bool:
    """Whether no retry mends it."""
    if isinstance(error, ServerError):
        return error.is_config_fault
    return isinstance(error, ConfigError)


def _undecided(
    job: EvalJob, result: EvalResult | None, evidence: BackendEvidence, context: RunContext
) -> Verdict:
    """Everything that does not depend on the outcome; a SKIP until it is replaced."""
    config = job.config
    return Verdict(
        job_id=job.id,
        status=Status.SKIP,
        reason=job.skip_reason,
        gate=config.gate.name,
        result=result,
        threshold=config.accuracy_threshold,
        tolerance=config.tolerance,
        floor=round(config.effective_floor, 12),
        evidence=evidence,
        reproduce=context.reproduce,
        commit=context.commit,
        hardware=context.hardware,
        engine=context.engine,
        duration_s=context.duration_s,
        startup_s=context.startup_s,
        detail={
            "sampling": config.sampling,
            "model_revision": context.model_revision,
            "server_build": context.server_build,
        },
    )


def _problem(
    job: EvalJob, result: EvalResult | None, evidence: BackendEvidence, error: Exception | None
) -> str:
    """Why there can be no verdict on accuracy, "" where there can."""
    if isinstance(error, ConfigError):
        return "ConfigError: " + "; ".join(problem.describe() for problem in error.problems)
    if error is not None:
        first_line = str(error).strip().split("\n", 1)[0]
        return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    if mismatch := contradiction(evidence, job.config.expect_backend):
        return mismatch
    if result is None:
        return "no evaluation took place"
    if result.stopped.startswith(DECIDED):
        return ""
    if result.stopped:
        return f"the evaluation ended early: {result.stopped}"
    first_error = f"; first error: {result.first_error}" if result.first_error else ""
    if result.num_failed > MAX_FAILED_SHARE * result.num_questions:
        return (
            f"{result.num_failed} of {result.num_questions} requests failed, more than "
            f"{MAX_FAILED_SHARE:.0%}{first_error}"
        )
    if result.num_answered + result.num_failed != result.num_questions:
        return (
            f"the evaluation is incomplete: {result.num_answered} answered and "
            f"{result.num_failed} failed of {result.num_questions} questions{first_error}"
        )
    if result.num_questions < 1:
        return "no question was asked"
    if result.metric not in result.num_correct:
        return f"the evaluator counted nothing under the gating metric {result.metric!r}"
    return ""


def floor_of(job: EvalJob) -> Floor:
    """The config's threshold, tolerance, noise and rates."""
    calibration = job.config.calibration
    gate = job.config.gate
    return Floor(
        threshold=job.config.accuracy_threshold,
        tolerance=job.config.tolerance,
        sigma_run=calibration.sigma_run if isinstance(calibration, Calibration) else None,
        alpha=gate.alpha,
        power=gate.power,
    )


def plan_of(job: EvalJob, context: RunContext) -> PairedPlan:
    """Settings of the paired gate from the config; the run's jobs share one rate."""
    gate, calibration = job.config.gate, job.config.calibration
    return PairedPlan(
        alpha=gate.alpha / context.family_size,
        power=gate.power,
        max_repeats=gate.max_repeats,
        max_drop=gate.max_drop,
        noise=calibration.discordant if isinstance(calibration, Calibration) else None,
    )


def ask_gate(
    job: EvalJob,
    result: EvalResult,
    baseline: BaselinePair | None,
    records: Sequence[LedgerRecord],
    context: RunContext,
) -> GateOutcome:
    """Ask the config's gate; the score alone, whatever else is wrong with the run."""
    counts = Counts(result.num_correct[result.metric], result.num_failed, result.num_questions)
    name = job.config.gate.name
    if name == "threshold":
        return threshold_gate(counts, floor_of(job))
    if name == "statistical":
        return statistical_gate(counts, floor_of(job))
    if baseline is None:
        reason = f"gate {name!r} needs an approved baseline"
        return GateOutcome(Status.ERROR, reason, is_config_fault=True)
    run = identity_of(job.config, result, context.model_revision)
    for kind, reference in baseline.references().items():
        if found := differences(reference.identity, run):
            reason = f"not comparable with the {kind}: {'; '.join(found)}"
            return GateOutcome(Status.ERROR, reason, is_config_fault=True)
    if name == "equal":
        sampled = baseline.current.logprob_source == "sampled"
        return equal_gate(records, baseline.current.answers, has_logprobs=sampled)
    if len(result.per_question) != result.num_questions:
        return GateOutcome(
            Status.ERROR,
            f"gate 'paired' needs an outcome per question, {len(result.per_question)} of "
            f"{result.num_questions} are recorded",
        )
    outcomes = {kind: one.outcomes for kind, one in baseline.references().items()}
    decided = paired_gate(result.per_question, outcomes, floor_of(job), plan_of(job, context))
    if context.family_size == 1:
        return decided
    reason = f"{decided.reason}; {job.config.gate.alpha:g} shared by {context.family_size} jobs"
    return replace(decided, reason=reason, detail={**decided.detail, "family": context.family_size})


def needs_repeat(
    job: EvalJob,
    result: EvalResult,
    baseline: BaselinePair | None,
    records: Sequence[LedgerRecord] = (),
    context: RunContext | None = None,
) -> bool:
    """Whether the plan of this job asks for one more repeat on the warm server.

    The plan (`gate.max_repeats`, spending, futility) is fixed in advance; it is never best of
    two. Only the `paired` gate has one.
    """
    if job.config.gate.name != "paired" or baseline is None:
        return False
    context = context or RunContext()
    outcome = ask_gate(job, result, baseline, records, context)
    return wants_repeat(outcome, result.per_question, plan_of(job, context))


def _with_numbers(
    verdict: Verdict,
    job: EvalJob,
    result: EvalResult,
    outcome: GateOutcome,
) -> Verdict:
    n = result.num_questions
    low, high = result.accuracy_bounds
    stderr = binomial_se(low, n)
    floor = round(job.config.effective_floor, 12)
    interval = (wilson_interval(round(low * n), n)[0], wilson_interval(round(high * n), n)[1])
    return replace(
        verdict,
        status=outcome.status,
        reason=outcome.reason,
        accuracy=low,
        interval=interval,
        stderr=stderr,
        margin_se=(low - floor) / stderr if stderr > 0 else None,
        detectable_drop=outcome.detectable_drop,
        alpha=outcome.alpha,
        power=outcome.power,
        p_value=outcome.p_value,
        detail={
            **verdict.detail,
            **outcome.detail,
            "accuracy_bounds": [low, high],
            "model_name": job.config.model_name,
            "num_fewshot": job.config.num_fewshot,
        },
    )
