"""The lm-eval evaluator: the real library asks and scores, in a child process.

Receives an `EvaluationRequest`, returns the same `EvalResult` and leaves the same ledger as
`builtin.py`. Task names mean lm-eval's own tasks here: `gsm8k` draws other shots per question.
lm-eval itself would stop at the first request that keeps failing, and would take an empty text
for an answer; the child (`lm_eval_worker.py`) puts both on record instead.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from evalsuite import tasks
from evalsuite.client import Reply, RequestFailure
from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError, EvalError, Problem
from evalsuite.evaluators.aggregate import Circumstances, Plan, aggregate
from evalsuite.evaluators.base import EvalResult, EvaluationRequest, Progress, asked_for
from evalsuite.evaluators.limits import Patience
from evalsuite.evaluators.lm_eval_form import find_form
from evalsuite.evaluators.lm_eval_job import worker_job, write_task
from evalsuite.evaluators.lm_eval_worker import WorkerJob
from evalsuite.evaluators.records import (
    Place,
    answered_record,
    failed_record,
    ledger_head,
    strangers,
)
from evalsuite.ledger import Ledger, LedgerRecord
from evalsuite.tasks.base import DataSource, Task, TaskSettings
from evalsuite.tasks.gsm8k_cot import lm_eval_task_file

NAME = "lm-eval"
CAN_SHUFFLE = False
POLL_S = 0.1
STOP_WAIT_S = 5.0
NUM_LOG_LINES = 15


@dataclass
class _Run:
    """State of one evaluation while the child works."""

    request: EvaluationRequest
    task: Task
    metric: str
    targets: list[str]
    ledger: Ledger
    progress: Progress
    started: float
    stopped: str = ""
    prompt_hash: str = ""
    version: str = ""
    patience: Patience = field(default_factory=Patience)
    models: set[str] = field(default_factory=set)
    records: dict[tuple[int, int], LedgerRecord] = field(default_factory=dict)


def evaluate(request: EvaluationRequest) -> EvalResult:
    """Let lm-eval ask every question the ledger does not hold yet; see `Evaluator.evaluate`.

    Raises:
        ConfigError: Settings that lm-eval's tasks do not have, lm-eval or data are missing, or the
            server refuses every request alike.
        EvalError: lm-eval itself failed; its last lines are in the message.
    """
    form = find_form(request.config)
    if request.order_seed is not None or request.batch_size > 1 or request.has_logprobs:
        message = "order, batch size and log-probabilities are lm-eval's own; use the builtin one"
        raise ConfigError(Problem("error", message, key="evaluator"))
    task = tasks.get(form.task)
    metric = tasks.gating_metric(task, request.config.metric)
    rows = task.rows("test", request.data)[: request.num_questions]
    with (
        Ledger(request.ledger_path, ledger_head(NAME, request, task)) as ledger,
        tempfile.TemporaryDirectory(prefix="evalsuite-lm-eval-") as folder,
    ):
        write_task(form, task, request, Path(folder))
        kept = {
            (record.index, record.repeat): record
            for record in ledger.records
            if record.is_answered and record.index < len(rows) and record.repeat < request.repeats
        }
        right = sum(record.scores.get(metric) == "correct" for record in kept.values())
        total = len(rows) * request.repeats
        run = _Run(
            request=request,
            task=task,
            metric=metric,
            targets=[row.gold for row in rows],
            ledger=ledger,
            progress=Progress(len(kept), total, right, 0, 0.0, reused=len(kept)),
            started=time.perf_counter(),
            records=kept,
        )
        _drive(run, worker_job(request, Path(folder), len(rows), list(kept.values())))
        plan = Plan(
            task=request.config.task,
            evaluator=NAME,
            metric=metric,
            metrics=task.metrics,
            profile=task.profile,
            prompt_hash=run.prompt_hash,
            indices=tuple(range(len(rows))),
            repeats=request.repeats,
        )
        return aggregate(
            plan,
            ledger.records,
            Circumstances(
                duration_s=time.perf_counter() - run.started,
                reused=run.progress.reused,
                stopped=run.stopped,
                notes=strangers(request.served_model, run.models),
            ),
        )


def check(config: EvalConfig, data: DataSource, limit: int | None) -> None:
    """Look for lm-eval, the data and what the task cannot do; see `Evaluator.check`.

    Raises:
        ConfigError: One of them does not fit or is missing.
    """
    form = find_form(config)
    task = tasks.get(form.task)
    tasks.gating_metric(task, config.metric)
    lm_eval_task_file(form.file)
    # The prompts are lm-eval's work; ours are equal, so building them tells of the same faults.
    task.samples(TaskSettings(asked_for(config, limit), config.num_fewshot, "", data))


def _drive(run: _Run, job: WorkerJob) -> None:
    """Start the child, take in its events, end it.

    Raises:
        ConfigError: From `Patience`.
        EvalError: The child ended without having finished.
    """
    log = Path(job.folder) / "worker.log"
    command = [sys.executable, "-P", "-m", "evalsuite.evaluators.lm_eval_worker"]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    try:
        assert child.stdin is not None
        # The key is in `asdict`, so this line goes to the child alone and nowhere else.
        child.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        child.stdin.flush()
        for event in _events(run, child, job.events):
            _take(run, event)
    finally:
        child.kill()
        child.wait(STOP_WAIT_S)
        if child.stdin:
            child.stdin.close()
    if not run.stopped and not run.version:
        key = run.request.api_key
        text = log.read_text("utf-8", "replace")
        lines = (text.replace(key, "***") if key else text).splitlines()[-NUM_LOG_LINES:]
        raise EvalError(
            f"lm-eval ended with exit status {child.returncode} before it was done",
            num_failed=run.progress.total - run.progress.done + run.progress.failed,
            num_questions=run.progress.total,
            first_error="\n".join(lines) or "it wrote nothing",
        )


def _events(run: _Run, child: subprocess.Popen[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yield events until the child has ended or the evaluation is stopped."""
    offset = 0
    while True:
        has_ended = child.poll() is not None
        content = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)
        run.progress = replace(run.progress, elapsed_s=time.perf_counter() - run.started)
        if run.request.on_progress:
            run.request.on_progress(run.progress)
        if run.request.should_abort and not has_ended and not run.version:
            run.stopped = run.stopped or run.request.should_abort()
        # All is said with "done": the libraries of the child may take seconds to take their leave.
        if has_ended or run.stopped or run.version:
            return
        time.sleep(POLL_S)


