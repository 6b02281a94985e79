"""Choices → the JSON of OpenAI's two generation routes, whole or as stream chunks.

Receives finished `Choice`s or `Delta`s; returns dicts for whole replies and ready text for chunks,
of which there is one a token. Which fields were asked for is in the `Job`. Nothing here waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring

from moeserve.engine.request import Logprob
from moeserve.server.params import Job
from moeserve.server.sequences import Choice, Delta, TokenLogprob
from moeserve.server.text import TextOptions, TextStream, token_text
from moeserve.server.tokenizer import Tokenizer

# JSON has no infinity; an impossible token is written with the field's stand-in.
_LEAST_LOGPROB = -9999.0
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Reply:
    """The part of a reply that all its choices share.

    Attributes:
        id: Of the response.
        model: Name that the client used.
        job: What was asked.
        tokenizer: Spells tokens.
        is_chat: `/v1/chat/completions` rather than `/v1/completions`.
        created: Seconds since 1970.
    """

    id: str
    model: str
    job: Job
    tokenizer: Tokenizer
    is_chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[Choice], all_choices: list[Choice]) -> dict[str, object]:
        """Return the reply of a request that is not streamed.

        Args:
            choices: Those shown, in order.
            all_choices: Those generated; they count in the usage.
        """
        shape = self._chat_choice if self.is_chat else self._completion_choice
        reply: dict[str, object] = {
            "id": self.id,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [shape(choice) for choice in choices],
            "usage": usage(all_choices, self.job),
        }
        if self.is_chat and self.job.num_prompt_logprobs is not None:
            reply["prompt_logprobs"] = self._prompt_logprobs(choices[0])
        if self.is_chat and self.job.returns_token_ids:
            reply["prompt_token_ids"] = list(choices[0].prompt.ids)
        return reply

    def _completion_choice(self, choice: Choice) -> dict[str, object]:
        job = self.job
        text = "".join(choice.text)
        before = self.echo_text(choice) if job.has_echo else ""
        shown: dict[str, object] = {
            "index": choice.index,
            "text": before + text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if job.num_logprobs is not None:
            entries = self._echo_entries(choice) if job.has_echo else []
            entries += self._entries(choice.logprobs, len(before))
            shown["logprobs"] = _legacy(entries)
        if job.num_prompt_logprobs is not None:
            shown["prompt_logprobs"] = self._prompt_logprobs(choice)
        if job.returns_token_ids:
            shown["token_ids"] = choice.token_ids
            shown["prompt_token_ids"] = list(choice.prompt.ids)
        return shown

    def _chat_choice(self, choice: Choice) -> dict[str, object]:
        shown: dict[str, object] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.job.num_logprobs is not None:
            shown["logprobs"] = {"content": self._chat_entries(choice.logprobs), "refusal": None}
        if self.job.returns_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def echo_text(self, choice: Choice) -> str:
        """Return the prompt as the reply shows it: the text sent, or the ids' text."""
        if choice.prompt.text is not None:
            return choice.prompt.text
        return self.tokenizer.decode(choice.prompt.ids, self.job.text.skips_special)

    @cached_property
    def _plain_chunk(self) -> tuple[str, str, str]:
        """The fixed parts of a chunk with text alone, around its index and its text."""
        key = '"delta":{"content":' if self.is_chat else '"text":'
        end = "}" if self.is_chat else ""
        whole = self._event([{"index": 0}], None)
        head, tail = whole.split('{"index":0}')
        return head + '{"index":', "," + key, end + ',"logprobs":null,"finish_reason":null}' + tail

    def chunk(self, choice: Choice, delta: Delta) -> str:
        """Return the JSON of one stream chunk."""
        job = self.job
        is_plain = delta.finish_reason is None and not (
            delta.logprobs or job.returns_token_ids or job.has_running_usage
        )
        if is_plain:  # nearly every chunk; the server writes one a token
            head, middle, tail = self._plain_chunk
            return f"{head}{choice.index}{middle}{encode_basestring(delta.text)}{tail}"
        shown: dict[str, object] = {"index": choice.index}
        if self.is_chat:
            shown["delta"] = {"content": delta.text}
        else:
            shown["text"] = delta.text
        logprobs: object = None
        if job.num_logprobs is not None and delta.logprobs:
            if self.is_chat:
                logprobs = {"content": self._chat_entries(delta.logprobs), "refusal": None}
            else:
                base = len(self.echo_text(choice)) if job.has_echo else 0
                logprobs = _legacy(self._entries(delta.logprobs, base))
        shown["logprobs"] = logprobs
        shown["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            shown["stop_reason"] = choice.stop_reason
        if job.returns_token_ids:
            shown["token_ids"] = delta.token_ids
        running = usage([choice], job) if job.has_running_usage else None
        return self._event([shown], running)

    def opening_chunk(self, choice: Choice) -> str | None:
        """Return the chunk that comes before the tokens: the role, or the echoed prompt."""
        shown: dict[str, object] = {"index": choice.index}
        if self.is_chat:
            shown["delta"] = {"role": "assistant", "content": ""}
        elif self.job.has_echo:
            shown["text"] = self.echo_text(choice)
        else:
            return None
        shown["logprobs"] = None
        if self.job.has_echo and self.job.num_logprobs is not None:
            shown["logprobs"] = _legacy(self._echo_entries(choice))
        shown["finish_reason"] = None
        if self.job.returns_token_ids:
            shown["prompt_token_ids"] = list(choice.prompt.ids)
        return self._event(
            [shown], usage([choice], self.job) if self.job.has_running_usage else None
        )

    def usage_chunk(self, choices: list[Choice]) -> str:
        """Return the last chunk of a stream with `include_usage`."""
        return self._event([], usage(choices, self.job))

    def _event(self, choices: list[dict[str, object]], used: object) -> str:
        event: dict[str, object] = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.job.has_usage_chunk or used is not None:
            event["usage"] = used
        return _dumps(event)

    def _spell(self, token_id: int) -> str:
        return token_text(self.tokenizer, token_id, self.job.has_id_spelling)

    def _entries(self, logprobs: Sequence[TokenLogprob], base: int) -> list[_Entry]:
        return [
            _Entry(
                self._spell(item.token_id),
                _finite(item.logprob.logprob),
                self._top(item.token_id, item.logprob),
                base + item.offset,
            )
            for item in logprobs
        ]

    def _echo_entries(self, choice: Choice) -> list[_Entry]:
        """Entries of the prompt's tokens; the first has no log-probability."""
        plain = TextStream(self.tokenizer, TextOptions(skips_special=self.job.text.skips_special))
        entries = []
        given = choice.prompt_logprobs or (None,) * len(choice.prompt.ids)
        for token_id, logprob in zip(choice.prompt.ids, given, strict=False):
            offset = plain.num_chars
            plain.feed(token_id)
            value = None if logprob is None else _finite(logprob.logprob)
            top = None if logprob is None else self._top(token_id, logprob, self.job.num_logprobs)
            entries.append(_Entry(self._spell(token_id), value, top, offset))
        return entries

    def _top(self, token_id: int, logprob: Logprob, most: int | None = None) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, value in logprob.top[:most]:
            top.setdefault(self._spell(other), _finite(value))
        top.setdefault(self._spell(token_id), _finite(logprob.logprob))
        return top

    def _chat_entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, object]]:
        most = self.job.num_logprobs
        return [
            {
                **self._chat_token(item.token_id, item.logprob.logprob),
                "top_logprobs": [
                    self._chat_token(other, value) for other, value in item.logprob.top[:most]
                ],
            }
            for item in logprobs
        ]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, object]:
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": self._spell(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, object] | None]:
        most = self.job.num_prompt_logprobs
        shown: list[dict[str, object] | None] = []
        for token_id, item in zip(choice.prompt.ids, choice.prompt_logprobs, strict=False):
            if item is None:
                shown.append(None)
                continue
            ranked = [(token_id, item.logprob, item.rank)]
            ranked += [(key, val, place + 1) for place, (key, val) in enumerate(item.top[:most])]
            shown.append(
                {
                    str(key): {
                        "logprob": _finite(val),
                        "rank": rank,
                        "decoded_token": self._spell(key),
                    }
                    for key, val, rank in ranked
                }
            )
        return shown


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


@dataclass(frozen=True)
class _Entry:
    token: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


def _legacy(entries: list[_Entry]) -> dict[str, object]:
    """The four parallel lists of `/v1/completions`."""
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def usage(choices: list[Choice], job: Job) -> dict[str, object]:
    """Return token counts; each prompt counts once, whatever `n` is."""
    firsts = choices[:: job.best_of]
    num_prompt = sum(len(choice.prompt.ids) for choice in firsts)
    num_output = sum(choice.num_tokens for choice in choices)
    num_cached = sum(choice.num_cached_tokens for choice in firsts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def error_body(
    message: str, kind: str, param: str | None = None, code: str | int | None = None
) -> dict[str, object]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
