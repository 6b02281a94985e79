"""One record per question, appended as it arrives.

Receives records from an evaluator, writes `ledger.jsonl`, gives them back for resume, pairing
and reports. The aggregate over records is `EvalResult` in `evaluators/base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal[
    "answered", "truncated", "empty", "http_error", "timeout", "connection_error", "malformed"
]
ANSWERED: frozenset[str] = frozenset({"answered", "truncated", "empty"})


@dataclass(frozen=True)
class LedgerRecord:
    """What happened to one question in one repeat.

    Attributes:
        index: Question index in the task's test set.
        repeat: 0-based repeat on the same warm server.
        status: How the request ended; the last four are failures of infrastructure.
        text: Raw reply, None for a failure.
        target: Gold answer.
        scores: Metric name -> "correct" | "wrong" | "no_answer"; empty for a failure.
        extracted: Metric name -> value read.
        finish_reason: From the server.
        prompt_tokens: Tokens of the prompt as the server counted them.
        completion_tokens: Tokens generated.
        latency_s: Last attempt.
        retries: Failed attempts before the final one.
        error: Type and message of the last error, "" if none.
        retry_errors: All failed attempts' errors.
        prompt_hash: sha256 of the prompt, 16 hex digits.
        token_logprobs: Log-probabilities of generated tokens where recorded.
    """

    index: int
    repeat: int
    status: Status
    text: str | None
    target: str
    scores: dict[str, str] = field(default_factory=dict)
    extracted: dict[str, str] = field(default_factory=dict)
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float = 0.0
    retries: int = 0
    error: str = ""
    retry_errors: tuple[str, ...] = ()
    prompt_hash: str = ""
    token_logprobs: tuple[float, ...] = ()

    @property
    def is_answered(self) -> bool:
        """Whether the server gave an answer (right, wrong, cut or empty)."""
        return self.status in ANSWERED
