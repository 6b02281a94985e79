"""Two limits of an evaluation: open sockets, and patience with a server that refuses everything.

Receives a wished concurrency or the outcomes of requests; returns what is possible or raises.
"""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, field

from evalsuite.client import Reply, RequestFailure
from evalsuite.errors import ConfigError, Problem
from evalsuite.retries import is_retriable

# Requests in flight where a config sets no limit: enough for all of GSM8K at once.
MAX_IN_FLIGHT = 2048
# Files the rest of the process may need beside the sockets.
OTHER_FILES = 128
# So many first requests, all refused in the same way, speak for the rest.
NUM_REFUSALS = 8
# How servers refuse a prompt that does not fit (vLLM, SGLang: 400; others 413 or 422).
TOO_LONG_STATUS = (400, 413, 422)
# So many requests in a row, none with an answer after all its attempts: nobody is there, or what
# is there answers nothing. A server that hangs would else cost a time limit a question.
NUM_IN_A_ROW = 64

_CONTEXT = re.compile(
    r"context|max_model_len|max_num_tokens|max_seq_len|maximum .{0,20}length|too long",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"\d+")


def allow_sockets(wished: int) -> tuple[int, tuple[str, ...]]:
    """Raise this process's limit of open files as far as it may.

    Args:
        wished: Requests in flight that are wanted, at least 1.

    Returns:
        The concurrency that is possible, and a note where it is less than the wish.
    """
    possible, why = _possible(wished)
    if possible >= wished:
        return wished, ()
    return possible, (f"{possible} requests in flight in place of {wished}: {why}",)


def _possible(wished: int) -> tuple[int, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = min(wished, MAX_IN_FLIGHT) + OTHER_FILES
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != unlimited and soft < needed:
        return max(1, soft - OTHER_FILES), f"the system allows {soft} open files"
    return MAX_IN_FLIGHT, f"{MAX_IN_FLIGHT} are the most at once"


@dataclass
class Patience:
    """Watches whether going on makes sense."""

    has_answered: bool = False
    refused: list[RequestFailure] = field(default_factory=list)
    num_in_a_row: int = 0

    def note(self, outcome: tuple[Reply, ...] | RequestFailure, num_questions: int) -> str:
        """Take note of one outcome.

        Returns:
            Why the evaluation should end, "" to go on.

        Raises:
            ConfigError: The prompt does not fit the server's context, or the first requests were
                all refused with the same 3xx or 4xx status.
        """
        if not isinstance(outcome, RequestFailure):
            self.has_answered = True
            self.num_in_a_row = 0
            return ""
        if outcome.status in TOO_LONG_STATUS and is_too_long(outcome.message):
            # No retry and no other question mends it, so the answers so far wait in the ledger.
            raise ConfigError(Problem("error", explain_too_long(outcome.message)))
        if not self.has_answered:
            self.refused.append(outcome)
            self._check_refused(num_questions)
        self.num_in_a_row += 1
        if self.num_in_a_row >= NUM_IN_A_ROW:
            return f"{NUM_IN_A_ROW} requests in a row failed; {outcome.message}"
        return ""

    def _check_refused(self, num_questions: int) -> None:
        status = self.refused[0].status or 0
        is_same = all(failure.status == status for failure in self.refused)
        is_final = status // 100 in (3, 4) and not is_retriable(status)
        if is_same and is_final and len(self.refused) >= min(NUM_REFUSALS, num_questions):
            message = f"the server refuses every request: {self.refused[0].message}"
            raise ConfigError(Problem("error", message))


def is_too_long(message: str) -> bool:
    """Whether a refusal is about the length of the prompt: it names the limit and a number."""
    return bool(_CONTEXT.search(message)) and len(_INTEGER.findall(message)) >= 3


def explain_too_long(message: str) -> str:
    """Write the error for a prompt that does not fit.

    Args:
        message: "HTTP <status>: <the server's words>".
    """
    numbers = [int(text) for text in _INTEGER.findall(message.split(":", 1)[1])]
    limit = _context_limit(message)
    largest = max(numbers)
    shortfall = f" by at least {largest - limit} tokens" if limit and largest > limit else ""
    return (
        f"prompt and max_tokens do not fit the server's context{shortfall}: raise --max-model-len, "
        f"or lower num_fewshot or max_tokens; the server said: {message}"
    )


def _context_limit(message: str) -> int:
    """The context length that a message names, 0 if none is recognised."""
    found = re.search(
        r"(?:context (?:length|limit|window|size)|max_model_len|max_num_tokens|max_seq_len"
        r"|maximum (?:model |sequence )?length)(?: is| of| only|=|:)*\s*\(?(\d+)",
        message,
        re.IGNORECASE,
    )
    return int(found[1]) if found else 0
