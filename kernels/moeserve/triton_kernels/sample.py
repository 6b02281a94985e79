"""Greedy choice on the device: logits [R, V] -> the largest one's id, ties to the lowest id.

Receives logits in any float type; writes ids for the host and, by block-table row, for the next
step, which reads them without the host. A row with a NaN or without a finite value gets id -1.
Everything else that a request may ask for is `runner/sampler.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs

_NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def argmax_part_kernel(
    logits_ptr, best_ptr, index_ptr, stride_r, V, part_size,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Largest value of one part of a row; a NaN counts as +inf, which the caller calls bad."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * part_size
    last = tl.minimum(first + part_size, V)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.full([BLOCK], _NO_COLUMN, tl.int32)
    for start in range(first, last, BLOCK):
        col = start + lane
        value = tl.load(logits_ptr + row * stride_r + col, mask=col < last, other=float("-inf"))
        value = value.to(tl.float32)
        value = tl.where(value != value, float("inf"), value)
        # Strictly larger: of equal values the first column stays.
        is_better = value > best
        best = tl.where(is_better, value, best)
        index = tl.where(is_better, col, index)
    top = tl.max(best, 0)
    column = tl.min(tl.where(best == top, index, _NO_COLUMN), 0)
    tl.store(best_ptr + row * NUM_PARTS + part, top)
    tl.store(index_ptr + row * NUM_PARTS + part, column)


@triton.jit
def argmax_merge_kernel(
    best_ptr, index_ptr, rows_ptr, tokens_ptr, last_ptr,
    NUM_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row's parts -> its id, for the host and for the next step."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, NUM_PARTS)
    best = tl.load(best_ptr + row * NUM_PARTS + part)
    index = tl.load(index_ptr + row * NUM_PARTS + part)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, index, _NO_COLUMN), 0)
    is_bad = (top == float("inf")) | (top == float("-inf"))
    tl.store(tokens_ptr + row, tl.where(is_bad, -1, token))
    place = tl.load(rows_ptr + row)
    tl.store(last_ptr + place, tl.where(is_bad, 0, token), mask=place >= 0)


def argmax(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """Choose the largest logit of each row.

    Args:
        logits: [R, V], rows may be strided.
        rows: [R] int32, place of each row in `last_tokens`; -1 for a row of padding.
        tokens: [at least R] int32, receives ids; -1 where no logit means anything.
        last_tokens: [max_num_seqs] int32, receives the same ids by place.
    """
    R, V = logits.shape
    if R == 0:
        return
    # About a thousand programs, so that few rows still use the whole card, of some size each.
    num_parts = min(64, triton.next_power_of_2(max(1, min(1024 // R, V // 2048))))
    part_size = triton.cdiv(triton.cdiv(V, num_parts), 16) * 16
    best = torch.empty(R, num_parts, dtype=torch.float32, device=logits.device)
    index = torch.empty(R, num_parts, dtype=torch.int32, device=logits.device)
    argmax_part_kernel[(R, num_parts)](
        logits, best, index, logits.stride(0), V, part_size,
        NUM_PARTS=num_parts, BLOCK=min(2048, triton.next_power_of_2(part_size)), num_warps=4,
        **dependent(logits),
    )  # fmt: skip
    argmax_merge_kernel[(R,)](
        best, index, rows, tokens, last_tokens, NUM_PARTS=num_parts, num_warps=1,
        **dependent(logits),
    )  # fmt: skip
