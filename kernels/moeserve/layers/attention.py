"""Attention of one layer over a paged KV cache, and the contract of its backends.

Receives hidden states [T, H], rotary tables of the step and the `ForwardBatch`; returns [T, H].
A backend owns the cache's layout and says how a step's block tables are to be arranged
(`plan`, once a step, on the host). `attention_torch.py` is the one for CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeserve.layers.linear import Projection, project
from moeserve.layers.rope import apply_rope

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one layer on this rank.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of a head.
        dtype: Of queries, keys, values and cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class HostBatch:
    """A step's tokens and pages as numpy arrays, decodes first.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64.
        slot_mapping: [T] int64.
        cu_seqlens_q: [B + 1] int64, first row of each sequence.
        seq_lens: [B] int64, tokens of each sequence once the step has run.
        block_table: [B, P] int32, unused entries 0.
        seq_ids: [B] int64, which sequence; another one each time it is admitted.
        num_decodes: Leading sequences with one token.
        page_size: Tokens a page.
    """

    token_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens_q: Array
    seq_lens: Array
    block_table: Array
    seq_ids: Array
    num_decodes: int
    page_size: int


class AttentionBackend(Protocol):
    """How keys and values are stored and read.

    Attributes:
        name: As shown at `/v1/backends`.
        page_size: Tokens a page.
        reason: Why this one, for `/v1/backends`.
        is_fused: Its layers run the fused kernels for GPUs, in steps that need no host.
        takes_qkv: `forward_fused` is called in place of norm, rotation and `forward`.
    """

    name: str
    page_size: int
    reason: str
    is_fused: bool
    takes_qkv: bool

    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        ...

    def allocate(self, num_pages: int) -> Tensor:
        """A zeroed cache of one layer; zeroed because padding reads it."""
        ...

    def plan(self, host: HostBatch) -> object:
        """Arrange a step's pages; the result travels in `ForwardBatch.attention`."""
        ...

    def forward(self, q: Tensor, kv: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the step's keys and values, then attend.

        Args:
            q: [T, num_heads, head_dim], rotated.
            kv: [T, 2 * num_kv_heads, head_dim], rotated keys, then values.
            cache: Of this layer, from `allocate`.
            batch: The step.

        Returns:
            [T, num_heads * head_dim].
        """
        ...

    def forward_fused(
        self,
        qkv: Tensor,
        layer: Attention,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Norm, rotation, cache write and attention of a fused projection.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; may be written to.
            layer: Its norm weights and cache.
            rope: Cosine and sine of every position.
            batch: The step.

        Returns:
            [T, num_heads * head_dim].
        """
        ...

    def clear(self, cache: Tensor, pages: list[int]) -> None:
        """Zero pages of one layer that hold bad values."""
        ...


class Attention(nn.Module):
    """Grouped-query attention with fused projections and an optional norm on each head."""

    def __init__(
        self,
        hidden_size: int,
        shape: AttentionShape,
        backend: AttentionBackend,
        *,
        norm_eps: float | None,
        has_bias: bool,
        projection: Projection | None = None,
    ) -> None:
        super().__init__()
        self.projection = projection
        self.shape = shape
        self.backend = backend
        self.norm_eps = norm_eps
        num_qk = shape.num_heads + shape.num_kv_heads
        rows = (num_qk + shape.num_kv_heads) * shape.head_dim
        width = shape.num_heads * shape.head_dim

        def new(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(*size, dtype=shape.dtype), requires_grad=False)

        self.qkv_weight = new(rows, hidden_size)
        self.o_weight = new(hidden_size, width)
        self.qkv_bias = self.o_bias = None
        if has_bias:
            self.qkv_bias = new(rows)
            self.o_bias = new(hidden_size)
        # One row a head, so that queries and keys are scaled by one product.
        self.qk_norm_weight = new(num_qk, shape.head_dim)
        self.cache = torch.empty(0)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Attend.

        Args:
            x: [T, H].
            rope: Cosine and sine of the step's positions, see `layers/rope.py`; of every position
                for a fused backend.
            batch: The step.

        Returns:
            [T, H].
        """
        qkv = project(self.projection, x, self.qkv_weight, self.qkv_bias)
        return project(self.projection, self.attend(qkv, rope, batch), self.o_weight, self.o_bias)

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Everything between the two projections.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; may be written to.
            rope: See `forward`.
            batch: The step.

        Returns:
            [T, num_heads * head_dim].
        """
        if self.backend.takes_qkv:
            return self.backend.forward_fused(qkv, self, rope, batch)
        shape = self.shape
        num_qk = shape.num_heads + shape.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        qk = heads[:, :num_qk]
        if self.norm_eps is not None:
            qk = F.rms_norm(qk, (shape.head_dim,), None, self.norm_eps) * self.qk_norm_weight
        apply_rope(qk, rope, out=heads[:, :num_qk])
        return self.backend.forward(
            heads[:, : shape.num_heads], heads[:, shape.num_heads :], self.cache, batch
        )
