"""Sum over a token's K slots, in slot order, in float32.

Receives what `grouped_gemm.down` stored by slot, returns [T, H]. Where a norm follows on the same
rank, the sum travels as a `SlotSum` and `norm.add_norm` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs


@triton.jit
def sum_of_slots(
    slots_ptr, ids_ptr, map_ptr, token, col, first_expert, num_local, num_experts, H,
    K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_MAP: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Columns `col` of one token [BLOCK_H] float32.

    Slots of experts that live elsewhere were never written and count as exactly zero; where
    IS_WHOLE there are none, and nothing waits for the ids.
    """
    acc = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(K):
        is_here = col < H
        if not IS_WHOLE:
            expert = tl.load(ids_ptr + token * K + k).to(tl.int32)
            is_known = (expert >= 0) & (expert < num_experts)
            if HAS_MAP:
                local = tl.load(map_ptr + expert, mask=is_known, other=-1).to(tl.int32)
            else:
                local = tl.where(is_known, expert - first_expert, -1)
            is_here = is_here & (local >= 0) & (local < num_local)
        acc += tl.load(slots_ptr + (token * K + k) * H + col, mask=is_here, other=0.0).to(
            tl.float32
        )
    return acc


@triton.jit
def moe_combine_kernel(
    slots_ptr, ids_ptr, map_ptr, out_ptr,
    first_expert, num_local, num_experts, stride_out, H,
    K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_MAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of columns of one token."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = sum_of_slots(
        slots_ptr, ids_ptr, map_ptr, token, col, first_expert, num_local, num_experts, H,
        K, BLOCK_H, HAS_MAP, False,
    )  # fmt: skip
    tl.store(out_ptr + token * stride_out + col, acc.to(out_ptr.dtype.element_ty), mask=col < H)


@dataclass(frozen=True)
class SlotSum:
    """An expert layer's result whose slots are still to be summed.

    Attributes:
        slots: [T * K, H], weighted expert outputs by slot; scratch that the next layer overwrites.
        topk_ids: [T, K] global ids; -1 and experts of other ranks add exactly zero.
        num_local: E_loc.
        num_experts: E, global.
        first_expert: Global id of the first local expert, where there is no map.
        expert_map: [E] int32, global id -> local id or -1.
        counts: [E_loc] int32, the layer's slots by expert; whoever takes the sum clears them, for
            the layer that follows.
        is_whole: Every slot was written: the ids are a router's, and all experts are here.
    """

    slots: torch.Tensor
    topk_ids: torch.Tensor
    num_local: int
    num_experts: int
    first_expert: int = 0
    expert_map: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    is_whole: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(T, H) of the sum."""
        return self.topk_ids.shape[0], self.slots.shape[1]


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
        slots: As for `SlotSum`, and so for the others.
        topk_ids: [T, K].
        out: [T, H], written.
        num_local: E_loc.
        num_experts: E.
        first_expert: Where there is no map.
        expert_map: [E] int32.
    """
    T, K = topk_ids.shape
    H = out.shape[1]
    block = min(triton.next_power_of_2(H), 1024 if T > 64 else 256)
    moe_combine_kernel[(T, triton.cdiv(H, block))](
        slots, topk_ids, expert_map if expert_map is not None else topk_ids, out,
        first_expert, num_local, num_experts, out.stride(0), H,
        K=K, BLOCK_H=block, HAS_MAP=expert_map is not None,
        num_warps=4 if block >= 512 else 2, **dependent(out, T * -(-H // block)),
    )  # fmt: skip
