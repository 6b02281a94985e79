"""Dense products of few columns, such as a router's gate, for a decode batch.

Receives x [T, K] and a weight [N, K]; returns [T, N]. A library gives half a megabyte of weights to
a handful of programs (5.4 us for T = 128, N = 128, K = 2048 on an H200); small tiles make 64 of
them. Deterministic mode has `linear.py`, a handful of rows `gemv_dense.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs

# Where a library's tiles are as many.
MAX_ROWS = 256
MAX_COLUMNS = 512
# BM, BN, BK, warps, stages.
TILE = (16, 16, 256, 2, 4)


@triton.jit
def prefetch_rows(ptr, N, K, n, first, last, STEP: tl.constexpr):
    """Ask for columns first.. to last of the rows n of a 2-byte weight, into the L2 alone."""
    lane = tl.arange(0, STEP)
    for start in range(first, last, STEP * 64):
        k = start + lane * 64
        at = ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.minimum(k, K - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def linear_narrow_kernel(
    x_ptr, w_ptr, out_ptr, T, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of BM rows."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    if PREFETCH:
        prefetch_rows(w_ptr, N, K, col, 0, K, 4)
    wait_for_inputs(PDL)
    # Rows and columns past the end read the last valid one; their results are not stored.
    x_row = x_ptr + tl.minimum(row, T - 1).to(tl.int64)[:, None] * stride_x
    w_row = w_ptr + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = (start + tl.arange(0, BK))[None, :]
        if EVEN_K:
            x = tl.load(x_row + k)
            w = tl.load(w_row + k)
        else:
            x = tl.load(x_row + k, mask=k < K, other=0.0)
            w = tl.load(w_row + k, mask=k < K, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * N + col[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(row < T)[:, None] & (col < N)[None, :],
    )


def is_narrow(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear_narrow` is the faster form of x [T, K] @ weight [N, K].T."""
    return x.shape[0] <= MAX_ROWS and weight.shape[0] <= MAX_COLUMNS and x.element_size() == 2


def linear_narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X @ weight.T.

    Args:
        x: [T, K], rows may be strided.
        weight: [N, K] contiguous.

    Returns:
        [T, N] in x's dtype.
    """
    (T, K), N = x.shape, weight.shape[0]
    out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    BM, BN, BK, warps, stages = TILE
    if T:
        options = dependent(x)
        linear_narrow_kernel[(triton.cdiv(N, BN), triton.cdiv(T, BM))](
            x, weight, out, T, N, K, x.stride(0),
            BM=BM, BN=BN, BK=BK, EVEN_K=K % BK == 0, UPCAST=not x.is_cuda,
            PREFETCH=options["PDL"] and x.element_size() == 2,
            num_warps=warps, num_stages=stages, **options,
        )  # fmt: skip
    return out
