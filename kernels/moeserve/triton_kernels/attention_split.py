"""Paged decode attention for few sequences: the keys are cut over programs, then merged in order.

Receives rotated queries [B, NQ, D] and the paged cache; returns [B, NQ * D]. With enough
sequences to fill the card, `attention_rows.py` does the same in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.attention_rows import _LOG2_E, Pages, RowsTile, attend
from moeserve.triton_kernels.rope import Heads


@triton.jit
def attention_split_kernel(
    q_ptr, cache_ptr, table_ptr, positions_ptr, meta_ptr, acc_ptr, ml_ptr, stride_q, scale,
    NQ: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One part of one sequence's keys for the G query heads of one key head."""
    G: tl.constexpr = NQ // NKV
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    size = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    begin = split * size
    end = tl.minimum(begin + size, length)
    if begin < end:
        table = table_ptr + row * tl.load(meta_ptr + 2)
        line = tl.arange(0, BM)
        d = tl.arange(0, D)
        query_head = head * G + line
        q = tl.load(
            q_ptr + row * stride_q + query_head[:, None] * D + d[None, :],
            mask=(line < G)[:, None], other=0.0,
        )  # fmt: skip
        if UPCAST:
            q = q.to(tl.float32)
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, D], tl.float32)
        position = tl.zeros([BM], tl.int32) + (length - 1)
        m, l, acc = attend(
            q, m, l, acc, cache_ptr, table, head, begin, end, position, scale,
            NKV, PAGE, D, BN, True, UPCAST,
        )  # fmt: skip
        part = (row * NQ + query_head) * SPLITS + split
        tl.store(ml_ptr + part * 2, m, mask=line < G)
        tl.store(ml_ptr + part * 2 + 1, l, mask=line < G)
        tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=(line < G)[:, None])


@triton.jit
def attention_merge_kernel(
    acc_ptr, ml_ptr, positions_ptr, out_ptr,
    NQ: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Parts of one query head -> its row of the result."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    size = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    # Parts without keys were never written.
    is_part = split * size < length
    part = (row * NQ + head) * SPLITS + split
    m = tl.load(ml_ptr + part * 2, mask=is_part, other=float("-inf"))
    l = tl.load(ml_ptr + part * 2 + 1, mask=is_part, other=0.0)
    acc = tl.load(acc_ptr + part[:, None] * D + d[None, :], mask=is_part[:, None], other=0.0)
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(l * weight, 0)
    out = tl.sum(acc * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + (row * NQ + head) * D + d, out.to(out_ptr.dtype.element_ty))


# About four programs on each of an H200's 132 multiprocessors.
NUM_PROGRAMS = 512


def num_splits(num_rows: int, heads: Heads) -> int:
    """Parts a sequence for B rows: enough programs to fill the card, 1 where rows do by themselves.

    Args:
        num_rows: B.
        heads: Shapes.
    """
    wanted = NUM_PROGRAMS // (num_rows * heads.NKV)
    return 1 if wanted < 2 else min(32, 1 << (wanted.bit_length() - 1))


def decode_split(
    q: torch.Tensor, out: torch.Tensor, num_rows: int, splits: int, pages: Pages,
    heads: Heads, tile: RowsTile,
) -> None:  # fmt: skip
    """The first `num_rows` rows, one token of sequence 0, 1, ... each.

    Args:
        q: [T, NQ, D] or [T, NQ * D], rows may be strided.
        out: [T, NQ * D] contiguous; only those rows are written.
        num_rows: B.
        splits: A power of two, from `num_splits`.
        pages: The cache.
        heads: Shapes.
        tile: BM of at least NQ / NKV.
    """
    NQ, D = heads.NQ, heads.D
    acc = torch.empty(num_rows, NQ, splits, D, dtype=torch.float32, device=q.device)
    ml = torch.empty(num_rows, NQ, splits, 2, dtype=torch.float32, device=q.device)
    attention_split_kernel[(num_rows, heads.NKV, splits)](
        q, pages.cache, pages.table, pages.positions, pages.meta, acc, ml,
        q.stride(0), D**-0.5 * _LOG2_E,
        NQ=NQ, NKV=heads.NKV, D=D, PAGE=heads.page_size,
        BM=tile.block_m, BN=tile.block_n, SPLITS=splits, UPCAST=not q.is_cuda,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    attention_merge_kernel[(num_rows, NQ)](
        acc, ml, pages.positions, out, NQ=NQ, D=D, BN=tile.block_n, SPLITS=splits, num_warps=4
    )
