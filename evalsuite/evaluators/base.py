"""The contract of an evaluator and the one result type that all of them return.

An evaluator receives a running server's base URL, a job and a ledger, asks every question that
the ledger does not hold yet, and returns an `EvalResult`. It never decides PASS or FAIL; that is
`verdict.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from evalsuite.config import EvalConfig
from evalsuite.tasks.base import DataSource

# Beyond this share of missing answers a job is an ERROR whatever the bounds say: so many
# failures are a fault of the run, and the answers that did arrive are a biased sample.
MAX_FAILED_SHARE = 0.02


@dataclass(frozen=True)
class Progress:
    """State of a running evaluation, for a progress line.

    Attributes:
        done: Questions answered or failed, all repeats, those of an earlier run included.
        total: Questions of all repeats.
        correct: Right answers among them, under the gating metric.
        failed: Questions without an answer.
        elapsed_s: Since the first request of this run.
        reused: Answers taken from an earlier run; rates leave them out.
        settled_right: Right answers up to the first open question, in the order of asking.
        settled_wrong: Wrong ones; both stay 0 where the evaluator does not know its order.
    """

    done: int
    total: int
    correct: int
    failed: int
    elapsed_s: float
    reused: int = 0
    settled_right: int = 0
    settled_wrong: int = 0

    @property
    def rate(self) -> float:
        """Questions per second of this run."""
        return (self.done - self.reused) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds left at this rate, None before the first answer."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None


@dataclass(frozen=True)
class EvaluationRequest:
    """Everything an evaluator needs to know about one job on one running server.

    Attributes:
        base_url: Server root, with or without "/v1".
        served_model: Name the server answers to.
        config: The job's config.
        ledger_path: File to append to; an existing one is continued.
        data: Where data files are; see `tasks.data.source_from`.
        limit: Ask only the first questions.
        repeats: Times every question is asked.
        order_seed: Shuffles the order of questions, anew for each repeat; None keeps it.
        batch_size: Prompts in one request; above 1 only on the completions route.
        has_logprobs: Record the log-probability of each generated token.
        api_key: Bearer token, "" for none.
        timeout_s: Limit of one attempt, None for the config's `request_timeout_seconds`.
        server_build: What the server said of its code (`server_build.py`), "" if nothing.
        model_revision: Of the weights, "" if unknown.
        on_progress: Called in this thread about ten times a second, and at the end.
        should_abort: Asked about twenty times a second; a text (the reason) ends the evaluation
            at once, with whatever is open counted as failed.
    """

    base_url: str
    served_model: str
    config: EvalConfig
    ledger_path: Path
    data: DataSource
    limit: int | None = None
    repeats: int = 1
    order_seed: int | None = None
    batch_size: int = 1
    has_logprobs: bool = False
    api_key: str = field(default="", repr=False)
    timeout_s: float | None = None
    server_build: str = ""
    model_revision: str = ""
    on_progress: Callable[[Progress], None] | None = None
    should_abort: Callable[[], str] | None = None

    @property
    def num_questions(self) -> int:
        """Questions per repeat that are asked for; the data may hold fewer."""
        return asked_for(self.config, self.limit)

    @property
    def request_timeout_s(self) -> float:
        """Limit of one attempt."""
        return self.config.request_timeout_seconds if self.timeout_s is None else self.timeout_s


def asked_for(config: EvalConfig, limit: int | None) -> int:
    """Questions that a config and a `--limit` ask for."""
    return config.num_questions if limit is None else min(limit, config.num_questions)


class Evaluator(Protocol):
    """A module of this folder: its name is in `evaluators.NAMES`.

    Attributes:
        CAN_SHUFFLE: Whether `EvaluationRequest.order_seed` is honoured; else it is refused.
    """

    CAN_SHUFFLE: bool

    def check(self, config: EvalConfig, data: DataSource, limit: int | None) -> None:
        """Find out before a server is started whether `evaluate` could work.

        Raises:
            ConfigError: Task, metric, data or a needed library do not fit or are missing.
        """
        ...

    def evaluate(self, request: EvaluationRequest) -> EvalResult:
        """Ask every question the ledger does not hold yet.

        Raises:
            ConfigError: The task, its data, the ledger or the server's limits do not fit.
            EvalError: The evaluation itself could not be carried out.
        """
        ...


@dataclass(frozen=True)
class EvalResult:
    """Counts over one job's questions, all repeats.

    Attributes:
        task: Task name.
        evaluator: "builtin" or "lm-eval".
        metric: The metric that gates.
        profile: Prompt profile name.
        prompt_hash: Over all prompts, 16 hex digits.
        num_questions: Questions asked (per repeat).
        repeats: Complete repeats.
        num_correct: Per metric, over the first repeat.
        num_answered: Answered, truncated and empty, first repeat.
        num_truncated: Ended by the token limit.
        num_empty: Empty replies.
        num_failed: No answer after all retries.
        num_no_answer: Replies in which the gating metric read nothing.
        retries: Sum of retries.
        first_error: First failure's type and message, "" if none.
        duration_s: Wall time of the questions.
        prompt_tokens: Sum.
        completion_tokens: Sum.
        per_question: Question index -> one bool per repeat for the gating metric (None: missing).
        latency_p50_s: Median latency of answered requests.
        latency_p99_s: 99th percentile.
        reused: Records taken from an earlier, interrupted run.
        stopped: Why the evaluation was ended early (`should_abort`'s words), "" if it was not.
        notes: What a reader of the numbers should know of how they came about.
    """

    task: str
    evaluator: str
    metric: str
    profile: str
    prompt_hash: str
    num_questions: int
    repeats: int
    num_correct: dict[str, int]
    num_answered: int
    num_truncated: int
    num_empty: int
    num_failed: int
    num_no_answer: int
    retries: int
    first_error: str
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    per_question: dict[int, tuple[bool | None, ...]] = field(default_factory=dict)
    latency_p50_s: float = 0.0
    latency_p99_s: float = 0.0
    reused: int = 0
    stopped: str = ""
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float:
        """Right answers over answered questions under the gating metric, first repeat."""
        return self.num_correct[self.metric] / self.num_answered if self.num_answered else 0.0

    @property
    def accuracy_bounds(self) -> tuple[float, float]:
        """Accuracy if every missing answer were wrong, and if every one were right."""
        right = self.num_correct[self.metric]
        return right / self.num_questions, (right + self.num_failed) / self.num_questions
