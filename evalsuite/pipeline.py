"""`run(job) -> Verdict`: the straight line of one job, readable top to bottom.

Receives a job and the things of the run (options, the shared server, the run folder); returns
its verdict and never raises for what a server or a reply may do. In which order jobs run, and
where, is `executors/`; what is made of the verdicts is `report/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evalsuite import baseline_store, engines, evaluators, os_faults
from evalsuite.baseline import BaselinePair
from evalsuite.config import EvalConfig, read_config
from evalsuite.early_end import GATES, EarlyEnd
from evalsuite.engine_checks import (
    DraftCounters,
    acceptance_fault,
    call_rpc_checks,
    read_draft_counters,
)
from evalsuite.engines.base import Engine
from evalsuite.engines.external import External
from evalsuite.errors import ConfigError, EvalError, EvalsuiteError, Problem, ServerError
from evalsuite.evaluators.base import EvalResult, EvaluationRequest, Progress
from evalsuite.evidence import BackendEvidence, early_contradiction
from evalsuite.gpu_memory import GpuMemory
from evalsuite.jobs import EvalJob
from evalsuite.judge import RunContext, floor_of, judge, needs_repeat
from evalsuite.ledger import read_build
from evalsuite.model_revision import model_revision
from evalsuite.progress import Display
from evalsuite.run_folder import RunFolder
from evalsuite.run_options import RunOptions, reproduce
from evalsuite.server import RunningServer, StartSettings
from evalsuite.server_build import resumed_note, server_build
from evalsuite.shared_server import SharedServer
from evalsuite.tasks.data import source_from
from evalsuite.verdict import Status, Verdict


@dataclass(frozen=True)
class Run:
    """One run on this machine."""

    options: RunOptions
    folder: RunFolder
    server: SharedServer
    display: Display


def open_server(options: RunOptions, folder: RunFolder) -> SharedServer:
    """The (not yet started) server of a run."""
    return SharedServer(
        StartSettings(folder.servers, 0.0, options.environ, options.grace_s, memory=GpuMemory())
    )


def engine_of(job: EvalJob, options: RunOptions) -> Engine:
    """The job's engine; `--base-url` makes every job an external one."""
    if options.base_url or job.config.engine == "external":
        return External(options.base_url, options.environ.get("OPENAI_API_KEY", ""))
    return engines.get(job.config.engine)


def check(jobs: Sequence[EvalJob], options: RunOptions) -> None:
    """Find what is the user's to mend before anything starts.

    Raises:
        ConfigError: With every flag, task, data file and baseline that does not fit.
    """
    problems = []
    data = source_from(options.environ, options.data_dir)
    for job in jobs:
        if job.skip_reason:
            continue
        config = job.config
        try:
            engine_of(job, options).launch_spec(job)
            evaluators.get(config.evaluator).check(config, data, options.limit)
            _baseline(job, options)
        except ConfigError as error:
            found = [_placed(problem, job) for problem in error.problems]
            problems += [problem for problem in found if problem not in problems]
    if problems:
        raise ConfigError(problems)


def _placed(problem: Problem, job: EvalJob) -> Problem:
    """A fault of one of the file's keys, with the file and the line."""
    if not problem.key or problem.file:
        return problem
    line = read_config(job.path).lines.get(problem.key, 0)
    return replace(problem, file=str(job.path), line=line)


def run(job: EvalJob, this: Run) -> Verdict:
    """One job: skip? server, questions, evidence, verdict."""
    began = time.monotonic()
    result: EvalResult | None = None
    evidence = BackendEvidence()
    error: EvalsuiteError | None = None
    context = RunContext(
        commit=this.options.commit,
        hardware=this.options.hardware,
        reproduce="" if job.skip_reason else reproduce(job, this.options),
        family_size=this.options.family_size,
    )
    fault = ""
    if not job.skip_reason:
        engine = engine_of(job, this.options)
        context = replace(context, engine=f"{engine.name} {engine.version()}".strip())
        try:
            if reason := engine.unavailable_reason(job):
                raise ServerError(f"start: {reason}")
            server, is_new = _acquire(job, engine, this)
            context = replace(
                context,
                startup_s=server.startup_s if is_new else 0.0,
                model_revision=model_revision(job.config, this.options.environ),
                server_build=server_build(server.base_url, server.api_key),
            )
            before = _drafts(job, server)
            if not _is_refuted(job, engine, server):
                result = _evaluate(job, server, this, context)
                if not server.is_alive:
                    raise _died(server, result)
            evidence = engine.evidence(job, server.base_url, server.log_text())
            if result is not None:
                fault = _acceptance(job, server, before)
            if not server.is_alive:
                raise _died(server, result)
        except EvalsuiteError as caught:
            error = caught
        except OSError as caught:
            error = os_faults.as_error(caught)
    verdict = judge(
        job,
        result,
        evidence,
        baseline=_baseline(job, this.options) if error is None and not job.skip_reason else None,
        records=this.folder.records(job.id),
        context=replace(context, duration_s=time.monotonic() - began, error=error),
    )
    if fault and verdict.status is Status.PASS:
        verdict = replace(verdict, status=Status.FAIL, reason=fault)
    return verdict


