"""The `prompt` field and chat messages → `Prompt`s, encoded off the event loop where it is long.

Receives parsed values; returns ids with the text they came from, or raises `BadRequest`. Templates
are rendered by `chat.py`; the length of prompt plus output is checked by `Job.sampling_of`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from moeserve.errors import BadRequest
from moeserve.server.fields import check_token_ids
from moeserve.server.params import ModelContext, Prompt
from moeserve.server.protocol import shorten

# Texts longer than this (about a millisecond of work) are encoded in a thread.
_INLINE_CHARS = 2048
_WANT = "a string, an array of strings, an array of token ids or an array of such arrays"


@dataclass(frozen=True)
class Truncation:
    """How long a prompt may be, and that longer ones lose their start.

    Attributes:
        keep: `truncate_prompt_tokens`: tokens from the end; -1 is what `num_output` leaves.
        num_output: Tokens that are to follow.
    """

    keep: int
    num_output: int

    def num_tokens(self, max_model_len: int) -> int:
        """Return the tokens that are kept.

        Raises:
            BadRequest: Not a length of this context.
        """
        if self.keep == -1:
            return max(1, max_model_len - self.num_output)
        if not 1 <= self.keep <= max_model_len:
            name = "truncate_prompt_tokens"
            raise BadRequest(
                f"{name}: want -1 or 1 to {max_model_len}, got {shorten(self.keep)}", name
            )
        return self.keep


async def read_prompts(
    given: object, context: ModelContext, adds_special: bool, truncation: Truncation | None = None
) -> tuple[Prompt, ...]:
    """Return the prompts of a completion, in order.

    Args:
        given: The field as it was sent.
        context: Vocabulary, tokenizer and limits.
        adds_special: Whether text gets the tokenizer's special tokens (a start token, say).
        truncation: Longer prompts lose their start; None refuses them.

    Raises:
        BadRequest: Not one of the four forms, empty, mixed, too many, or an id out of range.
    """
    longest = context.info.max_model_len
    keep = truncation.num_tokens(longest) if truncation else None
    raw = _split(given, context, longest if keep is None else None)
    prompts = []
    for item in raw:
        if not isinstance(item, str):
            prompts.append(Prompt(tuple(item)))
            continue
        # Of a text that is cut anyway only its end is encoded, and a little more than is kept.
        text = item if keep is None else item[-(keep + 64) * context.tokenizer.longest_chars :]
        ids = await encode(text, context, adds_special, is_bounded=keep is None)
        prompts.append(Prompt(tuple(ids), item))
    if keep is not None:
        prompts = [p if len(p.ids) <= keep else Prompt(p.ids[-keep:]) for p in prompts]
    for prompt in prompts:
        if not prompt.ids:
            raise BadRequest("prompt: empty; want at least one token", "prompt")
    return tuple(prompts)


async def encode(
    text: str, context: ModelContext, adds_special: bool, *, is_bounded: bool = True
) -> list[int]:
    """Return the ids of a text.

    Raises:
        BadRequest: Bounded, and too long for the context whatever its tokens are.
    """
    tokenizer, limit = context.tokenizer, context.info.max_model_len
    least = len(text) // context.tokenizer.longest_chars
    if is_bounded and least > limit:
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens, but the prompt has "
            f"{len(text)} characters, at least {least} tokens",
            "prompt",
        )
    if len(text) <= _INLINE_CHARS:
        return tokenizer.encode(text, adds_special)
    return await asyncio.to_thread(tokenizer.encode, text, adds_special)


def _split(given: object, context: ModelContext, longest: int | None) -> list[Any]:
    """Bring the four forms to a list of texts and lists of checked ids."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise BadRequest(f"prompt: want {_WANT}, got {shorten(given)}", "prompt")
    if not given:
        raise BadRequest("prompt: an empty array; want at least one prompt", "prompt")
    if type(given[0]) is int:
        _check_ids(given, context, longest)
        return [given]
    most = context.limits.max_prompts
    if len(given) > most:
        raise BadRequest(f"prompt: at most {most} prompts, got {len(given)}", "prompt")
    kind = type(given[0])
    for item in given:
        if type(item) is not kind or kind not in (str, list):
            raise BadRequest(f"prompt: want {_WANT}, got {shorten(item)} in an array", "prompt")
        if kind is list:
            _check_ids(item, context, longest)
    return given


def _check_ids(ids: list[Any], context: ModelContext, longest: int | None) -> None:
    if not ids:
        raise BadRequest("prompt: an empty array of token ids", "prompt")
    if longest is not None and len(ids) > longest:  # before millions of ids are looked at
        raise BadRequest(
            f"This model's maximum context length is {longest} tokens, but the prompt alone has "
            f"{len(ids)}",
            "prompt",
        )
    check_token_ids(ids, context.info.vocab_size, "prompt")


def read_messages(given: object, most: int) -> list[dict[str, object]]:
    """Return chat messages with text contents.

    Raises:
        BadRequest: Not a non-empty array of at most `most` messages, or a part that is not text.
    """
    if not isinstance(given, list) or not given:
        raise BadRequest("messages: want a non-empty array", "messages")
    if len(given) > most:
        raise BadRequest(f"messages: at most {most}, got {len(given)}", "messages")
    return [_message(item, place) for place, item in enumerate(given)]


def _message(item: object, place: int) -> dict[str, object]:
    where = f"messages[{place}]"
    if not isinstance(item, dict):
        raise BadRequest(f"{where}: want an object, got {shorten(item)}", "messages")
    for name, value in item.items():
        if name in ("role", "content"):
            continue
        is_neutral = value is None or value == [] or (name == "name" and isinstance(value, str))
        if not is_neutral:
            raise BadRequest(f"{where}.{shorten(name)}: not supported", "messages")
    role = item.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise BadRequest(f"{where}.role: want a string, got {shorten(role)}", "messages")
    message: dict[str, object] = {"role": role, "content": _content(item.get("content"), where)}
    if isinstance(item.get("name"), str):
        message["name"] = item["name"]
    return message


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: want text, got {shorten(content)}", "messages")
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in ("text", "input_text")
        if not is_text or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.content: only parts of type text are served", "messages")
        texts.append(part["text"])
    return "\n".join(texts)
