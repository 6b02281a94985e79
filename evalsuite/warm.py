"""A server for commands that are no run: calibrate, replay, baseline save.

Receives a job and run options, gives a ready server as a context manager, the job's prompts,
and repeats of the job. Starting servers is `server.py`; the line of a run is `pipeline.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from evalsuite import evaluators, tasks
from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError, EvalError, ServerError
from evalsuite.evaluators.base import EvalResult, EvaluationRequest
from evalsuite.evidence import contradiction
from evalsuite.gpu_memory import GpuMemory
from evalsuite.jobs import EvalJob
from evalsuite.pipeline import engine_of
from evalsuite.replay_client import ReplayServer
from evalsuite.run_options import RunOptions
from evalsuite.server import RunningServer, StartSettings, start
from evalsuite.tasks.base import TaskSettings, hash_prompts
from evalsuite.tasks.data import source_from

# Concurrency changes what is in a batch, and with it the rounding: repeats take turns.
CONCURRENCIES = (None, 32, 128, 8)


class WarmServer:
    """The job's server; use it as a context manager.

    Raises:
        ServerError: On entering, where the engine is absent, the server does not get ready, or
            another MoE backend serves than the job names.
    """

    def __init__(self, job: EvalJob, options: RunOptions, folder: Path) -> None:
        self._job = job
        self._options = options
        self._folder = folder
        self._server: RunningServer | None = None

    def __enter__(self) -> WarmServer:
        """Start the server and wait until it is ready."""
        if self._job.skip_reason and not self._options.base_url:
            raise ServerError(f"start: {self._job.skip_reason}")
        engine = engine_of(self._job, self._options)
        if reason := engine.unavailable_reason(self._job):
            raise ServerError(f"start: {reason}")
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = StartSettings(
            self._folder / "server.log",
            self._job.config.startup_max_wait_seconds,
            self._options.environ,
            self._options.grace_s,
            memory=GpuMemory(),
            absent_limit_s=self._job.config.absent_limit_s,
        )
        self._server = server = start(engine.launch_spec(self._job), settings)
        try:
            evidence = engine.evidence(self._job, server.base_url, server.log_text())
            if mismatch := contradiction(evidence, self._job.config.expect_backend):
                raise ServerError(f"ready: {mismatch}", command=server.command)
        except BaseException:
            server.stop()  # an interrupt, too: nobody leaves what was not entered
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and everything it started."""
        if self._server is not None:
            self._server.stop()

    @property
    def server(self) -> RunningServer:
        """The running server."""
        if self._server is None:
            raise RuntimeError("WarmServer is used outside `with`")
        return self._server

    @property
    def replay(self) -> ReplayServer:
        """Where to replay."""
        config = self._job.config
        return ReplayServer(
            self.server.base_url,
            self.server.model,
            concurrency=min(64, config.max_concurrency or 64),
            timeout_s=config.request_timeout_seconds,
            api_key=self.server.api_key,
        )


def prompts_of(config: EvalConfig, options: RunOptions, prompt_hash: str) -> dict[int, str]:
    """Question index -> prompt, checked against the hash of the baseline.

    Raises:
        ConfigError: The prompts are not the baseline's, or are chat messages.
    """
    if config.use_chat_completions:
        raise ConfigError("replay needs the completions route; this job uses chat completions")
    asked = TaskSettings(
        config.num_questions,
        config.num_fewshot,
        config.gen_prefix,
        source_from(options.environ, options.data_dir),
    )
    samples = tasks.get(config.task).samples(asked)
    found = hash_prompts(sample.prompt for sample in samples)
    if prompt_hash and found != prompt_hash:
        raise ConfigError(
            f"not comparable with the baseline: prompt_hash: {prompt_hash!r} -> {found!r}"
        )
    return {sample.index: sample.prompt for sample in samples}


def run_repeats(
    warm: WarmServer, job: EvalJob, options: RunOptions, ledger: Path, repeats: int
) -> EvalResult:
    """Ask every question `repeats` times, each repeat shuffled anew at another concurrency.

    Raises:
        EvalError: A repeat has missing answers.
    """
    evaluate = evaluators.get(job.config.evaluator).evaluate
    request = EvaluationRequest(
        base_url=warm.server.base_url,
        served_model=warm.server.model,
        config=job.config,
        ledger_path=ledger,
        data=source_from(options.environ, options.data_dir),
        limit=options.limit,
        api_key=warm.server.api_key,
        should_abort=lambda: "" if warm.server.is_alive else "the server process ended",
    )
    for number, concurrency in zip(range(repeats), itertools.cycle(CONCURRENCIES), strict=False):
        config = job.config.model_copy(
            update={"max_concurrency": concurrency or job.config.max_concurrency}
        )
        result = evaluate(replace(request, config=config, repeats=number + 1, order_seed=number))
        if not warm.server.is_alive:
            raise warm.server.died("evaluation")
        if result.repeats != number + 1:
            raise EvalError(
                f"repeat {number} is incomplete",
                result.num_failed,
                result.num_questions,
                result.first_error,
            )
    return result