def _is_refuted(job: EvalJob, engine: Engine, server: RunningServer) -> bool:
    """Whether the server says, before the first question, that another backend serves."""
    early = engine.early_evidence(job, server.base_url)
    return bool(early_contradiction(early, job.config.expect_backend))


def _acquire(job: EvalJob, engine: Engine, this: Run) -> tuple[RunningServer, bool]:
    """A ready server for the job, checked by the RPCs that the file names."""
    settings = StartSettings(
        this.server.log_folder,
        job.config.startup_max_wait_seconds,
        this.options.environ,
        this.options.grace_s,
        on_wait=lambda waited_s, seen: this.display.waiting(job.id, waited_s, seen),
        memory=this.server.memory,
        absent_limit_s=job.config.absent_limit_s,
    )
    server, is_new = this.server.acquire(engine.launch_spec(job), settings)
    if is_new:
        call_rpc_checks(server.base_url, job.config.startup_rpc_checks, server.api_key)
    return server, is_new


def _evaluate(job: EvalJob, server: RunningServer, this: Run, context: RunContext) -> EvalResult:
    """Ask the questions, again on the warm server where the gate's plan wants it.

    Raises:
        ServerError: The server died; within a second, whatever the client was doing.
        EvalError: The evaluator could not do its work.
    """
    evaluator = evaluators.get(job.config.evaluator)
    watch = watch_of(job, this.options)
    request = EvaluationRequest(
        base_url=server.base_url,
        served_model=server.model,
        config=_for_pool(job),
        ledger_path=this.folder.ledger(job.id),
        data=source_from(this.options.environ, this.options.data_dir),
        limit=this.options.limit,
        api_key=server.api_key,
        timeout_s=job.config.timeout_for(job.pool.vendor if job.pool else ""),
        order_seed=job.config.seed if watch and evaluator.CAN_SHUFFLE else None,
        server_build=context.server_build,
        model_revision=context.model_revision,
    )
    baseline = _baseline(job, this.options)
    begun_with = read_build(request.ledger_path)
    kept = ""
    while True:
        # A plan of repeats is looked at between them; only the first can be hopeless.
        watched = _watched(request, job, server, this, watch if request.repeats == 1 else None)
        result = _guarded(evaluator.evaluate, watched, server)
        if request.repeats == 1 and result.reused:
            kept = resumed_note(result.reused, begun_with, context.server_build)
        records = this.folder.records(job.id)
        if (
            result.stopped
            or not server.is_alive
            or not needs_repeat(job, result, baseline, records, context)
        ):
            return replace(result, notes=(*result.notes, kept)) if kept else result
        request = replace(request, repeats=request.repeats + 1)


def watch_of(job: EvalJob, options: RunOptions) -> EarlyEnd | None:
    """What may end the job's questions early, None where nothing may."""
    gate = job.config.gate
    is_on = options.ends_early and gate.early_end and gate.name in GATES
    return EarlyEnd(gate.name, floor_of(job)) if is_on else None


def _watched(
    request: EvaluationRequest,
    job: EvalJob,
    server: RunningServer,
    this: Run,
    watch: EarlyEnd | None,
) -> EvaluationRequest:
    """The request with its ears: display, early end, and the server's death."""

    def on_progress(progress: Progress) -> None:
        this.display.questions(job.id, progress)
        if watch:
            watch.on_progress(progress)

    def should_abort() -> str:
        if not server.is_alive:
            return "the server process ended"
        return watch.should_abort() if watch else ""

    return replace(request, on_progress=on_progress, should_abort=should_abort)


def _for_pool(job: EvalJob) -> EvalConfig:
    """The config with the request limit of the job's vendor."""
    vendor = job.pool.vendor if job.pool else ""
    return job.config.model_copy(update={"request_timeout_seconds": job.config.timeout_for(vendor)})


def _guarded(
    evaluate: Callable[[EvaluationRequest], EvalResult],
    request: EvaluationRequest,
    server: RunningServer,
) -> EvalResult:
    """Evaluate; a dead server is the error, whatever the evaluator made of it."""
    try:
        return evaluate(request)
    except EvalError:
        if server.is_alive:
            raise
        raise server.died("evaluation") from None


def _died(server: RunningServer, result: EvalResult | None) -> ServerError:
    """The server's end, with how far the questions had come; the counts stay in the verdict."""
    error = server.died("evaluation")
    if result is None or not result.num_failed:
        return error
    missing = f"{result.num_failed} of {result.num_questions} questions have no answer"
    first = f", the first: {result.first_error}" if result.first_error else ""
    return replace(error, reason=f"{error.reason}; {missing}{first}")


def _baseline(job: EvalJob, options: RunOptions) -> BaselinePair | None:
    if job.config.gate.name not in ("paired", "equal"):
        return None
    return baseline_store.resolve(job.config.baseline, job.id, options.baselines)


def _drafts(job: EvalJob, server: RunningServer) -> DraftCounters:
    if job.config.min_acceptance_length is None:
        return DraftCounters()
    return read_draft_counters(server.base_url, server.api_key)


def _acceptance(job: EvalJob, server: RunningServer, before: DraftCounters) -> str:
    least = job.config.min_acceptance_length
    if least is None:
        return ""
    after = read_draft_counters(server.base_url, server.api_key)
    return acceptance_fault(after.acceptance_length_since(before), least)
