"""`Step` and `Pipeline`: what CI runs, in words that no provider owns, and how long it may take.

Receives jobs and a pool, returns frozen values. Which steps there are is `plan.py`; how a
provider writes them is its template.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evalsuite.errors import ConfigError
from evalsuite.hardware import Pool
from evalsuite.jobs import EvalJob
from evalsuite.verdict import EXIT_INFRASTRUCTURE

# Checkout and installation, before the run itself. Downloads of weights count as server start.
SETUP_LIMIT_S = 900
# From the suite's own end of time to its last process: servers stopped, reports written.
GRACE_S = 60
# What CI's limit lies above the limits inside it, so that theirs are always met first.
MARGIN_S = 300
# A job that is twice as slow as it was recorded is still waited for.
SLOWDOWN = 2.0

_KEY = re.compile(r"[^A-Za-z0-9_]+")


@dataclass(frozen=True)
class Step:
    """One command on one pool.

    Attributes:
        key: Unique in its pipeline; letters, digits, `-` and `_`, a letter first.
        label: What people read.
        pool: Where it runs.
        command: The command whose exit status is the step's.
        timeout_minutes: CI's limit of one attempt; above everything that limits itself inside.
        setup: Commands before it; one that fails ends the step as an infrastructure error.
        run_limit_s: The command's own limit in seconds, after which it is asked to end and
            cleans up; 0 for none.
        num_gpus: Accelerators it needs at once.
        log: File that keeps the output, "" for none.
        artifact_paths: Globs of files to keep, whatever the outcome.
        summary: Glob of Markdown files to show beside the run, "" for none.
        env: Environment variables.
        secrets: Names of variables that the provider's secret store fills.
        depends_on: Keys of steps that come first.
        num_retries: Further attempts after an exit status of `retry_on`, and after no other.
        soft_fail: Exit statuses that are shown but do not make the pipeline fail.
        concurrency: Steps of this pool that may run at the same time, None for no limit.
        job_ids: The jobs it runs.
    """

    key: str
    label: str
    pool: Pool
    command: str
    timeout_minutes: int
    setup: tuple[str, ...] = ()
    run_limit_s: int = 0
    num_gpus: int = 0
    log: str = ""
    artifact_paths: tuple[str, ...] = ()
    summary: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    num_retries: int = 0
    soft_fail: tuple[int, ...] = ()
    concurrency: int | None = None
    job_ids: tuple[str, ...] = ()

    retry_on = EXIT_INFRASTRUCTURE

    def __post_init__(self) -> None:
        """Refuse a limit that would cut the suite before it has cleaned up."""
        inside = self.run_limit_s + GRACE_S
        if self.run_limit_s and self.timeout_minutes * 60 <= inside:
            raise ConfigError(
                f"step {self.key}: CI's limit of {self.timeout_minutes} min is not above the "
                f"{inside / 60:.1f} min of the limits inside it; the suite could not clean up"
            )

    @property
    def concurrency_group(self) -> str:
        """Name that the steps of a pool share."""
        return f"evalsuite-{self.pool.name}"


@dataclass(frozen=True)
class Pipeline:
    """Steps that start together.

    Attributes:
        name: "ci" (every change, no GPU), "nightly" (every pool, by the clock) or "changes"
            (of the nightly, what a pull request touches).
        title: What people read.
        steps: In the order of the file; at least one.
    """

    name: str
    title: str
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        """Refuse a pipeline that a provider would refuse, or that would be green by being empty."""
        keys = [step.key for step in self.steps]
        if not keys:
            raise ConfigError(f"pipeline {self.name} has no steps")
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"pipeline {self.name} has two steps {twice[0]!r}; rename a list")
        for step in self.steps:
            for key in step.depends_on:
                if key not in keys:
                    raise ConfigError(f"step {step.key} waits for {key!r}, which is no step")


def step_key(*words: str) -> str:
    """A key that every provider takes, from words that people chose."""
    key = _KEY.sub("-", "-".join(words)).strip("-")
    return key if key[:1].isalpha() else f"eval-{key}"


def evaluation_limit_s(job: EvalJob, vendor: str, recorded_s: float | None = None) -> float:
    """Seconds after which an evaluation is given up: its slowest question, every attempt of it.

    Questions are asked side by side, so one question's limit is also that of all where
    `max_concurrency` holds none back; where it does, a recorded duration says how long they
    queue. Each repeat of the gate takes as long again.

    Args:
        job: The job.
        vendor: Of the pool; ROCm has a request limit of its own.
        recorded_s: Seconds the whole job took before, None if unknown.
    """
    config = job.config
    slowest = (1 + config.max_retries) * config.timeout_for(vendor) * config.gate.max_repeats
    return max(slowest, SLOWDOWN * (recorded_s or 0.0))


def run_limit_s(jobs: Sequence[EvalJob], pool: Pool, durations: Mapping[str, float]) -> int:
    """Seconds that jobs may take one after the other: start + evaluation + grace of each."""
    return math.ceil(
        sum(
            job.config.startup_max_wait_seconds
            + evaluation_limit_s(job, pool.vendor, durations.get(job.id))
            + GRACE_S
            for job in jobs
        )
    )


def timeout_minutes(limit_s: int) -> int:
    """CI's limit for a run of `limit_s` seconds."""
    return math.ceil((SETUP_LIMIT_S + limit_s + GRACE_S + MARGIN_S) / 60)
