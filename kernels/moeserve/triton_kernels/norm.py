"""Residual add with root-mean-square norm, and the embedding look-up that starts a step.

Receives rows [T, H]; `add_norm` updates the residual stream in place and returns the normalised
rows, `embed` turns token ids into rows. What is added may still be a sum to be taken: the slots of
an expert layer (`combine.SlotSum`). Sums are float32 in one fixed order a row, so a row's bits do
not depend on the batch. The torch form for CPUs is `layers/norm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.combine import SlotSum, sum_of_slots
from moeserve.triton_kernels.dependent import dependent, only_wait_for_inputs, wait_for_inputs

# Up to this many rows, a program each, there is room beside them for the kernel behind to start: a
# step of 1, 8, 32, 64 and 96 rows gains 1.4 (deterministic), 0.4, 0.2, 0.2 and 0.1 % by it, one of
# 128 loses 0.7 % (H200).
MAX_EARLY_ROWS = 96


@triton.jit
def add_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, stride_x, H, eps,
    ids_ptr, map_ptr, counts_ptr, first_expert, num_local, num_experts,
    BLOCK: tl.constexpr, HAS_ADD: tl.constexpr, SLOTS: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_MAP: tl.constexpr, BLOCK_E: tl.constexpr, IS_EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: residual += x (where HAS_ADD), out = residual / rms * weight.

    SLOTS: slots of a token in x, which are summed; 0 where x holds rows.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    is_in = col < H
    weight = tl.load(weight_ptr + col, mask=is_in, other=0.0).to(tl.float32)
    if IS_EARLY:
        wait_for_inputs(PDL)
    else:
        only_wait_for_inputs(PDL)
    if SLOTS == 0:
        value = tl.load(x_ptr + row * stride_x + col, mask=is_in, other=0.0).to(tl.float32)
    else:
        value = sum_of_slots(
            x_ptr, ids_ptr, map_ptr, row, col, first_expert, num_local, num_experts, H,
            SLOTS, BLOCK, HAS_MAP, IS_WHOLE,
        )  # fmt: skip
        if BLOCK_E > 0 and row == 0:
            # Nobody reads them any more, and the next router counts from zero.
            lane = tl.arange(0, BLOCK_E)
            tl.store(counts_ptr + lane, tl.zeros([BLOCK_E], tl.int32), mask=lane < num_local)
        # Rounded as the rows of the unfused form are.
        value = value.to(out_ptr.dtype.element_ty).to(tl.float32)
    if HAS_ADD:
        value += tl.load(residual_ptr + row * H + col, mask=is_in, other=0.0).to(tl.float32)
        # The stream is kept in the model's dtype, and the norm sees what is kept.
        kept = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * H + col, kept, mask=is_in)
        value = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    out = value * scale * weight
    tl.store(out_ptr + row * H + col, out.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def embed_kernel(
    ids_ptr, last_ptr, table_ptr, out_ptr, V, H, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One row of the table; id -1 - r stands for the token that row r of `last` holds."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row).to(tl.int32)
    pending = tl.load(last_ptr + tl.where(token < 0, -1 - token, 0)).to(tl.int32)
    token = tl.where(token < 0, pending, token)
    # A row of padding may hold anything; it must not read outside the table.
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    col = tl.arange(0, BLOCK)
    value = tl.load(table_ptr + token.to(tl.int64) * H + col, mask=col < H, other=0.0)
    tl.store(out_ptr + row * H + col, value, mask=col < H)


def add_norm(
    x: torch.Tensor | SlotSum,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Normalise rows, after adding them to the residual stream.

    Args:
        x: [T, H]; rows may be strided. Or a sum that is taken here.
        residual: [T, H] contiguous, receives `residual + x`; None normalises x alone.
        weight: [H].
        eps: Added to the mean square.

    Returns:
        [T, H] in the weight's dtype.
    """
    T, H = x.shape
    out = torch.empty(T, H, dtype=weight.dtype, device=weight.device)
    if not T:
        return out
    block = triton.next_power_of_2(H)
    num_slots, is_whole = 0, False
    ids, owner = out, (0, 0, 0)
    expert_map = counts = None
    if isinstance(x, SlotSum):
        rows, num_slots, is_whole, ids = x.slots, x.topk_ids.shape[1], x.is_whole, x.topk_ids
        owner, expert_map = (x.first_expert, x.num_local, x.num_experts), x.expert_map
        counts = x.counts
    else:
        rows = x
    add_norm_kernel[(T,)](
        rows, residual if residual is not None else out, weight, out, rows.stride(0), H, eps,
        ids, expert_map if expert_map is not None else ids,
        counts if counts is not None else ids, *owner,
        BLOCK=block, HAS_ADD=residual is not None, SLOTS=num_slots, IS_WHOLE=is_whole,
        HAS_MAP=expert_map is not None,
        BLOCK_E=0 if counts is None else triton.next_power_of_2(counts.shape[0]),
        IS_EARLY=T <= MAX_EARLY_ROWS,
        num_warps=_num_warps(block), **dependent(out),
    )  # fmt: skip
    return out


def embed(ids: torch.Tensor, last_tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up rows.

    Args:
        ids: [T] int32 or int64; -1 - r means `last_tokens[r]`, a token not yet known to the host.
        last_tokens: [max_num_seqs] int32.
        table: [V, H].

    Returns:
        [T, H].
    """
    T, (V, H) = ids.shape[0], table.shape
    out = torch.empty(T, H, dtype=table.dtype, device=table.device)
    if T:
        block = triton.next_power_of_2(H)
        embed_kernel[(T,)](
            ids, last_tokens, table, out, V, H, BLOCK=block, num_warps=_num_warps(block),
            **dependent(out),
        )  # fmt: skip
    return out


def _num_warps(block: int) -> int:
    """Sixteen values a thread, two loads of 16 bytes in bfloat16."""
    return min(8, max(1, block // 512))
