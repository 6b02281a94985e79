"""Decode attention with the new token's norm, rotation and cache write inside.

Receives the fused projection [B, (NQ + 2 NKV) * D] of rows with one token each and the paged
cache; stores the new keys and values and returns [B, NQ * D]. One launch in place of three or
four: a launch costs as much as a small kernel. With few sequences a sequence's keys are cut over
programs, and the last of them to finish merges the parts in order; with many, a program has all
keys of one sequence and key head. A prefix in common, prompts and deterministic mode are `rope.py`
and `attention_rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.attention_rows import _LOG2_E, Pages, RowsTile, attend
from moeserve.triton_kernels.dependent import dependent, wait_for_inputs
from moeserve.triton_kernels.rope import Heads, RopeTables

# About two programs on each of an H200's 132 multiprocessors.
NUM_PROGRAMS = 256
MAX_SPLITS = 32


@triton.jit
def turned_heads(
    row_ptr, head, weight_ptr, cos_ptr, sin_ptr, position, stride_cos, eps,
    D: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Heads [M] of one token, normed and rotated: [M, D] float32; see `rope.qkv_rope_kernel`."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, D)
    other = tl.where(d < HALF, d + HALF, d - HALF)
    own = row_ptr + head[:, None] * D
    x = tl.load(own + d[None, :]).to(tl.float32)
    y = tl.load(own + other[None, :]).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= scale * tl.load(weight_ptr + head[:, None] * D + d[None, :]).to(tl.float32)
        y *= scale * tl.load(weight_ptr + head[:, None] * D + other[None, :]).to(tl.float32)
    cos = tl.load(cos_ptr + position * stride_cos + d % HALF).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + d % HALF).to(tl.float32)
    return x * cos[None, :] + tl.where(d < HALF, -sin, sin)[None, :] * y


@triton.jit
def _prefetch_keys(
    cache_ptr, table, head, begin, end,
    NKV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Ask for keys and values of tokens begin.. to end, into the L2 alone."""
    n = tl.arange(0, BN)
    line = tl.arange(0, D // 64) * 64
    for first in range(begin, end, BN):
        page = tl.load(table + first // PAGE).to(tl.int64)
        row = (page * 2 * NKV + head) * PAGE + first % PAGE + n
        at = cache_ptr + row[:, None] * D + line[None, :]
        for plane in tl.static_range(2):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
                [(at + plane * NKV * PAGE * D).to(tl.int64)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def attention_decode_kernel(
    qkv_ptr, out_ptr, cache_ptr, table_ptr, positions_ptr, slots_ptr, meta_ptr,
    norm_ptr, cos_ptr, sin_ptr, acc_ptr, ml_ptr, tickets_ptr,
    stride_q, stride_cos, eps, scale,
    NQ: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr, PREFETCH: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one sequence's keys for the G query heads of one key head."""
    G: tl.constexpr = NQ // NKV
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    # These were copied before the step began, so they need no wait.
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    table = table_ptr + row * tl.load(meta_ptr + 2)
    size = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    begin = split * size
    end = tl.minimum(begin + size, length)
    if PREFETCH:
        _prefetch_keys(cache_ptr, table, head, begin, end, NKV, PAGE, D, BN)
    wait_for_inputs(PDL)
    if (begin < end) | (split == 0):
        line = tl.arange(0, BM)
        d = tl.arange(0, D)
        is_row = line < G
        query_head = head * G + tl.minimum(line, G - 1)
        position = tl.maximum(length - 1, 0)
        own = qkv_ptr + row * stride_q
        turned = turned_heads(
            own, query_head, norm_ptr, cos_ptr, sin_ptr, position, stride_cos, eps, D, HAS_NORM,
        )  # fmt: skip
        # Rounded as what the cache holds is.
        q = turned.to(cache_ptr.dtype.element_ty)
        if UPCAST:
            q = q.to(tl.float32)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if (end == length) & (slot >= 0):
            one = tl.arange(0, 1)
            k = turned_heads(
                own, NQ + head + one, norm_ptr, cos_ptr, sin_ptr, position, stride_cos, eps,
                D, HAS_NORM,
            )  # fmt: skip
            at = own + (NQ + NKV + head + one)[:, None] * D + d[None, :]
            v = tl.load(at)
            to = ((slot // PAGE * 2 * NKV + head) * PAGE + slot % PAGE) * D
            place = cache_ptr + to + one[:, None] + d[None, :]
            tl.store(place, k.to(cache_ptr.dtype.element_ty))
            tl.store(place + NKV * PAGE * D, v.to(cache_ptr.dtype.element_ty))
            # Other threads of this program read them below.
            tl.debug_barrier()
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, D], tl.float32)
        last = tl.zeros([BM], tl.int32) + (length - 1)
        m, l, acc = attend(
            q, m, l, acc, cache_ptr, table, head, begin, end, last, scale,
            NKV, PAGE, D, BN, True, UPCAST,
        )  # fmt: skip
        is_whole = end - begin >= length
        out_row = out_ptr + (row * NQ + query_head)[:, None] * D + d[None, :]
        if is_whole:
            out = acc / tl.where(l > 0.0, l, 1.0)[:, None]
            tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])
        elif SPLITS > 1:
            base = (row * NQ + query_head) * SPLITS
            tl.store(ml_ptr + (base + split) * 2, m, mask=is_row)
            tl.store(ml_ptr + (base + split) * 2 + 1, l, mask=is_row)
            tl.store(acc_ptr + (base + split)[:, None] * D + d[None, :], acc, mask=is_row[:, None])
            # All of the parts are stored before the ticket is taken.
            tl.debug_barrier()
            ticket = tickets_ptr + row * NKV + head
            num_parts = tl.cdiv(length, size)
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                tl.store(ticket, 0)
                m = tl.full([BM], float("-inf"), tl.float32)
                l = tl.zeros([BM], tl.float32)
                acc = tl.zeros([BM, D], tl.float32)
                for i in range(0, num_parts):
                    at_ml = ml_ptr + (base + i) * 2
                    m_i = tl.load(at_ml, cache_modifier=".cg")
                    l_i = tl.load(at_ml + 1, cache_modifier=".cg")
                    at_acc = acc_ptr + (base + i)[:, None] * D + d[None, :]
                    acc_i = tl.load(at_acc, cache_modifier=".cg")
                    m_new = tl.maximum(m, m_i)
                    before, now = tl.exp2(m - m_new), tl.exp2(m_i - m_new)
                    l = l * before + l_i * now
                    acc = acc * before[:, None] + acc_i * now[:, None]
                    m = m_new
                out = acc / l[:, None]
                tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


@dataclass(frozen=True)
class NewTokens:
    """How the new token of each row gets into the cache.

    Attributes:
        norm: (weights [NQ + NKV, D], eps), None without a norm on each head.
        tables: Of every position.
        slots: [B] int32, -1 stores nothing.
    """

    norm: tuple[torch.Tensor, float] | None
    tables: RopeTables
    slots: torch.Tensor


def num_splits(num_rows: int, heads: Heads) -> int:
    """Parts a sequence for B rows: enough programs to fill the card, 1 where rows do by themselves.

    Args:
        num_rows: B.
        heads: Shapes.
    """
    wanted = NUM_PROGRAMS // (num_rows * heads.NKV)
    return 1 if wanted < 2 else min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def num_tickets(heads: Heads) -> int:
    """Counters that `attend_new_tokens` wants, for any number of rows that are split."""
    return max(NUM_PROGRAMS, heads.NKV)


def attend_new_tokens(
    qkv: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    new: NewTokens,
    pages: Pages,
    heads: Heads,
    tile: RowsTile,
    tickets: torch.Tensor,
) -> None:
    """The first `num_rows` rows, one token of sequence 0, 1, ... each.

    Args:
        qkv: [T, (NQ + 2 NKV) * D], rows may be strided.
        out: [T, NQ * D] contiguous; only those rows are written.
        num_rows: B.
        new: The rows' own keys and values.
        pages: The cache; written to.
        heads: Shapes.
        tile: BM of at least NQ / NKV.
        tickets: [num_tickets] int32, zero on entry and on return.
    """
    NQ, D = heads.NQ, heads.D
    splits = num_splits(num_rows, heads)
    acc = ml = tickets
    if splits > 1:
        acc = torch.empty(num_rows, NQ, splits, D, dtype=torch.float32, device=out.device)
        ml = torch.empty(num_rows, NQ, splits, 2, dtype=torch.float32, device=out.device)
    options = dependent(out)
    attention_decode_kernel[(num_rows, heads.NKV, splits)](
        qkv, out, pages.cache, pages.table, pages.positions, new.slots, pages.meta,
        new.norm[0] if new.norm else out, new.tables.cos, new.tables.sin, acc, ml, tickets,
        qkv.stride(0), new.tables.cos.stride(0), new.norm[1] if new.norm else 0.0,
        D**-0.5 * _LOG2_E,
        NQ=NQ, NKV=heads.NKV, D=D, PAGE=heads.page_size,
        BM=tile.block_m, BN=tile.block_n, SPLITS=splits,
        HAS_NORM=new.norm is not None,
        # Many sequences' keys do not stay in the L2 until they are read.
        PREFETCH=options["PDL"] and splits > 1 and out.element_size() == 2 and D >= 64,
        UPCAST=not out.is_cuda, num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
    )  # fmt: skip
