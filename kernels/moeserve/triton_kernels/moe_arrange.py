"""Tokens copied into the experts' order.

Receives x [T, H] and the experts' lists of slots (`router.py` or `moe_buckets.py`); writes
[T * K, H], the rows of expert 0 in the order of its list, then those of expert 1, and so on: what a
tensor descriptor can read without an index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs
from moeserve.triton_kernels.grouped_gemm import num_row_blocks
from moeserve.triton_kernels.grouped_gemm_kernels import _owner

_ROWS = 16
_COLUMNS = 512


@triton.jit
def moe_arrange_kernel(
    x_ptr, arranged_ptr, counts_ptr, buckets_ptr, bucket_stride, stride_x, num_local, H,
    K: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one expert."""
    wait_for_inputs(PDL)
    lane = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + lane, mask=lane < num_local, other=0)
    ends = tl.cumsum((counts + ROWS - 1) // ROWS, 0)
    pid = tl.program_id(0)
    if pid < tl.max(ends, 0):
        expert, first, count, offset = _owner(ends, counts, lane, pid, ROWS)
        row = first + tl.arange(0, ROWS)
        bucket_ptr = buckets_ptr + expert.to(tl.int64) * bucket_stride
        slot = tl.load(bucket_ptr + row, mask=row < count, other=0)
        source = x_ptr + (slot // K).to(tl.int64)[:, None] * stride_x
        target = arranged_ptr + (offset + row).to(tl.int64)[:, None] * H
        for h in range(0, H, BLOCK_H):
            hh = h + tl.arange(0, BLOCK_H)[None, :]
            is_in = (row < count)[:, None] & (hh < H)
            tl.store(target + hh, tl.load(source + hh, mask=is_in), mask=is_in)


def arrange(
    x: torch.Tensor,
    arranged: torch.Tensor,
    buckets: tuple[torch.Tensor, torch.Tensor],
    *,
    top_k: int,
) -> None:
    """Copy the tokens.

    Args:
        x: [T, H], rows may be strided.
        arranged: [T * K, H], written for every slot listed in `buckets`.
        buckets: (counts [E_loc], slots [E_loc, >= T * K]).
        top_k: K.
    """
    counts, slots = buckets
    T, H = x.shape
    programs = num_row_blocks(T * top_k, counts.shape[0], _ROWS)
    moe_arrange_kernel[(programs,)](
        x, arranged, counts, slots, slots.stride(0), x.stride(0), counts.shape[0], H,
        K=top_k, BLOCK_E=triton.next_power_of_2(counts.shape[0]), ROWS=_ROWS, BLOCK_H=_COLUMNS,
        num_warps=4, **dependent(x, programs),
    )  # fmt: skip
