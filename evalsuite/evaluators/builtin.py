"""The builtin evaluator: sends the prompts itself, one ledger record per question as it arrives.

Receives an `EvaluationRequest`, returns an `EvalResult`. Transport and retries are `client.py`,
prompts and readings `tasks/`, counting `aggregate.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from evalsuite import tasks
from evalsuite.client import Client, ClientSettings, Reply, RequestFailure
from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError
from evalsuite.evaluators.aggregate import Circumstances, Plan, aggregate
from evalsuite.evaluators.base import EvalResult, EvaluationRequest, Progress, asked_for
from evalsuite.evaluators.limits import Patience, allow_sockets
from evalsuite.evaluators.records import (
    Place,
    answered_record,
    failed_record,
    ledger_head,
    strangers,
)
from evalsuite.evaluators.settled import Settled
from evalsuite.ledger import Ledger
from evalsuite.retries import RetryPolicy
from evalsuite.tasks.base import DataSource, Sample, Task, TaskSettings, hash_prompts, hash_text
from evalsuite.wire import SamplingSettings, build_body

NAME = "builtin"
CAN_SHUFFLE = True
PROGRESS_EVERY_S = 0.1
ABORT_EVERY_S = 0.05


@dataclass(frozen=True)
class _Question:
    """A prompt in one repeat, ready to be sent."""

    place: Place
    prompt: str


@dataclass
class _Run:
    """State of one evaluation while it runs."""

    request: EvaluationRequest
    task: Task
    metric: str
    ledger: Ledger
    waiting: Iterator[list[_Question]]
    progress: Progress
    settled: Settled
    started: float = 0.0
    shown: float = 0.0
    stopped: str = ""
    patience: Patience = field(default_factory=Patience)
    models: set[str] = field(default_factory=set)
    in_flight: dict[int, list[_Question]] = field(default_factory=dict)


def evaluate(request: EvaluationRequest) -> EvalResult:
    """Ask every question the ledger does not hold yet; see `Evaluator.evaluate`.

    Raises:
        ConfigError: Task, data or ledger do not fit, or the server refuses every request alike
            (prompt longer than its context, unknown model, wrong key).
    """
    config = request.config
    if request.batch_size > 1 and config.use_chat_completions:
        raise ConfigError("several prompts in one request need the completions route, not chat")
    task, metric, samples = _questions(config, request.data, request.limit)
    hashes = {sample.index: hash_text(sample.prompt) for sample in samples}
    with Ledger(request.ledger_path, ledger_head(NAME, request, task)) as ledger:
        kept = {
            key: record
            for key, record in ledger.answered(hashes).items()
            if record.repeat < request.repeats
        }
        order = [
            (sample, repeat)
            for repeat in range(request.repeats)
            for sample in _ordered(samples, request.order_seed, repeat)
        ]
        missing = [
            _Question(
                Place(sample.index, repeat, sample.target, hashes[sample.index]), sample.prompt
            )
            for sample, repeat in order
            if (sample.index, repeat) not in kept
        ]
        right = sum(record.scores.get(metric) == "correct" for record in kept.values())
        settled = Settled([(sample.index, repeat) for sample, repeat in order])
        for key, record in kept.items():
            settled.note(key, record.scores.get(metric) == "correct")
        total = len(samples) * request.repeats
        run = _Run(
            request=request,
            task=task,
            metric=metric,
            ledger=ledger,
            waiting=_batches(missing, request.batch_size),
            progress=Progress(
                *(len(kept), total, right, 0, 0.0, len(kept)),
                settled.num_right,
                settled.num_wrong,
            ),
            settled=settled,
        )
        concurrency, notes = _concurrency(request, len(missing))
        run.started = time.perf_counter()
        if missing:
            asyncio.run(_drive(run, concurrency))
        _show(run, is_last=True)
        duration = time.perf_counter() - run.started
        notes += strangers(request.served_model, run.models)
        plan = _plan(task, metric, samples, request.repeats)
        return aggregate(
            plan, ledger.records, Circumstances(duration, len(kept), run.stopped, notes)
        )


def _plan(task: Task, metric: str, samples: list[Sample], repeats: int) -> Plan:
    return Plan(
        task=task.name,
        evaluator=NAME,
        metric=metric,
        metrics=task.metrics,
        profile=task.profile,
        prompt_hash=hash_prompts(sample.prompt for sample in samples),
        indices=tuple(sample.index for sample in samples),
        repeats=repeats,
    )


def check(config: EvalConfig, data: DataSource, limit: int | None) -> None:
    """Build the prompts without a server; see `Evaluator.check`.

    Raises:
        ConfigError: Task, metric or data do not fit or are missing.
    """
    _questions(config, data, limit)


def _questions(
    config: EvalConfig, data: DataSource, limit: int | None
) -> tuple[Task, str, list[Sample]]:
    task = tasks.get(config.task)
    metric = tasks.gating_metric(task, config.metric)
    settings = TaskSettings(asked_for(config, limit), config.num_fewshot, config.gen_prefix, data)
    return task, metric, task.samples(settings)


def _ordered(samples: list[Sample], order_seed: int | None, repeat: int) -> list[Sample]:
    if order_seed is None:
        return samples
    shuffled = list(samples)
    random.Random(f"{order_seed}/{repeat}").shuffle(shuffled)
    return shuffled


def _batches(questions: list[_Question], size: int) -> Iterator[list[_Question]]:
    return (questions[at : at + size] for at in range(0, len(questions), size))


def _concurrency(request: EvaluationRequest, num_missing: int) -> tuple[int, tuple[str, ...]]:
    num_requests = -(-num_missing // request.batch_size)
    return allow_sockets(min(request.config.max_concurrency or num_requests, num_requests))


def _sampling(run: _Run) -> SamplingSettings:
    config = run.request.config
    return SamplingSettings(
        model=run.request.served_model,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        stop=run.task.stop,
        is_chat=config.use_chat_completions,
        has_logprobs=run.request.has_logprobs,
    )


async def _drive(run: _Run, concurrency: int) -> None:
    """Run the workers to the end, to an abort, or to the first error of theirs."""
    config = run.request.config
    settings = ClientSettings(
        base_url=run.request.base_url,
        sampling=_sampling(run),
        timeout_s=run.request.request_timeout_s,
        retry=RetryPolicy(max_retries=config.max_retries),
        api_key=run.request.api_key,
    )
    async with Client(settings) as client:
        workers = [asyncio.create_task(_work(run, client, n)) for n in range(concurrency)]
        try:
            pending: set[asyncio.Task[None]] = set(workers)
            while pending and not run.stopped:
                done, pending = await asyncio.wait(
                    pending, timeout=ABORT_EVERY_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for worker in done:
                    worker.result()
                if run.request.should_abort and pending:
                    run.stopped = run.request.should_abort()
                _show(run)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    if run.stopped:
        # What is open has no answer and never will have one: it is on record as failed.
        failure = RequestFailure("connection", f"stopped: {run.stopped}")
        for questions in list(run.in_flight.values()):
            _book(run, questions, failure)


async def _work(run: _Run, client: Client, worker: int) -> None:
    """Send one request after the other until none is waiting."""
    for questions in run.waiting:
        if run.stopped:
            return
        run.in_flight[worker] = questions
        body = build_body(client.settings.sampling, [question.prompt for question in questions])
        outcome = await client.ask(body, len(questions))
        del run.in_flight[worker]
        _book(run, questions, outcome)
        run.stopped = run.stopped or run.patience.note(outcome, run.progress.total)


def _book(
    run: _Run, questions: list[_Question], outcome: tuple[Reply, ...] | RequestFailure
) -> None:
    """Write one record per question and count it."""
    correct = failed = 0
    for position, question in enumerate(questions):
        is_right: bool | None = None
        if isinstance(outcome, RequestFailure):
            record = failed_record(question.place, outcome)
            failed += 1
        else:
            record = answered_record(run.task, question.place, outcome[position])
            run.models.add(outcome[position].model)
            is_right = record.scores[run.metric] == "correct"
            correct += is_right
        run.settled.note((question.place.index, question.place.repeat), is_right)
        run.ledger.add(record)
    before = run.progress
    run.progress = Progress(
        done=before.done + len(questions),
        total=before.total,
        correct=before.correct + correct,
        failed=before.failed + failed,
        elapsed_s=time.perf_counter() - run.started,
        reused=before.reused,
        settled_right=run.settled.num_right,
        settled_wrong=run.settled.num_wrong,
    )


def _show(run: _Run, *, is_last: bool = False) -> None:
    now = time.perf_counter()
    if run.request.on_progress and (is_last or now - run.shown >= PROGRESS_EVERY_S):
        run.shown = now
        run.request.on_progress(run.progress)
