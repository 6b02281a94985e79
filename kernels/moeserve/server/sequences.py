"""The sequences of one request: planned from its `Job`, filled by the engine's events.

Receives a `Job` with its prompts; returns `Choice`s, each with the engine's `Request`, which turn
events into text. Running them is `running.py`; how a reply looks is `replies.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from moeserve.engine.request import FinishReason, Logprob, Request, TokenEvent
from moeserve.errors import MoeserveError
from moeserve.server.params import Job, ModelContext, Prompt
from moeserve.server.text import TextStream

# Sequences that are planned before others may use the event loop, about a millisecond of work.
_PLANNED_AT_ONCE = 64


class EngineFailedError(MoeserveError):
    """The engine ended a sequence for a reason that is not the client's; becomes HTTP 5xx.

    Attributes:
        is_stopping: The server is shutting down (503), as against an internal error (500).
    """

    def __init__(self, message: str, is_stopping: bool) -> None:
        super().__init__(message)
        self.is_stopping = is_stopping


class Observer(Protocol):
    """Receives the timings of sequences; `metrics.py` is one."""

    def first_token(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """The first tokens came; time from arrival."""

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """More tokens came; time since the last ones."""

    def finished(self, choice: Choice, seconds: float) -> None:
        """A sequence ended."""


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token with its log-probability and where its text begins in the output."""

    token_id: int
    offset: int
    logprob: Logprob


@dataclass
class Delta:
    """What became certain with one event."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Choice:
    """One sequence while it runs, and its outcome at the end.

    Attributes:
        index: Place in the reply.
        prompt: Its prompt.
        request: What the engine was asked.
        stream: Turns tokens into text.
        stop_reason: Stop string or stop token id that ended it; None for end of text.
        num_tokens: Generated, the one that ended the sequence included.
    """

    index: int
    prompt: Prompt
    request: Request
    stream: TextStream
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0

    def take(self, event: TokenEvent) -> Delta:
        """Take one event of the engine; return what became certain.

        Raises:
            EngineFailedError: The event ends the sequence with an error or an abort.
        """
        if event.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens or event.num_cached_tokens
        delta = Delta()
        stream = self.stream
        for place, token_id in enumerate(event.token_ids):
            self._note(token_id, event, place, delta)
            delta.text += stream.feed(token_id)
            if stream.stop is not None:
                self._end(delta, "stop", stream.stop)
                break
        else:
            self._finish(event, delta)
        if delta.text:
            self.text.append(delta.text)
        return delta

    def _note(self, token_id: int, event: TokenEvent, place: int, delta: Delta) -> None:
        self.num_tokens += 1
        self.token_ids.append(token_id)
        delta.token_ids.append(token_id)
        if place < len(event.logprobs):
            entry = TokenLogprob(token_id, self.stream.num_chars, event.logprobs[place])
            self.logprobs.append(entry)
            delta.logprobs.append(entry)

    def _finish(self, event: TokenEvent, delta: Delta) -> None:
        reason = event.finish_reason
        if reason is None:
            return
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            is_stopping = reason is FinishReason.ABORT
            message = event.error or ("the server is stopping" if is_stopping else "engine error")
            raise EngineFailedError(message, is_stopping)
        if event.stop_token_id is not None:
            self._note(event.stop_token_id, event, len(event.token_ids), delta)
            if self.stream.has_stop_in_output:  # tokens that end a sequence too, as in vLLM
                delta.text += self.stream.feed(event.stop_token_id)
            if event.stop_token_id in self.request.sampling.stop_token_ids:
                self.stop_reason = event.stop_token_id
        delta.text += self.stream.finish()
        if self.stream.stop is not None:
            self._end(delta, "stop", self.stream.stop)
        else:
            self._end(delta, reason.value, self.stop_reason)

    def _end(self, delta: Delta, reason: str, stop_reason: str | int | None) -> None:
        self.finish_reason = delta.finish_reason = reason
        self.stop_reason = stop_reason

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens, by which candidates are ranked."""
        total = sum(entry.logprob.logprob for entry in self.logprobs)
        return total / max(len(self.logprobs), 1)


async def plan_choices(
    job: Job,
    prompts: tuple[Prompt, ...],
    context: ModelContext,
    request_id: str,
    origin: tuple[str, str],
) -> list[Choice]:
    """Return one choice a candidate, ordered by prompt and then by candidate.

    Args:
        job: What was asked.
        prompts: Each is continued `best_of` times.
        context: Length and tokenizer of the model.
        request_id: Unique; the engine's ids begin with it.
        origin: Client and connection.

    Raises:
        BadRequest: A prompt does not fit into the context.
    """
    choices: list[Choice] = []
    for prompt in prompts:
        for candidate in range(job.best_of):
            index = len(choices)
            if index % _PLANNED_AT_ONCE == _PLANNED_AT_ONCE - 1:
                await asyncio.sleep(0)  # thousands take a while: others are served in between
            sampling = job.sampling_of(prompt, candidate, context.info.max_model_len)
            name = f"{request_id}-{index}"
            request = Request(name, prompt.ids, sampling, job.priority, *origin)
            stream = TextStream(context.tokenizer, job.text, prompt.ids)
            choices.append(Choice(index, prompt, request, stream))
    return choices
