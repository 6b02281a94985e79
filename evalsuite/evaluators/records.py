"""Replies and failures -> ledger records, the same for every evaluator.

Receives what the client returned and which question it was for; scores a reply under every metric
of the task. Counting records is `aggregate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from evalsuite.client import Reply, RequestFailure
from evalsuite.config import EvalConfig
from evalsuite.evaluators.base import EvaluationRequest
from evalsuite.ledger import LedgerHead, LedgerRecord, Status
from evalsuite.masking import mask_command, secret_values
from evalsuite.tasks.base import Task, score_all

_FAILURE_STATUS: dict[str, Status] = {
    "http": "http_error",
    "timeout": "timeout",
    "connection": "connection_error",
    "malformed": "malformed",
}


@dataclass(frozen=True)
class Place:
    """Which question a record is about.

    Attributes:
        index: Question index.
        repeat: 0-based repeat.
        target: Gold answer.
        prompt_hash: Of the prompt that was sent.
    """

    index: int
    repeat: int
    target: str
    prompt_hash: str


def answered_record(task: Task, place: Place, reply: Reply) -> LedgerRecord:
    """Score a reply and put it on record."""
    scores, extracted = score_all(task, place.target, reply.text, reply.finish_reason)
    return LedgerRecord(
        index=place.index,
        repeat=place.repeat,
        status=status_of(reply.text, reply.finish_reason),
        text=reply.text,
        target=place.target,
        scores=scores,
        extracted=extracted,
        finish_reason=reply.finish_reason,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        latency_s=round(reply.latency_s, 6),
        retries=reply.retries,
        retry_errors=reply.retry_errors,
        prompt_hash=place.prompt_hash,
        token_logprobs=reply.token_logprobs,
    )


def status_of(text: str, finish_reason: str) -> Status:
    """Status of a request that was answered."""
    if not text.strip():
        return "empty"
    return "truncated" if finish_reason == "length" else "answered"


def strangers(asked: str, models: set[str]) -> tuple[str, ...]:
    """A note where replies name another model than was asked: a gateway may have switched.

    Args:
        asked: Served model name of the requests.
        models: What replies said; "" for nothing.
    """
    # With and without the owner's or a folder's name is the same model.
    others = sorted(
        name for name in models if name and name.split("/")[-1] != asked.rstrip("/").split("/")[-1]
    )
    if not others:
        return ()
    return (f"replies name the model {', '.join(map(repr, others))}, asked was {asked!r}",)


def failed_record(place: Place, failure: RequestFailure) -> LedgerRecord:
    """Put a failure on record: no text, no score."""
    return LedgerRecord(
        index=place.index,
        repeat=place.repeat,
        status=_FAILURE_STATUS[failure.kind],
        text=None,
        target=place.target,
        latency_s=round(failure.latency_s, 6),
        retries=failure.retries,
        error=failure.message,
        retry_errors=failure.retry_errors,
        prompt_hash=place.prompt_hash,
    )


def ledger_head(evaluator: str, request: EvaluationRequest, task: Task) -> LedgerHead:
    """What the answers depend on besides the prompts."""
    config = request.config
    return LedgerHead(
        evaluator=evaluator,
        profile=task.profile,
        model=request.served_model,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        stop=task.stop,
        is_chat=config.use_chat_completions,
        server=_server(config),
        build=request.server_build,
        weights=request.model_revision,
    )


def _server(config: EvalConfig) -> str:
    """Engine, environment and arguments; one that somebody else started has none of the file's."""
    if config.engine == "external":
        return config.engine
    env = dict(sorted(config.env.items()))
    return mask_command((config.engine, *config.server_args), env, secret_values(env))
