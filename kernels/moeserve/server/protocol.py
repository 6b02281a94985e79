"""Bodies of the API as typed, frozen models: what may be sent, and what is refused by name.

Receives parsed JSON; returns a request model or raises `BadRequest` with the field's name. Bounds
that depend on the model or on `Limits`, and the translation to `SamplingParams`, are in
`params.py`; the form of replies is in `replies.py`.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from moeserve.errors import BadRequest

Int = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRING = {"type": "string", "minLength": 1}


def _shape(*kinds: dict[str, Any]) -> WithJsonSchema:
    """Documented shape of a field that is read by hand, for a better message and less work."""
    return WithJsonSchema({"anyOf": [*kinds, {"type": "null"}]})


PromptField = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [_STRING, _IDS, *({"type": "array", "items": kind} for kind in (_STRING, _IDS))]}
    ),
]
MessagesField = Annotated[
    Any,
    _shape(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"role": _STRING, "content": {"type": "string"}},
                "required": ["role", "content"],
                "additionalProperties": False,
            },
        }
    ),
]
TokenIds = Annotated[Any, _shape(_IDS)]
Stops = Annotated[Any, _shape(_STRING, {"type": "array", "items": _STRING})]
Bias = Annotated[
    Any,
    _shape(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Flags = Annotated[Any, _shape({"type": "object", "additionalProperties": {"type": "boolean"}})]
Variables = Annotated[Any, _shape({"type": "object"})]
Template = Annotated[Any, _shape(_STRING)]

# Fields of the field's clients that this server cannot honour: the values that ask for nothing,
# and why any other is refused.
_ANY_TEXT = object()
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": ((None, ""), "insertion is not implemented"),
    "use_beam_search": ((None, False), "beam search is not implemented"),
    "length_penalty": ((None, 1.0), "beam search is not implemented"),
    "early_stopping": ((None, False), "beam search is not implemented"),
    "tools": ((None, []), "tools are not implemented"),
    "tool_choice": ((None, "none"), "tools are not implemented"),
    "parallel_tool_calls": ((None, False, True), "tools are not implemented"),
    "functions": ((None, []), "tools are not implemented"),
    "function_call": ((None, "none"), "tools are not implemented"),
    "response_format": ((None, {"type": "text"}), "only text replies are implemented"),
    "guided_json": ((None,), "guided decoding is not implemented"),
    "guided_regex": ((None,), "guided decoding is not implemented"),
    "guided_choice": ((None,), "guided decoding is not implemented"),
    "guided_grammar": ((None,), "guided decoding is not implemented"),
    "structured_outputs": ((None,), "guided decoding is not implemented"),
    "guided_decoding_backend": ((None,), "guided decoding is not implemented"),
    "guided_whitespace_pattern": ((None,), "guided decoding is not implemented"),
    "logits_processors": ((None, []), "no code is run for a request"),
    "allowed_token_ids": ((None,), "use logit_bias"),
    "bad_words": ((None, []), "use logit_bias"),
    "modalities": ((None, ["text"]), "only text is served"),
    "audio": ((None,), "only text is served"),
    "prediction": ((None,), "predicted output is not implemented"),
    "web_search_options": ((None,), "there is no search"),
    "reasoning_effort": ((None,), "pass it through chat_template_kwargs"),
    "verbosity": ((None, "medium"), "replies are as long as the model makes them"),
    "service_tier": ((None, "auto", "default"), "there is one tier"),
    "store": ((None, False), "nothing is stored"),
    "metadata": ((None, {}), "nothing is stored"),
    "documents": ((None, []), "documents are not implemented"),
    "mm_processor_kwargs": ((None, {}), "only text is served"),
    "prompt_embeds": ((None,), "prompts are text or token ids"),
    "cache_salt": ((None,), "the prefix cache is shared by all requests"),
    "logprob_token_ids": ((None,), "use logprobs"),
    "include_reasoning": ((None, True, False), "want a boolean"),  # there is none to hide
    "thinking_token_budget": ((None,), "use max_tokens"),
    "repetition_detection": ((None,), "use the penalties"),
    "moderation": ((None,), "nothing is moderated"),
    "kv_transfer_params": ((None,), "KV transfer is not implemented"),
    "vllm_xargs": ((None, {}), "there are no extensions"),
    "detokenize": ((None, True), "replies are always text"),
    "truncation_side": ((None, "left"), "prompts lose their start"),
    "stream_interval": ((None, 1), "every step is sent"),
    "return_token_offsets": ((None, False), "offsets come with logprobs"),
    "return_prompt_text": ((None, False), "use echo"),
    "media_io_kwargs": ((None, {}), "only text is served"),
    "mm_payload": ((None,), "only text is served"),
    "return_mm_kwargs": ((None, False), "only text is served"),
    "ec_transfer_params": ((None,), "only text is served"),
    "routed_experts_prompt_start": ((None, 0), "routed experts are not returned"),
    "watermarking": ((None,), "watermarks are not implemented"),
    "prompt_cache_options": ((None, {}), "the prefix cache is shared by all requests"),
    # Output is the bytes of the tokens; neither setting adds a blank.
    "spaces_between_special_tokens": ((None, True, False), "want a boolean"),
    # Labels without an effect on the reply.
    "session_id": ((None, _ANY_TEXT), "want a string"),
    "user": ((None, _ANY_TEXT), "want a string"),
    "safety_identifier": ((None, _ANY_TEXT), "want a string"),
    "prompt_cache_key": ((None, _ANY_TEXT), "want a string"),
    "prompt_cache_retention": ((None, _ANY_TEXT), "want a string"),
}
# Fields of completions that chat clients send along.
_NEUTRAL_CHAT: dict[str, tuple[tuple[object, ...], str]] = {
    "echo": ((None, False), "the reply to a chat is the assistant's turn alone"),
    "best_of": ((None, 1), "candidates are not ranked in chat; use n"),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    def asked(self, name: str) -> bool:
        """Whether the client sent this field."""
        return name in self.model_fields_set


class SamplingBody(_Body):
    """Fields that both generation routes share; ranges that need no context are checked here."""

    model: Text | None = None
    max_tokens: Int | None = None
    min_tokens: Count | None = None
    n: Int | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Share | None = None
    seed: Int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Positive | None = None
    logit_bias: Bias = None
    stop: Stops = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: Bool | None = None
    ignore_eos: Bool | None = None
    skip_special_tokens: Bool | None = None
    add_special_tokens: Bool | None = None
    truncate_prompt_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None
    stream: Bool | None = None
    stream_options: Flags = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(strict=True, min_length=1, max_length=128)] | None = None


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: PromptField = None
    best_of: Int | None = None
    echo: Bool | None = None
    logprobs: Int | None = None


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: MessagesField = None
    max_completion_tokens: Int | None = None
    logprobs: Bool | None = None
    top_logprobs: Int | None = None
    chat_template: Template = None
    chat_template_kwargs: Variables = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None


class TokenizeBody(_Body):
    """Body of `/tokenize`: a prompt or chat messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: MessagesField = None
    add_special_tokens: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    return_token_strs: Bool | None = None
    chat_template: Template = None
    chat_template_kwargs: Variables = None


