"""Async OpenAI client: one prompt in, `Reply` or `RequestFailure` out, never "".

Receives a base URL, request settings and prompts; bounded, counted retries with backoff.
What a reply is worth is decided by `tasks/`; what is kept of it by `ledger.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reply:
    """A completed request.

    Attributes:
        text: Generated text; may be empty, which is then the model's own doing.
        finish_reason: "stop", "length" or what else the server says.
        prompt_tokens: From `usage`, 0 where the server sends none.
        completion_tokens: From `usage`, 0 where the server sends none.
        latency_s: From sending the request to the last byte, the last attempt only.
        retries: Attempts before this one; each one's error is in `retry_errors`.
        retry_errors: "Type: message" of each failed attempt, in order.
        token_ids: Token ids of the completion where the server returns them.
        token_logprobs: Log-probabilities of the completion's tokens where asked for.
    """

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float = 0.0
    retries: int = 0
    retry_errors: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class RequestFailure:
    """A request that got no usable answer after all attempts.

    Attributes:
        kind: "http", "timeout", "connection" or "malformed".
        message: Type and text of the last error, never blank.
        status: HTTP status of the last attempt, None where there was none.
        retries: Attempts after the first.
        latency_s: Time spent over all attempts.
        retry_errors: "Type: message" of each failed attempt, in order.
    """

    kind: str
    message: str
    status: int | None = None
    retries: int = 0
    latency_s: float = 0.0
    retry_errors: tuple[str, ...] = field(default=())
