"""What a step has to say: `StepOutput`, and the events of one sequence.

Receives sequences and the tokens chosen for them; returns `TokenEvent`s, which `process.py`
carries to the API process. When a sequence ends is decided in `engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moeserve.engine.request import FinishReason, Logprob, TokenEvent
from moeserve.engine.sequence import Sequence
from moeserve.runner.sampler import Sampled


@dataclass
class StepOutput:
    """What one step has to say, most of it as two flat lists.

    Attributes:
        ids: Requests with one plain new token.
        tokens: That token.
        events: Everything else: first tokens, log-probabilities, ends.
    """

    ids: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    def all_events(self) -> list[TokenEvent]:
        """Everything as events, plain tokens first."""
        plain = [TokenEvent(i, (t,)) for i, t in zip(self.ids, self.tokens, strict=True)]
        return plain + self.events

    def __bool__(self) -> bool:
        return bool(self.ids or self.events)


def token_event(
    seq: Sequence, sampled: Sampled, index: int, *, is_stop: bool, is_last: bool
) -> TokenEvent:
    """One new token of a sequence, with everything that goes with it.

    Args:
        seq: Whose token it is.
        sampled: The step's choices.
        index: The sequence's row in them.
        is_stop: The token ends the sequence and is not part of the text.
        is_last: The sequence ends here, for whatever reason.
    """
    logprobs: tuple[Logprob, ...] = ()
    if sampled.scores is not None and index in sampled.scored_rows:
        num_top = seq.request.sampling.num_logprobs or 0
        row = sampled.scored_rows[index]
        logprobs = (sampled.scores.as_logprob(row, num_top, Logprob),)
    reason = None
    if is_last:
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
    token = sampled.tokens[index]
    return TokenEvent(
        request_id=seq.request.id,
        token_ids=() if is_stop else (token,),
        logprobs=logprobs,
        prompt_logprobs=_first_prompt_logprobs(seq),
        finish_reason=reason,
        num_cached_tokens=0 if seq.is_started else max(seq.num_cached, 0),
        stop_token_id=token if is_stop else None,
    )


def end_event(seq: Sequence, reason: FinishReason) -> TokenEvent:
    """A finish without a token."""
    return TokenEvent(
        seq.request.id,
        prompt_logprobs=_first_prompt_logprobs(seq),
        finish_reason=reason,
        num_cached_tokens=max(seq.num_cached, 0),
    )


def _first_prompt_logprobs(seq: Sequence) -> tuple[Logprob | None, ...]:
    """Scores of the prompt go with the first event of a sequence that asked for them."""
    if seq.is_started or seq.request.sampling.num_prompt_logprobs is None:
        return ()
    return tuple(seq.prompt_logprobs)
