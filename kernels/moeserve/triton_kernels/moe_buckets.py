"""Each local expert's list of slots, from ids that another router made.

Receives `topk_ids` [T, K], fills counts [E_loc] and slots [E_loc, >= T * K], which the grouped
GEMMs read. Up to `SCAN_SLOTS` slots a program for each expert looks through all ids: one launch,
ascending lists, no counters to clear. Beyond, a program for each piece of the ids counts with
atomics. The router of this project lists slots itself (`router.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs

# Where E scans of all ids begin to cost more than clearing and counting (about 3 us on an H200).
SCAN_SLOTS = 8192
_SCAN_BLOCK = 2048
_COUNT_BLOCK = 128


@triton.jit
def _local_ids(
    ids_ptr, map_ptr, slot, num_slots, first_expert, num_local, num_experts, HAS_MAP: tl.constexpr
):
    """Local expert of each slot, -1 where it lives elsewhere or the id is nobody's."""
    expert = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int32)
    is_known = (expert >= 0) & (expert < num_experts)
    if HAS_MAP:
        local = tl.load(map_ptr + expert, mask=is_known, other=-1).to(tl.int32)
    else:
        local = tl.where(is_known, expert - first_expert, -1)
    return tl.where((local >= 0) & (local < num_local), local, -1)


@triton.jit(do_not_specialize=["num_slots", "bucket_stride", "first_expert"])
def moe_bucket_scan_kernel(
    ids_ptr, map_ptr, counts_ptr, buckets_ptr,
    num_slots, bucket_stride, first_expert, num_local, num_experts,
    HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert's slots in ascending order, and how many there are."""
    wait_for_inputs(PDL)
    mine = tl.program_id(0)
    bucket_ptr = buckets_ptr + mine.to(tl.int64) * bucket_stride
    count = 0
    for start in range(0, num_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        local = _local_ids(
            ids_ptr, map_ptr, slot, num_slots, first_expert, num_local, num_experts, HAS_MAP
        )
        is_mine = local == mine
        taken = is_mine.to(tl.int32)
        place = count + tl.cumsum(taken, 0) - taken
        tl.store(bucket_ptr + place, slot, mask=is_mine)
        count += tl.sum(taken, 0)
    tl.store(counts_ptr + mine, count)


@triton.jit(do_not_specialize=["num_slots", "bucket_stride", "first_expert"])
def moe_bucket_kernel(
    ids_ptr, map_ptr, counts_ptr, buckets_ptr,
    num_slots, bucket_stride, first_expert, num_local, num_experts,
    HAS_MAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK slots into the lists of their experts, at places that atomic counters hand out."""
    wait_for_inputs(PDL)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = _local_ids(
        ids_ptr, map_ptr, slot, num_slots, first_expert, num_local, num_experts, HAS_MAP
    )
    rank = tl.atomic_add(counts_ptr + local, 1, mask=local >= 0, sem="relaxed")
    at = local.to(tl.int64) * bucket_stride + rank
    tl.store(buckets_ptr + at, slot.to(tl.int32), mask=local >= 0)


def fill_buckets(
    topk_ids: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_experts: int,
    first_expert: int = 0,
    expert_map: torch.Tensor | None = None,
) -> None:
    """List the slots of each local expert from given ids.

    Args:
        topk_ids: [T, K] int32 or int64, contiguous; -1 belongs to nobody.
        counts: [E_loc] int32, overwritten with the number of slots of each expert.
        slots: [E_loc, at least T * K] int32; the first `counts[e]` of row e are filled.
        num_experts: E, global.
        first_expert: Global id of the first local expert, where there is no map.
        expert_map: [E] int32, global id -> local id or -1.
    """
    num_slots, num_local = topk_ids.numel(), counts.shape[0]
    if num_slots == 0 or num_local == 0:
        counts.zero_()
        return
    args = (
        topk_ids, expert_map if expert_map is not None else topk_ids, counts, slots,
        num_slots, slots.stride(0), first_expert, num_local, num_experts,
    )  # fmt: skip
    options = {"HAS_MAP": expert_map is not None, **dependent(topk_ids)}
    if num_slots <= SCAN_SLOTS:
        block = max(128, min(_SCAN_BLOCK, triton.next_power_of_2(num_slots)))
        moe_bucket_scan_kernel[(num_local,)](*args, BLOCK=block, num_warps=4, **options)
        return
    counts.zero_()
    grid = (triton.cdiv(num_slots, _COUNT_BLOCK),)
    moe_bucket_kernel[grid](*args, BLOCK=_COUNT_BLOCK, num_warps=1, **options)
