"""Dense projections whose bits do not depend on how many rows there are.

Receives x [T, K] and a weight [N, K]; returns [T, N]. A library picks another algorithm for another
T; this is what deterministic mode uses in its place. float32 sums in ascending K blocks, unsplit.
The weights fill the M side of the instruction, tokens its N side: a larger T lets more tokens share
an instruction and changes no element's chain of sums (tested bit for bit on a GPU).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, T, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """BM rows by BN columns; GROUP row blocks run side by side, so weights stay in L2."""
    num_m = tl.cdiv(T, BM)
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    width = GROUP * num_n
    group = (pid // width) * GROUP
    size = tl.minimum(num_m - group, GROUP)
    row = (group + (pid % width) % size) * BM + tl.arange(0, BM)
    col = ((pid % width) // size) * BN + tl.arange(0, BN)
    # Rows and columns past the end read the last valid one; their results are not stored.
    x_row = x_ptr + tl.minimum(row, T - 1).to(tl.int64)[:, None] * stride_x
    w_row = w_ptr + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for first in range(0, K, BK):
        k = (first + tl.arange(0, BK))[None, :]
        if EVEN_K:
            x = tl.load(x_row + k)
            w = tl.load(w_row + k)
        else:
            x = tl.load(x_row + k, mask=k < K, other=0.0)
            w = tl.load(w_row + k, mask=k < K, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * N + col[None, :],
        tl.trans(acc.to(out_ptr.dtype.element_ty)),
        mask=(row < T)[:, None] & (col < N)[None, :],
    )


def _tile(T: int, N: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """BM, BN, BK, warps and stages."""
    if itemsize > 2:
        # float32 has no warpgroup form of this: one tile for every T.
        return 64, 64, 64, 4, 3
    if N <= 512:
        # A router's gate: small tiles for every T, or it would be a handful of programs.
        return 16, 16, 128, 2, 4
    if T <= 16:
        return 16, 64, 128, 4, 4
    if T <= 64:
        return 64, 64, 128, 4, 4
    return (128, 64, 64, 4, 4) if T <= 256 else (128, 128, 64, 8, 4)


def linear_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """X @ weight.T + bias.

    Args:
        x: [T, K], rows may be strided.
        weight: [N, K] contiguous.
        bias: [N].
        out: [T, N] contiguous, allocated where absent.

    Returns:
        [T, N] in x's dtype.
    """
    T, K = x.shape
    N = weight.shape[0]
    if out is None:
        out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    BM, BN, BK, warps, stages = _tile(T, N, x.element_size())
    linear_kernel[(triton.cdiv(T, BM) * triton.cdiv(N, BN),)](
        x, weight, bias if bias is not None else x, out, T, N, K, x.stride(0),
        BM=BM, BN=BN, BK=BK, GROUP=8, EVEN_K=K % BK == 0, HAS_BIAS=bias is not None,
        UPCAST=not x.is_cuda, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
