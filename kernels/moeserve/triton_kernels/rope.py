"""Norm of each query and key head, rotary embedding and the write to the paged cache, in one pass.

Receives the fused projection [T, (NQ + 2 NKV) * D]; leaves rotated queries in place and stores
rotated keys and values at the tokens' slots. Everything between load and store is float32. The
cache's layout is [pages, 2, NKV, page_size, D], keys first. The torch forms for CPUs are
`layers/rope.py` and `layers/attention_torch.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs


@triton.jit(do_not_specialize=["first_token"])
def qkv_rope_kernel(
    qkv_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, cache_ptr,
    stride_t, stride_cos, eps, first_token,
    NQ: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token; HEADS divides NQ and NKV, so all are queries, keys or values."""
    wait_for_inputs(PDL)
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64) + first_token
    first = tl.program_id(1) * HEADS
    head = first + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    at = qkv_ptr + token * stride_t + head * D + d
    low = tl.load(at).to(tl.float32)
    high = tl.load(at + HALF).to(tl.float32)
    if first < NQ + NKV:
        if HAS_NORM:
            total = tl.sum(low * low, 1, keep_dims=True) + tl.sum(high * high, 1, keep_dims=True)
            scale = tl.rsqrt(total / D + eps)
            low *= scale * tl.load(weight_ptr + head * D + d).to(tl.float32)
            high *= scale * tl.load(weight_ptr + head * D + HALF + d).to(tl.float32)
        # Padding has position -1.
        position = tl.maximum(tl.load(positions_ptr + token), 0).to(tl.int64)
        cos = tl.load(cos_ptr + position * stride_cos + d).to(tl.float32)
        sin = tl.load(sin_ptr + position * HALF + d).to(tl.float32)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if first < NQ:
        tl.store(at, low.to(qkv_ptr.dtype.element_ty))
        tl.store(at + HALF, high.to(qkv_ptr.dtype.element_ty))
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        # Heads NQ.. of the projection are the 2 * NKV heads of a page, in the same order.
        row = (slot // PAGE) * (2 * NKV * PAGE) + (head - NQ) * PAGE + slot % PAGE
        to = cache_ptr + row * D + d
        is_kept = (head >= 0) & (slot >= 0)
        tl.store(to, low.to(cache_ptr.dtype.element_ty), mask=is_kept)
        tl.store(to + HALF, high.to(cache_ptr.dtype.element_ty), mask=is_kept)


@dataclass(frozen=True)
class Heads:
    """Head counts of one rank: NQ query heads, NKV key heads of width D, pages of PAGE tokens."""

    NQ: int
    NKV: int
    D: int
    page_size: int


@dataclass(frozen=True)
class RopeTables:
    """cos [positions, at least D/2] (the first D/2 columns are read) and sin [positions, D/2]."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_and_store(
    qkv: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    tables: RopeTables,
    places: tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    heads: Heads,
    first_token: int = 0,
) -> None:
    """Normalise and rotate queries in place; normalise, rotate and store keys; store values.

    Args:
        qkv: [T, (NQ + 2 NKV) * D], rows may be strided; its query part is overwritten.
        norm: (weights [NQ + NKV, D], eps), None without a norm on each head.
        tables: Of every position.
        places: (positions [T], slots [T]), int32 or int64; a negative slot stores nothing.
        cache: [pages, 2, NKV, page_size, D].
        heads: Shapes.
        first_token: Rows before it are left alone.
    """
    T = qkv.shape[0] - first_token
    if T == 0:
        return
    # A power of two that divides both counts, because it is a block size.
    per_program = min(math.gcd(heads.NQ, heads.NKV, 8) & -math.gcd(heads.NQ, heads.NKV, 8), 8)
    qkv_rope_kernel[(T, (heads.NQ + 2 * heads.NKV) // per_program)](
        qkv, norm[0] if norm else qkv, tables.cos, tables.sin, places[0], places[1], cache,
        qkv.stride(0), tables.cos.stride(0), norm[1] if norm else 0.0, first_token,
        NQ=heads.NQ, NKV=heads.NKV, D=heads.D, PAGE=heads.page_size,
        HEADS=per_program, HAS_NORM=norm is not None, num_warps=1, **dependent(qkv),
    )  # fmt: skip
