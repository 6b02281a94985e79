"""What the scheduler is given and what it returns: sizes of a step, and one step.

Decisions are `scheduler.py`; tensors are made from a plan by `batch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.engine.config import CPU_FAIR_TOKENS
from moeserve.engine.sequence import Sequence


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes of a step.

    Attributes:
        max_num_seqs: Sequences in a step.
        max_num_batched_tokens: Tokens in a step.
        max_model_len: Tokens of a sequence.
        has_chunked_prefill: A prompt may be spread over several steps.
        fair_tokens: Tokens that take as long as a step takes before its first one.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    has_chunked_prefill: bool = True
    fair_tokens: int = CPU_FAIR_TOKENS


@dataclass(frozen=True)
class StepPlan:
    """One step: who runs, and how many tokens of each.

    Attributes:
        decodes: Sequences with one new token.
        prefills: (sequence, tokens of it in this step); a step that reaches the last known token
            of a sequence yields its next one.
    """

    decodes: list[Sequence]
    prefills: list[tuple[Sequence, int]]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def num_tokens(self) -> int:
        """T of the step."""
        return len(self.decodes) + sum(count for _, count in self.prefills)

    @staticmethod
    def yields_token(seq: Sequence, count: int) -> bool:
        """Whether `count` more tokens of `seq` reach its last one, and another is wanted."""
        return seq.num_computed + count == len(seq.tokens) < seq.max_total

    def sampled(self) -> list[Sequence]:
        """Sequences that get a token from this step, decodes first; before `advance`."""
        return self.decodes + [s for s, count in self.prefills if self.yields_token(s, count)]
