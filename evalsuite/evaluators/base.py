"""The contract of an evaluator and the one result type that all of them return.

An evaluator receives a running server's base URL, a job and a ledger, asks every question that
the ledger does not hold yet, and returns an `EvalResult`. It never decides PASS or FAIL; that is
`verdict.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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

    @property
    def accuracy(self) -> float:
        """Right answers over answered questions under the gating metric, first repeat."""
        return self.num_correct[self.metric] / self.num_answered if self.num_answered else 0.0

    @property
    def accuracy_bounds(self) -> tuple[float, float]:
        """Accuracy if every missing answer were wrong, and if every one were right."""
        right = self.num_correct[self.metric]
        return right / self.num_questions, (right + self.num_failed) / self.num_questions
