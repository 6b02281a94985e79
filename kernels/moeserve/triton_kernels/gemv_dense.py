"""Dense projections of a handful of tokens, with the residual add and norm before them inside.

Receives rows [T, K] and a weight [N, K]; returns [T, N]. With so few rows a product is the reading
of its weight once, and a launch costs as much as a small weight's reading: every program repeats
the norm of the rows, which is cheaper than a launch for it. Many rows: the library, or
`linear.py` in deterministic mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs

# Rows up to which this is the faster form; each is unrolled in the kernel.
MAX_ROWS = 4


@triton.jit
def dense_gemv_kernel(
    x_ptr, residual_ptr, norm_ptr, w_ptr, bias_ptr, out_ptr, stream_ptr, normed_ptr,
    N, K, stride_x, eps,
    T: tl.constexpr, BN: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ADD: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of every row; program 0 also keeps the stream and the normed rows."""
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    k = tl.arange(0, BLOCK_K)
    is_k = k < K
    w_row = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    # Asked for before anything else, because everything waits for it; the rows may still be in
    # the making.
    is_in = (n < N)[:, None] & is_k[None, :]
    w = tl.load(w_row) if EVEN else tl.load(w_row, mask=is_in, other=0.0)
    wait_for_inputs(PDL)
    for t in tl.static_range(T):
        x = tl.load(x_ptr + t * stride_x + k, mask=is_k, other=0.0).to(tl.float32)
        if HAS_ADD:
            x += tl.load(residual_ptr + t * K + k, mask=is_k, other=0.0).to(tl.float32)
            kept = x.to(stream_ptr.dtype.element_ty)
            tl.store(stream_ptr + t * K + k, kept, mask=is_k & (pid == 0))
            x = kept.to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
            x *= scale * tl.load(norm_ptr + k, mask=is_k, other=0.0).to(tl.float32)
            # Rounded as the rows of the unfused form are.
            normed = x.to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + t * K + k, normed, mask=is_k & (pid == 0))
            x = normed.to(tl.float32)
        out = tl.sum(w.to(tl.float32) * x[None, :], 1)
        if HAS_BIAS:
            out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + t * N + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


@dataclass(frozen=True)
class Norm:
    """Weight [K] and eps of the norm before a projection."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Normed:
    """What a projection with a norm gives.

    Attributes:
        out: [T, N].
        normed: [T, K], the rows that were projected.
        stream: [T, K], the residual stream after the addition.
    """

    out: torch.Tensor
    normed: torch.Tensor
    stream: torch.Tensor


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows x [T, K] @ weight [N, K].T + bias for T up to `MAX_ROWS`; rows of x may be strided."""
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, None, None, weight, bias, (out, out, out))
    return out


def norm_gemv(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Normed:
    """Add to the stream, normalise, project.

    Args:
        x: [T, K], added to the stream; None where there is nothing to add.
        residual: [T, K] contiguous, the stream; not written to.
        norm: The norm.
        weight: [N, K].
        bias: [N].
    """
    out = torch.empty(
        residual.shape[0], weight.shape[0], dtype=residual.dtype, device=residual.device
    )
    normed = torch.empty_like(residual)
    stream = residual if x is None else torch.empty_like(residual)
    rows = residual if x is None else x
    _launch(rows, None if x is None else residual, norm, weight, bias, (out, stream, normed))
    return Normed(out, normed, stream)


def shape_of(N: int, block_k: int) -> tuple[int, int]:
    """Columns and warps of a program: about sixty values of the weight a thread."""
    # One column a program where columns are few.
    block_n = 1 if N <= 256 else max(1, min(8, 16384 // block_k))
    return block_n, max(1, min(8, block_n * block_k // 2048))


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    (T, K), N = x.shape, weight.shape[0]
    if T > MAX_ROWS:
        raise ValueError(f"{T} rows: this form is for at most {MAX_ROWS}")
    block_k = triton.next_power_of_2(K)
    block_n, warps = shape_of(N, block_k)
    dense_gemv_kernel[(triton.cdiv(N, block_n),)](
        x, residual if residual is not None else x, norm.weight if norm else x,
        weight, bias if bias is not None else x, *results,
        N, K, x.stride(0), norm.eps if norm else 0.0,
        T=T, BN=block_n, BLOCK_K=block_k, EVEN=N % block_n == 0 and block_k == K,
        HAS_NORM=norm is not None, HAS_ADD=residual is not None, HAS_BIAS=bias is not None,
        num_warps=warps, **dependent(x),
    )  # fmt: skip
