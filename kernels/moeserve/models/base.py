"""What every model class offers to the runner, and what it is built from.

`runner/model_runner.py` builds a model from a `BuildContext`, fills `destinations()` through
`runner/weights.py`, then calls `forward` and `logits` in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moeserve.layers.attention import Attention, AttentionBackend
from moeserve.layers.linear import Projection
from moeserve.layers.moe import MoELayer
from moeserve.models.config import ModelSpec
from moeserve.models.shards import Shards
from moeserve.moe.dispatch import Workspace
from moeserve.moe.spec import MoESpec, Plan
from moeserve.parallel import Parallel

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch


@dataclass(frozen=True)
class BuildContext:
    """What a model is built from.

    Attributes:
        spec: Shapes of the whole model.
        dtype: Of weights and activations.
        device: Where they live.
        max_positions: Context length served; rotary tables are that long.
        attention: Backend of every attention layer.
        moe_spec: Of every expert layer on this rank; None for a dense model.
        moe_plan: The oracle's answer to it.
        parallel: This rank's place in the grid.
        projection: Form of dense products; None is the library's.
        workspace: Scratch that all expert layers share.
    """

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    attention: AttentionBackend
    moe_spec: MoESpec | None
    moe_plan: Plan | None
    parallel: Parallel = field(default_factory=Parallel)
    projection: Projection | None = None
    workspace: Workspace = field(default_factory=Workspace)


class Model(Protocol):
    """A causal language model over paged KV."""

    def forward(self, batch: ForwardBatch, num_layers: int | None = None) -> Tensor:
        """Hidden states [T, H] after the last norm; of the leading layers where given."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 of hidden rows [R, H]."""
        ...

    def raw_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The same in the model's dtype, into `out` where given."""
        ...

    def destinations(self) -> Mapping[str, Tensor]:
        """Checkpoint tensor name -> the part of a parameter that it fills."""
        ...

    def shards(self) -> Shards:
        """Which part of each checkpoint tensor that is; names not listed are taken whole."""
        ...

    def attention_layers(self) -> list[Attention]:
        """In order; each gets its KV cache from the runner."""
        ...

    def moe_layers(self) -> list[MoELayer]:
        """In order; `process_weights` is called on each after loading."""
        ...
