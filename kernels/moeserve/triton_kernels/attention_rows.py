"""Paged attention, one program for each block of query rows and key head.

Receives rotated queries [T, NQ, D] and the paged cache; returns [T, NQ * D]. The G query heads of
a key head are rows of one tile, so keys and values are read once for all of them. Three modes of
one kernel: DECODE (one token of a sequence), PREFILL (a chunk's tokens, causal) and SHARED (all
decoding sequences against a prefix that they have in common, which leaves the running softmax
(m, l, acc) instead of a result; DECODE goes on from it).

A row's keys are taken in ascending tiles that begin at multiples of BN, whoever computes them: to
go on from a stored float32 state gives the bits of an uninterrupted pass. With one BM for all
modes (`FIXED`) a row's result depends on nothing but its own sequence. The variant for few
sequences, which splits the keys over programs, is `attention_decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs
from moeserve.triton_kernels.rope import Heads

DECODE, PREFILL, SHARED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Places of the step's scalars in `meta`.
META_SHARED_TOKENS, META_SHARED_ROW, META_TABLE_STRIDE = 0, 1, 2
META_SIZE = 8
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class RowsTile:
    """BM query rows by BN keys a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def load_page_tile(
    cache_ptr, page, head, first, end,
    PLANE: tl.constexpr, NKV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Keys (PLANE 0) or values (PLANE 1) [BN, D] of tokens first.. of one sequence; 0 past end.

    BN divides PAGE, so the tile is one piece of one page, whose number the caller has.
    """
    n = tl.arange(0, BN)
    d = tl.arange(0, D)
    row = ((page.to(tl.int64) * 2 + PLANE) * NKV + head) * PAGE + first % PAGE
    tile = cache_ptr + row * D + n[:, None] * D + d[None, :]
    return tl.load(tile, mask=(first + n < end)[:, None], other=0.0)


@triton.jit
def attend(
    q, m, l, acc, cache_ptr, table_ptr, head, begin, end, position, scale,
    NKV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    IS_MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Go on with the running softmax of rows [BM] over keys begin.. to end, up to `position`."""
    # A step's page number is read in the step before: a load that others wait for within a step
    # would take stages of the pipeline from the tiles (two of five tiles in flight, not four).
    page = tl.load(table_ptr + begin // PAGE, mask=begin < end, other=0)
    for first in range(begin, end, BN):
        k = load_page_tile(cache_ptr, page, head, first, end, 0, NKV, PAGE, D, BN)
        v = load_page_tile(cache_ptr, page, head, first, end, 1, NKV, PAGE, D, BN)
        page = tl.load(table_ptr + (first + BN) // PAGE, mask=first + BN < end, other=0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if IS_MASKED:
            n = first + tl.arange(0, BN)
            s = tl.where(n[None, :] <= position[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row without any key so far: (-inf) - (-inf) would be a NaN.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return m, l, acc


@triton.jit(do_not_specialize=["num_rows"])
def attention_rows_kernel(
    q_ptr, out_ptr, cache_ptr, table_ptr, positions_ptr, begins_ptr, items_ptr, meta_ptr,
    acc_ptr, ml_ptr, num_rows, stride_q, scale,
    NQ: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, HAS_STATE: tl.constexpr,
    FIXED: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See the module's docstring; axis 0 is the block of rows, axis 1 the key head."""
    wait_for_inputs(PDL)
    G: tl.constexpr = NQ // NKV
    TOKENS: tl.constexpr = BM // G
    item = tl.program_id(0)
    head = tl.program_id(1)
    if MODE == 0:
        row = item
        count = 1
        sequence = item
    elif MODE == 1:
        row = tl.load(items_ptr + item * 3)
        count = tl.load(items_ptr + item * 3 + 1)
        sequence = tl.load(items_ptr + item * 3 + 2)
    else:
        row = item * TOKENS
        count = tl.minimum(TOKENS, num_rows - row)
        sequence = tl.load(meta_ptr + 1)
    table = table_ptr + sequence.to(tl.int64) * tl.load(meta_ptr + 2)

    line = tl.arange(0, BM)
    token = line // G
    query_head = head * G + line % G
    is_row = (token < count) & (line < TOKENS * G)
    d = tl.arange(0, D)
    at = (row + token).to(tl.int64)
    q = tl.load(
        q_ptr + at[:, None] * stride_q + query_head[:, None] * D + d[None, :],
        mask=is_row[:, None], other=0.0,
    )  # fmt: skip
    if UPCAST:
        q = q.to(tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    state = at * NQ + query_head
    begin = 0
    if MODE == 2:
        end = tl.load(meta_ptr)
        position = tl.zeros([BM], tl.int32) + end
        first = end
    else:
        first = tl.load(positions_ptr + row).to(tl.int32)
        end = first + count
        position = first + token
        first += 1
    if MODE == 0 and HAS_STATE:
        begin = tl.load(begins_ptr + row)
        if begin > 0:
            m = tl.load(ml_ptr + state * 2, mask=is_row, other=float("-inf"))
            l = tl.load(ml_ptr + state * 2 + 1, mask=is_row, other=0.0)
            acc = tl.load(
                acc_ptr + state[:, None] * D + d[None, :], mask=is_row[:, None], other=0.0
            )
    middle = begin
    if not FIXED:
        # Every row sees every key of these tiles.
        middle = tl.maximum(begin, (first // BN) * BN)
        m, l, acc = attend(
            q, m, l, acc, cache_ptr, table, head, begin, middle, position, scale,
            NKV, PAGE, D, BN, False, UPCAST,
        )  # fmt: skip
    m, l, acc = attend(
        q, m, l, acc, cache_ptr, table, head, middle, end, position, scale,
        NKV, PAGE, D, BN, True, UPCAST,
    )  # fmt: skip
    if MODE == 2:
        tl.store(ml_ptr + state * 2, m, mask=is_row)
        tl.store(ml_ptr + state * 2 + 1, l, mask=is_row)
        tl.store(acc_ptr + state[:, None] * D + d[None, :], acc, mask=is_row[:, None])
    else:
        out = acc / tl.where(l > 0.0, l, 1.0)[:, None]
        tl.store(
            out_ptr + state[:, None] * D + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None],
        )


@dataclass(frozen=True)
class Pages:
    """Where the keys of a step's sequences are.

    Attributes:
        cache: [pages, 2, NKV, page_size, D] of one layer.
        table: int32, one line of page numbers a sequence, `meta[META_TABLE_STRIDE]` apart.
        positions: [T] int32, -1 for padding, which then reads nothing.
        meta: [META_SIZE] int32: tokens of the shared prefix (a multiple of BN), a sequence that
            has it, distance of two lines of the table.
    """

    cache: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    meta: torch.Tensor


@dataclass(frozen=True)
class SharedState:
    """Running softmax of decode rows after the shared prefix.

    Attributes:
        begins: [B] int32: 0, or the prefix's length where the sequence has it.
        acc: [B, NQ, D] float32.
        ml: [B, NQ, 2] float32.
    """

    begins: torch.Tensor
    acc: torch.Tensor
    ml: torch.Tensor


def _launch(
    grid: tuple[int, int], mode: int, q: torch.Tensor, out: torch.Tensor, pages: Pages,
    heads: Heads, tile: RowsTile, is_fixed: bool,
    items: torch.Tensor | None = None, state: SharedState | None = None, num_rows: int = 0,
) -> None:  # fmt: skip
    # Fused multiply-adds are chosen by context; without them the modes round alike.
    options = {"enable_fp_fusion": False} if is_fixed and q.is_cuda else {}
    attention_rows_kernel[grid](
        q, out, pages.cache, pages.table, pages.positions,
        state.begins if state else pages.meta, items if items is not None else pages.meta,
        pages.meta, state.acc if state else q, state.ml if state else q,
        num_rows, q.stride(0), heads.D**-0.5 * _LOG2_E,
        NQ=heads.NQ, NKV=heads.NKV, D=heads.D, PAGE=heads.page_size,
        BM=tile.block_m, BN=tile.block_n, MODE=mode, HAS_STATE=state is not None,
        FIXED=is_fixed, UPCAST=not q.is_cuda,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(q), **options,
    )  # fmt: skip


def decode_rows(
    q: torch.Tensor, out: torch.Tensor, num_rows: int, pages: Pages, heads: Heads,
    tile: RowsTile, *, state: SharedState | None = None, is_fixed: bool = False,
) -> None:  # fmt: skip
    """The first `num_rows` rows, one token of sequence 0, 1, ... each.

    Args:
        q: [T, NQ, D] or [T, NQ * D], rows may be strided.
        out: [T, NQ * D] contiguous; only those rows are written.
        num_rows: B.
        pages: The cache.
        heads: Shapes.
        tile: BM of at least NQ / NKV.
        state: Where the shared prefix has been taken already.
        is_fixed: Bits must not depend on the batch.
    """
    _launch((num_rows, heads.NKV), 0, q, out, pages, heads, tile, is_fixed, state=state)


def prefill_rows(
    q: torch.Tensor, out: torch.Tensor, items: torch.Tensor, num_items: int, pages: Pages,
    heads: Heads, tile: RowsTile, *, is_fixed: bool = False,
) -> None:  # fmt: skip
    """Blocks of prompt tokens.

    Args:
        q: As for `decode_rows`.
        out: [T, NQ * D] contiguous; rows of the items are written.
        items: [num_items, 3] int32: first row, tokens (at most BM / G), line of the table.
        num_items: Blocks.
        pages: The cache.
        heads: Shapes.
        tile: Tile.
        is_fixed: Bits must not depend on the batch.
    """
    _launch((num_items, heads.NKV), 1, q, out, pages, heads, tile, is_fixed, items=items)


def shared_prefix(
    q: torch.Tensor, state: SharedState, num_rows: int, pages: Pages, heads: Heads,
    tile: RowsTile, *, is_fixed: bool = False,
) -> None:  # fmt: skip
    """Take the shared prefix for the first `num_rows` rows; fills `state`."""
    tokens = tile.block_m // (heads.NQ // heads.NKV)
    grid = (triton.cdiv(num_rows, tokens), heads.NKV)
    _launch(grid, 2, q, q, pages, heads, tile, is_fixed, state=state, num_rows=num_rows)
