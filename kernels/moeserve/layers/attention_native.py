"""Paged attention in C, for CPUs: norm, rotation, cache write and attention in one call.

The cache of a layer is [num_kv_heads, pages, 2, page_size * head_dim], keys of a page with their
tokens together; `native/attention.c` describes it. Pages that all decoding sequences share are
read once. Float32 only; `attention_torch.py` serves what this does not.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moeserve.layers.attention import Array, Attention, AttentionShape, HostBatch
from moeserve.layers.attention_torch import num_shared_pages
from moeserve.layers.decode_rows import lazy_zeros
from moeserve.native.build import LANES, native

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch

# Tokens a page are the lanes of a vector in the kernel.
PAGE_SIZE = LANES
_MAX_HEAD_DIM = 256


class _Shape(ctypes.Structure):
    """`Shape` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "D", "num_pages")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("norm", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    """`Step` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "num_decodes")),
        *((name, ctypes.c_int64) for name in ("num_shared", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "lengths", "table")),
    )


@dataclass(frozen=True)
class NativePlan:
    """A step for the kernel, and the arrays that it points into."""

    step: _Step
    arrays: tuple[Array, ...]


def obstacle(shape: AttentionShape, page_size: int) -> str:
    """Why this backend cannot serve, "" if it can."""
    if shape.dtype != torch.float32:
        return f"it computes in float32, the model in {str(shape.dtype).removeprefix('torch.')}"
    if page_size not in (0, PAGE_SIZE):
        return f"its pages hold {PAGE_SIZE} tokens, not {page_size}"
    if shape.head_dim % PAGE_SIZE or shape.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {shape.head_dim} is no multiple of {PAGE_SIZE} up to {_MAX_HEAD_DIM}"
    return native().reason


class NativePagedAttention:
    """The attention backend for CPUs with a C compiler; see `AttentionBackend`."""

    name = "native"
    page_size = PAGE_SIZE
    is_fused = False
    takes_qkv = True

    def __init__(self, shape: AttentionShape, reason: str) -> None:
        self.shape = shape
        self.reason = reason
        functions = native().functions
        assert functions is not None
        self._attend = functions.moeserve_attend

    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        shape = self.shape
        return 2 * shape.num_kv_heads * shape.head_dim * PAGE_SIZE * shape.dtype.itemsize

    def allocate(self, num_pages: int) -> Tensor:
        """A zeroed cache of one layer."""
        shape = self.shape
        size = (shape.num_kv_heads, num_pages, 2, PAGE_SIZE * shape.head_dim)
        return lazy_zeros(size, shape.dtype)

    def clear(self, cache: Tensor, pages: list[int]) -> None:
        """Zero pages that hold bad values."""
        cache.index_fill_(1, torch.tensor(pages, dtype=torch.int64), 0.0)

    def plan(self, host: HostBatch) -> NativePlan:
        """Arrange a step's pages."""
        num_decodes = host.num_decodes
        num_shared = 0
        if num_decodes > 1:
            shortest = int(host.seq_lens[:num_decodes].min())
            num_shared = num_shared_pages(
                host.block_table[:num_decodes], (shortest - 1) // PAGE_SIZE
            )
        table = np.ascontiguousarray(host.block_table, dtype=np.int32)
        arrays = (host.slot_mapping, host.cu_seqlens_q, host.seq_lens, table)
        step = _Step(
            *(len(host.slot_mapping), len(host.seq_lens), num_decodes),
            *(num_shared, table.shape[1]),
            *(array.ctypes.data for array in arrays),
        )
        return NativePlan(step, arrays)

    def forward(self, q: Tensor, kv: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Not this backend's form."""
        raise NotImplementedError("attention backend 'native' takes the fused projection")

    def forward_fused(
        self,
        qkv: Tensor,
        layer: Attention,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """See `AttentionBackend.forward_fused`; `rope` holds the step's own positions."""
        plan, shape, cache = batch.attention, self.shape, layer.cache
        assert isinstance(plan, NativePlan)
        has_norm = layer.norm_eps is not None
        sizes = _Shape(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim, cache.shape[1]),
            *(layer.norm_eps or 0.0, shape.head_dim**-0.5),
            layer.qk_norm_weight.data_ptr() if has_norm else None,
        )
        out = qkv.new_empty(qkv.shape[0], shape.num_heads * shape.head_dim)
        cos, sin = rope
        failed = self._attend(
            *(qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), ctypes.addressof(plan.step)),
            *(ctypes.addressof(sizes), cache.data_ptr(), out.data_ptr()),
        )
        if failed:
            raise MemoryError(f"attention over {qkv.shape[0]} tokens")
        return out
