"""The path for a handful of tokens: no alignment, no tiles of padding, weights streamed once.

With one token each selected expert has one row, so both GEMMs are matrix-vector products bound
by reading weights. `gate_up` launches a program for each (slot, block of I); `down` runs over a
token's K slots inside one program and sums them in float32, in slot order, without a second pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs
from moeserve.triton_kernels.grouped_gemm import ACTIVATION_CODES
from moeserve.triton_kernels.grouped_gemm_kernels import _activate


@dataclass(frozen=True)
class GemvTile:
    """Rows of weights a program owns, and how much of a row it reads at once."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


@triton.jit
def _local_expert(
    ids_ptr, map_ptr, slot, first_expert, num_local, num_experts, HAS_MAP: tl.constexpr
):
    """Local id of a slot's expert, or -1 where it lives elsewhere."""
    expert = tl.load(ids_ptr + slot).to(tl.int32)
    is_known = (expert >= 0) & (expert < num_experts)
    if HAS_MAP:
        local = tl.load(map_ptr + expert, mask=is_known, other=-1).to(tl.int32)
    else:
        local = tl.where(is_known, expert - first_expert, -1)
    return tl.where((local >= 0) & (local < num_local), local, -1)


@triton.jit
def moe_gate_up_gemv_kernel(
    x_ptr, w13_ptr, act_ptr, ids_ptr, map_ptr, weights_ptr,
    stride_x, first_expert, num_local, num_experts, H, I,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, HAS_MAP: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, IS_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One slot's BN columns of act [T * K, I]."""
    wait_for_inputs(PDL)
    slot = tl.program_id(1).to(tl.int64)
    local = _local_expert(ids_ptr, map_ptr, slot, first_expert, num_local, num_experts, HAS_MAP)
    if local >= 0:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        rows = 2 * I if IS_GATED else I
        base = w13_ptr + (local.to(tl.int64) * rows + n[:, None]) * H
        x_row = x_ptr + (slot // K) * stride_x
        gate = tl.zeros([BN, BK], tl.float32)
        up = tl.zeros([BN, BK], tl.float32)
        for k in tl.range(0, H, BK, num_stages=STAGES):
            kk = k + tl.arange(0, BK)
            is_in = (n[:, None] < I) & (kk[None, :] < H)
            if EVEN:
                x = tl.load(x_row + kk).to(tl.float32)[None, :]
                g = tl.load(base + kk[None, :])
            else:
                x = tl.load(x_row + kk, mask=kk < H, other=0.0).to(tl.float32)[None, :]
                g = tl.load(base + kk[None, :], mask=is_in, other=0.0)
            gate += g.to(tl.float32) * x
            if IS_GATED:
                u_ptr = base + tl.cast(I, tl.int64) * H + kk[None, :]
                u = tl.load(u_ptr) if EVEN else tl.load(u_ptr, mask=is_in, other=0.0)
                up += u.to(tl.float32) * x
        g_sum = tl.sum(gate, 1)
        u_sum = tl.sum(up, 1)
        if WEIGHT_ON_INPUT:
            weight = tl.load(weights_ptr + slot)
            g_sum *= weight
            u_sum *= weight
        act = _activate(g_sum, u_sum, ACTIVATION)
        tl.store(act_ptr + slot * I + n, act.to(act_ptr.dtype.element_ty), mask=n < I)


@triton.jit
def moe_down_gemv_kernel(
    act_ptr, w2_ptr, out_ptr, ids_ptr, map_ptr, weights_ptr,
    stride_out, first_expert, num_local, num_experts, H, I,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token's BN columns of out [T, H]: all its slots side by side, so their loads overlap."""
    token = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, BLOCK_K * BN)
    k = line // BN
    n = tl.program_id(0) * BN + line % BN
    slot = token * K + k
    # Read ahead of the wait (see below), so not from a line that the L1 has of an earlier layer.
    expert = tl.load(ids_ptr + slot, mask=k < K, other=-1, cache_modifier=".cg").to(tl.int32)
    is_known = (expert >= 0) & (expert < num_experts)
    if HAS_MAP:
        local = tl.load(map_ptr + expert, mask=is_known, other=-1).to(tl.int32)
    else:
        local = tl.where(is_known, expert - first_expert, -1)
    is_here = (local >= 0) & (local < num_local) & (n < H)
    local = tl.where(is_here, local, 0)
    w_row = w2_ptr + (local.to(tl.int64) * H + tl.where(n < H, n, 0))[:, None] * I
    a_row = act_ptr + tl.where(is_here, slot, 0)[:, None] * I
    ii = tl.arange(0, BK)[None, :]
    is_in = is_here[:, None] if EVEN else is_here[:, None] & (ii < I)
    # Ids were complete before the gate and up kernel began, so the first weights may be on their
    # way before its activations are.
    w = tl.load(w_row + ii, mask=is_in, other=0.0)
    wait_for_inputs(PDL)
    a = tl.load(a_row + ii, mask=is_in, other=0.0).to(tl.float32)
    acc = w.to(tl.float32) * a
    for i in tl.range(BK, I, BK, num_stages=STAGES):
        ii = (i + tl.arange(0, BK))[None, :]
        is_in = is_here[:, None] if EVEN else is_here[:, None] & (ii < I)
        a = tl.load(a_row + ii, mask=is_in, other=0.0).to(tl.float32)
        acc += tl.load(w_row + ii, mask=is_in, other=0.0).to(tl.float32) * a
    value = tl.sum(acc, 1)
    if HAS_WEIGHT:
        value *= tl.load(weights_ptr + slot, mask=k < K, other=0.0)
    out = tl.sum(tl.reshape(value, [BLOCK_K, BN]), 0)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out_ptr + token * stride_out + col, out.to(out_ptr.dtype.element_ty), mask=col < H)


def gate_up_gemv(
    x: torch.Tensor, w13: torch.Tensor, act: torch.Tensor, topk_ids: torch.Tensor,
    tile: GemvTile, *, num_experts: int, activation: str, first_expert: int = 0,
    expert_map: torch.Tensor | None = None, weights_on_input: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """X [T, H], w13 [E_loc, 2I, H] -> act [T * K, I] for slots whose expert is local."""
    H = x.shape[1]
    I = act.shape[1]
    grid = (-(-I // tile.block_n), act.shape[0])
    moe_gate_up_gemv_kernel[grid](
        x, w13, act, topk_ids, expert_map if expert_map is not None else topk_ids,
        weights_on_input if weights_on_input is not None else x,
        x.stride(0), first_expert, w13.shape[0], num_experts, H, I,
        K=topk_ids.shape[1], BN=tile.block_n, BK=tile.block_k, STAGES=tile.num_stages,
        EVEN=I % tile.block_n == 0 and H % tile.block_k == 0,
        HAS_MAP=expert_map is not None, ACTIVATION=ACTIVATION_CODES[activation],
        WEIGHT_ON_INPUT=weights_on_input is not None, IS_GATED=activation != "relu2",
        num_warps=tile.num_warps, **dependent(x, grid[0] * grid[1]),
    )  # fmt: skip


def down_gemv(
    act: torch.Tensor, w2: torch.Tensor, out: torch.Tensor, topk_ids: torch.Tensor,
    tile: GemvTile, *, num_experts: int, weights: torch.Tensor | None, first_expert: int = 0,
    expert_map: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Act [T * K, I], w2 [E_loc, H, I] -> out [T, H], weighted and summed over slots."""
    H, I = w2.shape[1], w2.shape[2]
    grid = (-(-H // tile.block_n), out.shape[0])
    moe_down_gemv_kernel[grid](
        act, w2, out, topk_ids, expert_map if expert_map is not None else topk_ids,
        weights if weights is not None else act,
        out.stride(0), first_expert, w2.shape[0], num_experts, H, I,
        K=topk_ids.shape[1], BLOCK_K=triton.next_power_of_2(topk_ids.shape[1]),
        BN=tile.block_n, BK=tile.block_k, STAGES=tile.num_stages,
        EVEN=I % tile.block_k == 0,
        HAS_MAP=expert_map is not None, HAS_WEIGHT=weights is not None,
        num_warps=tile.num_warps, **dependent(act, grid[0] * grid[1]),
    )  # fmt: skip