def _take(run: _Run, event: dict[str, Any]) -> None:
    kind = event["kind"]
    if kind == "prompts":
        run.prompt_hash = event["hash"]
        _check_kept(run, event["repeat"], event["by_doc"])
    elif kind in ("reply", "failure"):
        _take_outcome(run, event)
    elif kind == "score":
        _take_score(run, event)
    elif kind == "done":
        run.version = event["version"]


def _check_kept(run: _Run, repeat: int, by_doc: dict[str, str]) -> None:
    """Raises: ConfigError: an answer on record belongs to another prompt."""
    hashes = {int(index): value for index, value in by_doc.items()}
    if repeat == 0:
        run.ledger.answered(hashes)


def _take_outcome(run: _Run, event: dict[str, Any]) -> None:
    errors = tuple(event["retry_errors"])
    index, repeat = event["index"], event["repeat"]
    place = Place(index, repeat, run.targets[index], event["prompt_hash"])
    if event["kind"] == "reply":
        reply = Reply(
            text=event["text"],
            finish_reason=event["finish_reason"],
            prompt_tokens=event["prompt_tokens"],
            completion_tokens=event["completion_tokens"],
            latency_s=event["latency_s"],
            retries=len(errors),
            retry_errors=errors,
            model=event["model"],
        )
        run.models.add(reply.model)
        outcome: tuple[Reply, ...] | RequestFailure = (reply,)
        record = answered_record(run.task, place, reply)
    else:
        outcome = RequestFailure(
            kind=event["failure"],
            message=event["message"],
            status=event["status"],
            retries=len(errors) - 1,
            retry_errors=errors,
        )
        record = failed_record(place, outcome)
    run.ledger.add(record)
    run.records[index, repeat] = record
    before = run.progress
    run.progress = replace(
        before,
        done=before.done + 1,
        correct=before.correct + (record.scores.get(run.metric) == "correct"),
        failed=before.failed + (not record.is_answered),
    )
    run.stopped = run.stopped or run.patience.note(outcome, before.total)


def _take_score(run: _Run, event: dict[str, Any]) -> None:
    """lm-eval's own score stands; a record that says otherwise is written anew."""
    record = run.records.get((event["index"], event["repeat"]))
    if record is None or not record.is_answered:
        return
    metric = event["metric"]
    is_empty = event["extracted"] == "[invalid]"
    outcome = "correct" if event["is_right"] else "no_answer" if is_empty else "wrong"
    if record.scores.get(metric) != outcome:
        record = replace(
            record,
            scores={**record.scores, metric: outcome},
            extracted={**record.extracted, metric: "" if is_empty else event["extracted"]},
        )
        run.ledger.add(record)
        run.records[event["index"], event["repeat"]] = record
