"""The OpenAI wire format: request bodies out, choices in.

Receives prompts and sampling settings, returns the bytes to post; receives a reply's bytes,
returns its choices in prompt order or raises `MalformedError`. Connections, retries and time limits
are `client.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

# How engines say that they gave a request up (vLLM and SGLang: "abort"), and gateways that they
# withheld it: the text so far is no answer.
GIVEN_UP = frozenset({"abort", "aborted", "cancelled", "content_filter", "error"})
# How much of a server's own message is kept in a record.
MAX_MESSAGE_CHARS = 500
# How much of a body that is no JSON is quoted: enough to know a login page.
MAX_QUOTED_BYTES = 80


class MalformedError(ValueError):
    """A 2xx reply that holds no usable answer."""


@dataclass(frozen=True)
class SamplingSettings:
    """What every request of one evaluation has in common.

    Attributes:
        model: Served model name.
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy.
        seed: Sent with every request.
        stop: Stop strings, in the order they are sent.
        is_chat: One user message to the chat route instead of a prompt.
        has_logprobs: Ask for the log-probability of each generated token.
    """

    model: str
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[str, ...] = ()
    is_chat: bool = False
    has_logprobs: bool = False

    @property
    def route(self) -> str:
        """Path below the server's root."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


@dataclass(frozen=True)
class Choice:
    """One generated text with the usage of the request it came in."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    model: str = ""


def build_body(settings: SamplingSettings, prompts: Sequence[str]) -> bytes:
    """Build the JSON body for one prompt or for several in one request.

    Args:
        settings: Sampling of this evaluation.
        prompts: At least one; more than one only on the completions route.

    Raises:
        ValueError: No prompt, or several for the chat route.
    """
    if not prompts or (settings.is_chat and len(prompts) > 1):
        raise ValueError(f"{len(prompts)} prompts in one request to {settings.route}")
    body: dict[str, object] = {"model": settings.model}
    if settings.is_chat:
        body["messages"] = [{"role": "user", "content": prompts[0]}]
        if settings.has_logprobs:
            body["logprobs"] = True
    else:
        body["prompt"] = prompts[0] if len(prompts) == 1 else list(prompts)
        if settings.has_logprobs:
            body["logprobs"] = 1
    body["max_tokens"] = settings.max_tokens
    body["temperature"] = settings.temperature
    body["seed"] = settings.seed
    if settings.stop:
        body["stop"] = list(settings.stop)
    # ASCII escapes carry any text, lone surrogates included.
    return json.dumps(body).encode("ascii")


def parse_choices(
    payload: bytes, num_prompts: int, is_chat: bool, *, has_logprobs: bool = False
) -> list[Choice]:
    """Read a 2xx body; choices come back in prompt order, whatever order they were sent in.

    Args:
        payload: The body.
        num_prompts: Prompts in the request.
        is_chat: Whether it went to the chat route.
        has_logprobs: Whether log-probabilities were asked for; they are not looked at otherwise.

    Raises:
        MalformedError: No JSON, an error object, or not exactly one text per prompt.
    """
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError) as error:
        begins = payload[:MAX_QUOTED_BYTES].decode("utf-8", "replace")
        found = f"({len(payload)} bytes, beginning {begins!r})" if payload else "(0 bytes)"
        raise MalformedError(f"the body is not JSON {found}: {error}") from error
    if not isinstance(data, dict):
        raise MalformedError(f"the body is a JSON {type(data).__name__}, not an object")
    if data.get("error") or data.get("object") == "error":
        raise MalformedError(f"an error with status 200: {_message_of(data)}")
    choices = data.get("choices")
    if not choices:
        raise MalformedError(f"the body has no choices (choices: {choices!r})")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedError("`choices` is not a list of objects")
    by_index = _by_index(choices, num_prompts)
    prompt_tokens, completion_tokens = _usage(data.get("usage"))
    result = []
    for position, choice in enumerate(by_index):
        # Usage is per request: it is booked on the first prompt, so that sums stay right.
        tokens = (prompt_tokens, completion_tokens) if position == 0 else (0, 0)
        result.append(_choice(choice, is_chat, tokens, has_logprobs))
    model = data.get("model")
    return [replace(choice, model=model) if isinstance(model, str) else choice for choice in result]


def _by_index(choices: list[dict[str, Any]], num_prompts: int) -> list[dict[str, Any]]:
    """Order choices by `index`; one lone choice may leave it out."""
    if num_prompts == 1 and len(choices) == 1 and choices[0].get("index") in (None, 0):
        return choices
    indices = [choice.get("index") for choice in choices]
    # Compared as text: an index may be of any JSON type, and `true` is not 1.
    if sorted(map(repr, indices)) != sorted(map(repr, range(num_prompts))):
        raise MalformedError(f"{num_prompts} prompts were sent, choices came with index {indices}")
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _choice(
    choice: dict[str, Any], is_chat: bool, tokens: tuple[int, int], has_logprobs: bool
) -> Choice:
    reason = choice.get("finish_reason")
    if isinstance(reason, dict):
        # SGLang's own form: {"type": "abort", "message": ...}.
        reason = reason.get("type")
    reason = reason if isinstance(reason, str) else ""
    if reason.lower() in GIVEN_UP:
        raise MalformedError(f"the server gave the request up (finish_reason {reason!r})")
    if choice.get("error"):
        raise MalformedError(f"an error in a choice: {_message_of(choice)}")
    if is_chat:
        message = choice.get("message")
        if not isinstance(message, dict):
            raise MalformedError("a choice has no message")
        text = message.get("content")
        if text is None and (message.get("reasoning_content") or message.get("reasoning")):
            # The server's reasoning parser took everything: an answer, with nothing in it.
            text = ""
    else:
        text = choice.get("text")
    if not isinstance(text, str):
        raise MalformedError(f"the text of a choice is {text!r}")
    raw_ids = choice.get("token_ids")
    ids = tuple(raw_ids) if isinstance(raw_ids, list) else ()
    logprobs = _logprobs(choice.get("logprobs"), is_chat) if has_logprobs else ()
    return Choice(text, reason, *tokens, ids, logprobs)


def _logprobs(details: object, is_chat: bool) -> tuple[float, ...]:
    """Log-probabilities of the tokens, () where the server sends none."""
    if not isinstance(details, dict):
        return ()
    raw = details.get("content" if is_chat else "token_logprobs") or []
    if is_chat and isinstance(raw, list):
        raw = [item.get("logprob") if isinstance(item, dict) else None for item in raw]
    if not isinstance(raw, list) or not all(type(value) in (int, float) for value in raw):
        raise MalformedError("token log-probabilities are not all numbers")
    return tuple(float(value) for value in raw)


def _usage(usage: object) -> tuple[int, int]:
    """Prompt and completion tokens, 0 where the server does not say."""
    counts = usage if isinstance(usage, dict) else {}
    prompt, completion = (
        value if type(value := counts.get(name)) is int and value > 0 else 0
        for name in ("prompt_tokens", "completion_tokens")
    )
    return prompt, completion


def error_message(payload: bytes) -> str:
    """Find a server's own words in the body of an error reply; "" for an empty body."""
    text = payload.decode("utf-8", "replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:MAX_MESSAGE_CHARS]
    return _message_of(data) if isinstance(data, dict) else text.strip()[:MAX_MESSAGE_CHARS]


def _message_of(data: dict[str, Any]) -> str:
    error = data.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    found = inner or data.get("message") or data.get("detail") or data
    return (found if isinstance(found, str) else json.dumps(found))[:MAX_MESSAGE_CHARS]
