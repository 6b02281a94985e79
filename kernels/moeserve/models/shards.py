"""How a model is cut over the ranks of a TP group: shapes on this rank, and parts of tensors.

Receives a `ModelSpec` and this rank's `Parallel`; returns the spec as this rank sees it and the
`Shards` that `runner/weights.py` loads by. Query, key and value heads, the widths of dense MLPs and
of experts, and the rows of the output projection are cut; the embedding is whole on every rank,
because looking rows up is free and a sum over ranks is not. Where ranks outnumber key and value
heads, each head is on several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from moeserve.errors import Unsupported
from moeserve.models.config import ModelSpec
from moeserve.parallel import Parallel


@dataclass(frozen=True)
class Cut:
    """Which part of a checkpoint tensor a destination takes.

    Attributes:
        dim: The dimension that is cut.
        start: First index of the part; its length is the destination's.
        size: Of the whole tensor in that dimension.
    """

    dim: int
    start: int
    size: int

    def whole(self, part: Tensor) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        shape = list(part.shape)
        shape[self.dim] = self.size
        return tuple(shape)

    def index(self, part: Tensor) -> tuple[slice, ...]:
        """Index of the part in the whole tensor."""
        index = [slice(None)] * part.dim()
        index[self.dim] = slice(self.start, self.start + part.shape[self.dim])
        return tuple(index)


@dataclass(frozen=True)
class Shards:
    """What a checkpoint's tensors are to this rank.

    Attributes:
        cuts: Names of which a part is wanted.
        elsewhere: Names that belong to other ranks alone.
    """

    cuts: Mapping[str, Cut] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()


NOT_CUT = Shards()


def first_kv_head(spec: ModelSpec, parallel: Parallel) -> int:
    """The first key and value head of this rank.

    Args:
        spec: Of the whole model.
        parallel: This rank's.
    """
    return parallel.tp_rank * spec.num_kv_heads // parallel.tp_size


def vocabulary_rows(vocab_size: int, parallel: Parallel) -> tuple[int, int]:
    """First row and number of rows of the output projection on this rank.

    All ranks but the last ones that have any hold ceil(V / tp).
    """
    rows = -(-vocab_size // parallel.tp_size)
    start = min(parallel.tp_rank * rows, vocab_size)
    return start, min(rows, vocab_size - start)


def local_spec(spec: ModelSpec, parallel: Parallel) -> ModelSpec:
    """The model as this rank sees it; `vocab_size` and the experts' fields stay the model's.

    Args:
        spec: Of the whole model.
        parallel: This rank's.
    """
    tp = parallel.tp_size
    if tp == 1:
        return spec
    return replace(
        spec,
        num_heads=spec.num_heads // tp,
        num_kv_heads=max(1, spec.num_kv_heads // tp),
        intermediate_size=spec.intermediate_size // tp,
    )


def check_divides(spec: ModelSpec, tp_size: int, *, is_expert_parallel: bool) -> None:
    """Refuse a TP size by which the model cannot be cut.

    Raises:
        Unsupported: Names the size and what it does not divide.
    """

    def refuse(what: str) -> Unsupported:
        return Unsupported(f"tensor_parallel_size={tp_size} does not divide {what}")

    if spec.num_heads % tp_size:
        raise refuse(f"num_attention_heads={spec.num_heads}")
    kv_heads = spec.num_kv_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise Unsupported(
            f"tensor_parallel_size={tp_size} neither divides num_key_value_heads={kv_heads} nor is "
            "a multiple of it"
        )
    if spec.num_moe_layers < spec.num_layers and spec.intermediate_size % tp_size:
        raise refuse(f"intermediate_size={spec.intermediate_size}")
    width = spec.moe_intermediate_size
    if spec.num_moe_layers and not is_expert_parallel and width % tp_size:
        raise refuse(f"moe_intermediate_size={width}; with --enable-expert-parallel it need not")