class DetokenizeBody(_Body):
    """Body of `/detokenize`."""

    model: Text | None = None
    tokens: TokenIds = None
    skip_special_tokens: Bool | None = None


Body = TypeVar("Body", bound=_Body)


def parse_json(raw: bytes) -> object:
    """Return the value of a JSON text.

    Raises:
        BadRequest: Not JSON, nested too deep, or with a number out of range.
    """
    try:
        value: object = pydantic_core.from_json(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    return value


def parse_body(kind: type[Body], value: object) -> Body:
    """Return a request model.

    Args:
        kind: Which body it should be.
        value: Parsed JSON.

    Raises:
        BadRequest: A field that is unknown, cannot be honoured or has a value that cannot be.
    """
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"][:1])
        shown = shorten(first["input"])
        raise BadRequest(f"{name}: {first['msg'].lower()} (got {shown})", name) from None
    for name, given in (body.model_extra or {}).items():
        _check_extra(kind, name, given)
    return body


def _check_extra(kind: type[_Body], name: str, given: object) -> None:
    known = _NEUTRAL_CHAT if kind is ChatBody and name in _NEUTRAL_CHAT else _NEUTRAL
    if name in known:
        accepted, reason = known[name]
        if any(_is_same(given, value) for value in accepted):
            return
        raise BadRequest(f"{name}: {reason} (got {shorten(given)})", name)
    close = difflib.get_close_matches(name[:64], kind.model_fields, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise BadRequest(f"{shorten(name)}: unknown field{hint}", name[:64])


def _is_same(given: object, accepted: object) -> bool:
    """Equality that keeps 0 and False, 1 and True apart."""
    if accepted is _ANY_TEXT:
        return isinstance(given, str)
    return given == accepted and isinstance(given, bool) == isinstance(accepted, bool)


def shorten(value: object) -> str:
    """Return a value as it may stand in a message: at most 80 characters, no control codes."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a very large integer"
    if isinstance(value, (list, dict, str)) and len(value) > 100:
        kinds = {list: "array", dict: "object", str: "string"}
        return f"{kinds[type(value)]} of length {len(value)}"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
