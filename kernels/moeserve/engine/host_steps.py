"""Steps on a CPU: a step has run when `launch` returns. On a GPU: `device_steps.py`.

Both return a `Step`: logits of the rows that get a token, and those tokens once they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moeserve.engine.batch import SharedStep, forward_batch
from moeserve.runner.sampler import Sampled, sample

if TYPE_CHECKING:
    from moeserve.engine.scheduler import StepPlan
    from moeserve.engine.sequence import Sequence
    from moeserve.layers.attention import Array
    from moeserve.runner.model_runner import ModelRunner


class Step(Protocol):
    """A step that was launched."""

    @property
    def rows(self) -> list[Sequence]:
        """Sequences that get a token, in order."""
        ...

    @property
    def hidden(self) -> Tensor | None:
        """[T, H] where the step held prompts."""
        ...

    @property
    def may_wait(self) -> bool:
        """Whether the next step may be launched before `sampled` is called."""
        ...

    def sampled(self) -> Sampled | None:
        """A token for each row, None without rows; waits for the step."""
        ...

    def take(self, chosen: Sampled) -> None:
        """Tokens that another rank chose for the rows, in place of `sampled`."""
        ...


class Steps(Protocol):
    """Launches steps, one after another.

    Attributes:
        num_padding_rows: Rows of padding in graphs since start.
    """

    num_padding_rows: int

    def num_nan_rows(self) -> int:
        """Router rows with a NaN, of the steps that are known to have ended."""
        ...

    def launch(self, plan: StepPlan, block_table: Array, shared: SharedStep | None = None) -> Step:
        """Begin a step.

        Args:
            plan: Who runs.
            block_table: [max_num_seqs, P] int32 of the scheduler.
            shared: What the DP ranks that share experts run.
        """
        ...

    def idle(self, shared: SharedStep) -> None:
        """Take part in a step of other DP ranks with no sequence of one's own."""
        ...


@dataclass(frozen=True)
class HostStep:
    """See `Step`."""

    rows: list[Sequence]
    hidden: Tensor | None
    logits: Tensor | None
    may_wait: bool = False

    def sampled(self) -> Sampled | None:
        """See `Step.sampled`."""
        return None if self.logits is None else sample(self.logits, self.rows)

    def take(self, chosen: Sampled) -> None:
        """See `Step.take`; the next step is told of them by the engine."""


class HostSteps:
    """See `Steps`."""

    num_padding_rows = 0

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def num_nan_rows(self) -> int:
        """See `Steps.num_nan_rows`."""
        return self.runner.nan_rows()

    @torch.inference_mode()
    def launch(
        self, plan: StepPlan, block_table: Array, shared: SharedStep | None = None
    ) -> HostStep:
        """See `Steps.launch`."""
        runner = self.runner
        counts = shared.num_tokens if shared is not None else None
        batch = forward_batch(plan, block_table, runner.attention, runner.options.device, counts)
        hidden = runner.hidden(batch)
        rows = plan.sampled()
        logits = runner.logits(hidden, batch.logits_rows) if rows else None
        return HostStep(rows, hidden, logits)

    def idle(self, shared: SharedStep) -> None:
        """See `Steps.idle`."""
        self.runner.idle(shared.num_tokens)
