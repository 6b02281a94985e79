"""Sum over a token's K slots, in slot order, in float32.

Receives what `grouped_gemm.down` stored by slot, returns [T, H].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def moe_combine_kernel(
    slots_ptr, ids_ptr, map_ptr, out_ptr,
    first_expert, num_local, num_experts, stride_out, H,
    K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Slots of experts that live elsewhere were never written and count as exactly zero."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + token * K + k).to(tl.int32)
        is_known = (expert >= 0) & (expert < num_experts)
        if HAS_MAP:
            local = tl.load(map_ptr + expert, mask=is_known, other=-1).to(tl.int32)
        else:
            local = tl.where(is_known, expert - first_expert, -1)
        is_here = (col < H) & (local >= 0) & (local < num_local)
        acc += tl.load(slots_ptr + (token * K + k) * H + col, mask=is_here, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * stride_out + col, acc.to(out_ptr.dtype.element_ty), mask=col < H)


def combine(
    slots: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    num_local: int,
    num_experts: int,
    first_expert: int = 0,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Sum slots to tokens.

    Args:
        slots: [T * K, H], weighted expert outputs by slot.
        topk_ids: [T, K] global ids; -1 and experts of other ranks add exactly zero.
        out: [T, H], written.
        num_local: E_loc.
        num_experts: E, global.
        first_expert: Global id of the first local expert, where there is no map.
        expert_map: [E] int32, global id -> local id or -1.
    """
    T, K = topk_ids.shape
    H = out.shape[1]
    block = min(triton.next_power_of_2(H), 1024 if T > 64 else 256)
    moe_combine_kernel[(T, triton.cdiv(H, block))](
        slots, topk_ids, expert_map if expert_map is not None else topk_ids, out,
        first_expert, num_local, num_experts, out.stride(0), H,
        K=K, BLOCK_H=block, HAS_MAP=expert_map is not None,
        num_warps=4 if block >= 512 else 2,
    )  # fmt: skip
