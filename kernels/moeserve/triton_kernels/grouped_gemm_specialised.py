"""The two grouped GEMMs for many rows an expert: warps that load beside warps that multiply.

The same contract as `grouped_gemm.py`, for tiles with `is_specialised`. Both operands come through
tensor descriptors, so the tokens are first copied into the experts' order (`arrange`), which also
writes down what each row block is. One program stays on each multiprocessor; while its multiplying
warps store a tile, its loading warps fetch the next one. Short last blocks cost a whole one here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs
from moeserve.triton_kernels.grouped_gemm import ACTIVATION_CODES, Tile, num_row_blocks
from moeserve.triton_kernels.grouped_gemm_kernels import _activate, _dot, _owner, _tile_position

# Ints a row block has in the plan: expert, first row, rows of the expert, rows before the expert.
PLAN_WIDTH = 4
# Rows of a block: two warpgroups of 64, which is what the compiler makes of four warps.
BLOCK_M = 128
NUM_WARPS = 4
_COPY_ROWS = 16
_COPY_COLUMNS = 512


@triton.jit
def moe_arrange_kernel(
    x_ptr, sorted_ptr, plan_ptr, counts_ptr, buckets_ptr, bucket_stride, stride_x, num_local, H,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row blocks into the plan, and ROWS rows of each into sorted [T * K, H]."""
    wait_for_inputs(PDL)
    lane = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + lane, mask=lane < num_local, other=0)
    ends = tl.cumsum((counts + BM - 1) // BM, 0)
    num_m = tl.max(ends, 0)
    pid_m = tl.program_id(0)
    if tl.program_id(1) == 0 and pid_m == 0:
        tl.store(plan_ptr, num_m)
    if pid_m < num_m:
        expert, first, count, offset = _owner(ends, counts, lane, pid_m, BM)
        if tl.program_id(1) == 0:
            entry = plan_ptr + (1 + pid_m) * 4
            tl.store(entry, expert)
            tl.store(entry + 1, first)
            tl.store(entry + 2, count)
            tl.store(entry + 3, offset)
        if COPIES:
            row = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
            bucket_ptr = buckets_ptr + expert.to(tl.int64) * bucket_stride
            slot = tl.load(bucket_ptr + row, mask=row < count, other=0)
            source = x_ptr + (slot // K).to(tl.int64)[:, None] * stride_x
            target = sorted_ptr + (offset + row).to(tl.int64)[:, None] * H
            for h in range(0, H, BLOCK_H):
                hh = h + tl.arange(0, BLOCK_H)[None, :]
                is_in = (row < count)[:, None] & (hh < H)
                tl.store(target + hh, tl.load(source + hh, mask=is_in), mask=is_in)


@triton.jit
def _plan_entry(plan_ptr, pid_m):
    """(expert, first row, rows of the expert, rows before it) of a row block."""
    entry = plan_ptr + (1 + pid_m) * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit(do_not_specialize=["bucket_stride"])
def moe_gate_up_specialised_kernel(
    x, w13, act_ptr, plan_ptr, buckets_ptr, weights_ptr, bucket_stride, H, I,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, IS_GATED: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sorted x [T * K, H], w13 [E_loc, 2I, H] -> act [T * K, I] in the same order."""
    wait_for_inputs(PDL)
    num_m = tl.load(plan_ptr)
    num_n = tl.cdiv(I, BN)
    rows_per_expert = 2 * I if IS_GATED else I
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), warp_specialize=True):
        pid_m, pid_n = _tile_position(tile, num_m, num_n, GROUP_M)
        expert, first, count, offset = _plan_entry(plan_ptr, pid_m)
        gate_row = expert * rows_per_expert + pid_n * BN
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for k in range(0, H, BK):
            a = x.load([offset + first, k])
            gate = _dot(a, w13.load([gate_row, k]), gate, False, UPCAST)
            if IS_GATED:
                up = _dot(a, w13.load([gate_row + I, k]), up, False, UPCAST)
        row = first + tl.arange(0, BM)
        if WEIGHT_ON_INPUT:
            slot = tl.load(
                buckets_ptr + expert.to(tl.int64) * bucket_stride + row, mask=row < count, other=0
            )
            weight = tl.load(weights_ptr + slot)[:, None]
            gate *= weight
            up *= weight
        act = _activate(gate, up, ACTIVATION).to(act_ptr.dtype.element_ty)
        col = pid_n * BN + tl.arange(0, BN)
        place = (offset + row).to(tl.int64)[:, None]
        tl.store(
            act_ptr + place * I + col[None, :], act,
            mask=(row < count)[:, None] & (col < I)[None, :],
        )  # fmt: skip


@triton.jit(do_not_specialize=["bucket_stride"])
def moe_down_specialised_kernel(
    act, w2, out_ptr, plan_ptr, buckets_ptr, weights_ptr, bucket_stride, H, I,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Act [T * K, I], w2 [E_loc, H, I] -> out [T * K, H] by slot, weighted in float32."""
    wait_for_inputs(PDL)
    num_m = tl.load(plan_ptr)
    num_n = tl.cdiv(H, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), warp_specialize=True):
        pid_m, pid_n = _tile_position(tile, num_m, num_n, GROUP_M)
        expert, first, count, offset = _plan_entry(plan_ptr, pid_m)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, I, BK):
            a = act.load([offset + first, k])
            acc = _dot(a, w2.load([expert * H + pid_n * BN, k]), acc, False, UPCAST)
        row = first + tl.arange(0, BM)
        slot = tl.load(
            buckets_ptr + expert.to(tl.int64) * bucket_stride + row, mask=row < count, other=0
        )
        if HAS_WEIGHT:
            acc *= tl.load(weights_ptr + slot)[:, None]
        col = pid_n * BN + tl.arange(0, BN)
        tl.store(
            out_ptr + slot.to(tl.int64)[:, None] * H + col[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=(row < count)[:, None] & (col < H)[None, :],
        )  # fmt: skip


def plan_size(num_slots: int, num_local: int) -> int:
    """Ints of a plan: the number of row blocks, padded, and one entry for each possible one."""
    return PLAN_WIDTH * (1 + num_row_blocks(num_slots, num_local, BLOCK_M))


def arrange(
    x: torch.Tensor,
    target: torch.Tensor | None,
    plan: torch.Tensor,
    buckets: tuple[torch.Tensor, torch.Tensor],
    *,
    top_k: int,
) -> None:
    """Write the plan and copy the tokens into the experts' order.

    Args:
        x: [T, H], rows may be strided.
        target: [T * K, H], written for every slot listed in `buckets`; None copies nothing.
        plan: int32, at least `plan_size`.
        buckets: (counts [E_loc], slots [E_loc, >= T * K]).
        top_k: K.
    """
    counts, slots = buckets
    T, H = x.shape
    blocks = num_row_blocks(T * top_k, counts.shape[0], BLOCK_M)
    copies = target is not None
    moe_arrange_kernel[(blocks, BLOCK_M // _COPY_ROWS if copies else 1)](
        x, target if target is not None else x, plan, counts, slots,
        slots.stride(0), x.stride(0), counts.shape[0], H,
        K=top_k, BLOCK_E=triton.next_power_of_2(counts.shape[0]), BM=BLOCK_M, ROWS=_COPY_ROWS,
        BLOCK_H=_COPY_COLUMNS, COPIES=copies, num_warps=4, **dependent(x),
    )  # fmt: skip


def _grid(tile: Tile, num_slots: int, num_local: int, width: int, like: torch.Tensor) -> int:
    tiles = num_row_blocks(num_slots, num_local, BLOCK_M) * -(-width // tile.block_n)
    if not like.is_cuda:
        return min(tiles, 2)
    sms: int = torch.cuda.get_device_properties(like.device).multi_processor_count
    return min(tiles, sms)


def _blocks(matrix: torch.Tensor, rows: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix.view(-1, matrix.shape[-1]), [rows, depth])


def gate_up(
    arranged: torch.Tensor,
    w13: torch.Tensor,
    act: torch.Tensor,
    plan: torch.Tensor,
    slots: torch.Tensor,
    tile: Tile,
    *,
    activation: str,
    weights_on_input: torch.Tensor | None = None,
) -> None:
    """First grouped GEMM with its activation, on tokens that `arrange` has put in order.

    Args:
        arranged: [T * K, H].
        w13: [E_loc, 2I, H] (or [E_loc, I, H] for "relu2"), contiguous, gate rows first.
        act: [T * K, I], written in the order of `arranged`.
        plan: As `arrange` left it.
        slots: [E_loc, >= T * K].
        tile: Tile sizes.
        activation: A name of `ACTIVATION_CODES`.
        weights_on_input: [T, K] float32, multiplied into the token (Llama-4).
    """
    H, I = w13.shape[2], act.shape[1]
    moe_gate_up_specialised_kernel[(_grid(tile, act.shape[0], w13.shape[0], I, act),)](
        _blocks(arranged, BLOCK_M, tile.block_k), _blocks(w13, tile.block_n, tile.block_k),
        act, plan, slots, weights_on_input if weights_on_input is not None else act,
        slots.stride(0), H, I,
        BM=BLOCK_M, BN=tile.block_n, BK=tile.block_k, GROUP_M=tile.group_m,
        ACTIVATION=ACTIVATION_CODES[activation], WEIGHT_ON_INPUT=weights_on_input is not None,
        IS_GATED=activation != "relu2", UPCAST=not act.is_cuda,
        num_warps=NUM_WARPS, num_stages=tile.num_stages, **dependent(act),
    )  # fmt: skip


def down(
    act: torch.Tensor,
    w2: torch.Tensor,
    out: torch.Tensor,
    plan: torch.Tensor,
    slots: torch.Tensor,
    tile: Tile,
    *,
    weights: torch.Tensor | None,
) -> None:
    """Second grouped GEMM.

    Args:
        act: [T * K, I], expert after expert.
        w2: [E_loc, H, I], contiguous.
        out: [T * K, H], written by slot for every slot listed.
        plan: As `arrange` left it.
        slots: [E_loc, >= T * K].
        tile: Tile sizes.
        weights: [T, K] float32 multiplied into the result, None where they went into the input.
    """
    num_local, H, I = w2.shape
    moe_down_specialised_kernel[(_grid(tile, act.shape[0], num_local, H, act),)](
        _blocks(act, BLOCK_M, tile.block_k), _blocks(w2, tile.block_n, tile.block_k),
        out, plan, slots, weights if weights is not None else act, slots.stride(0), H, I,
        BM=BLOCK_M, BN=tile.block_n, BK=tile.block_k, GROUP_M=tile.group_m,
        HAS_WEIGHT=weights is not None, UPCAST=not act.is_cuda,
        num_warps=NUM_WARPS, num_stages=tile.num_stages, **dependent(act),
    )  # fmt: skip
