"""A request on its way through the engine: what was asked, and the events that answer it.

`server/` builds `Request` from HTTP and turns `TokenEvent` into text; `scheduler.py` owns the
mutable state of a sequence. This file imports no torch: the API process uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; every field is honoured.

    Attributes:
        max_tokens: Upper limit of generated tokens (0 with `echo`: score the prompt only).
        min_tokens: End-of-text and stop tokens are masked before this many.
        temperature: 0 is greedy.
        top_p: Nucleus mass, 1 is off.
        top_k: Candidates kept, 0 is off.
        min_p: Least probability relative to the best token, 0 is off.
        seed: None is drawn from the system; otherwise the stream depends on nothing but it.
        presence_penalty: Subtracted from logits of tokens generated before.
        frequency_penalty: The same per occurrence.
        repetition_penalty: Divides or multiplies logits of tokens in prompt and output, 1 is off.
        logit_bias: Token id -> added to its logit.
        stop_token_ids: End the sequence, the token itself is not part of the text.
        ignore_eos: The model's end-of-text token does not end the sequence.
        num_logprobs: Most probable tokens reported beside each generated one, None is off.
        num_prompt_logprobs: The same for prompt positions, None is off.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Request:
    """One sequence to be continued (`n` > 1 becomes several requests).

    Attributes:
        id: Unique while the server lives.
        prompt_ids: Token ids, at least one.
        sampling: How to continue.
        priority: Order of arrival unless set.
        client: Who asks: a name for an API key or an address, "" for nobody in particular.
        connection: By which connection.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    client: str = ""
    connection: str = ""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one position's token and of the most probable ones.

    Attributes:
        logprob: Of the token itself, from float32 log-softmax of the raw logits.
        rank: 1 is the most probable.
        top: (token id, log-probability), best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One step's outcome for one request; the last one has a `finish_reason`.

    Attributes:
        request_id: Which request.
        token_ids: Generated since the last event; empty for a pure finish.
        logprobs: One for each token where asked for, then one for `stop_token_id` where set.
        prompt_logprobs: Sent once, with the first event; entry 0 is None.
        finish_reason: Set on the last event only.
        error: Text for ERROR.
        num_cached_tokens: Prompt tokens served from the prefix cache, on the first event.
        stop_token_id: The token that ended the sequence, where one did (not in `token_ids`).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    num_cached_tokens: int = 0
    stop_token_id: int | None = None
