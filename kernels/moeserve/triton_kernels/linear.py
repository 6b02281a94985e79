"""Dense projections whose bits do not depend on how many rows there are.

Receives x [T, K] and a weight [N, K]; returns [T, N]. A library picks another algorithm for another
T; this is what deterministic mode uses in its place. An element is the sum of S parts of K, in
order; a part is one chain of float32 sums in ascending steps. S follows from the weight's shape
alone. For few rows the parts are programs of their own, and the last of them to finish adds them
up; for many a program goes through all of them: who computes a part changes nothing.
The weights fill the M side of the instruction, tokens its N side: a larger T lets more tokens share
an instruction and changes no element's chain of sums (tested bit for bit on a GPU).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs
from moeserve.triton_kernels.linear_narrow import prefetch_rows

# Up to this many rows the parts are programs of their own.
MAX_SPLIT_ROWS = 256
# Programs of one row block that fill the card.
_PROGRAMS = 160
# Of an H100 or H200: up to this many programs each has a multiprocessor's shared memory to itself.
_MULTIPROCESSORS = 132
# A router's gate is this narrow, and gets narrow tiles.
_NARROW = 512
_LEAST_DEPTH = 256


@triton.jit
def _part_sum(
    x_row, w_row, first, last, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """[BN, BM] over columns first.. to last."""
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(first, last, BK):
        k = (start + tl.arange(0, BK))[None, :]
        if EVEN_K:
            x = tl.load(x_row + k)
            w = tl.load(w_row + k)
        else:
            x = tl.load(x_row + k, mask=k < last, other=0.0)
            w = tl.load(w_row + k, mask=k < last, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(
    total, bias_ptr, out_ptr, row, col, T, N, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * N + col[None, :],
        tl.trans(total.to(out_ptr.dtype.element_ty)),
        mask=(row < T)[:, None] & (col < N)[None, :],
    )


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, T, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BM rows by BN columns; GROUP row blocks run side by side, so weights stay in L2."""
    wait_for_inputs(PDL)
    num_m = tl.cdiv(T, BM)
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    width = GROUP * num_n
    group = (pid // width) * GROUP
    height = tl.minimum(num_m - group, GROUP)
    row = (group + (pid % width) % height) * BM + tl.arange(0, BM)
    col = ((pid % width) // height) * BN + tl.arange(0, BN)
    # Rows and columns past the end read the last valid one; their results are not stored.
    x_row = x_ptr + tl.minimum(row, T - 1).to(tl.int64)[:, None] * stride_x
    w_row = w_ptr + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K
    # A multiple of every BK where there are parts; said so that loads are known to be aligned.
    size = tl.cdiv(tl.cdiv(K, PARTS), BK) * BK
    total = tl.zeros([BN, BM], tl.float32)
    for part in range(PARTS):
        last = tl.minimum((part + 1) * size, K)
        total += _part_sum(x_row, w_row, part * size, last, BN, BM, BK, EVEN_K, UPCAST)
    _finish(total, bias_ptr, out_ptr, row, col, T, N, HAS_BIAS)


@triton.jit(do_not_specialize=["T"])
def linear_parts_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, parts_ptr, tickets_ptr, T, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of BM rows by BN columns; the last part to finish adds all of them up in order."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    # A multiple of every BK where there are parts; said so that loads are known to be aligned.
    size = tl.cdiv(tl.cdiv(K, PARTS), BK) * BK
    first = part * size
    last = tl.minimum(first + size, K)
    if PREFETCH:
        prefetch_rows(w_ptr, N, K, col, first, last, 4)
    wait_for_inputs(PDL)
    x_row = x_ptr + tl.minimum(row, T - 1).to(tl.int64)[:, None] * stride_x
    w_row = w_ptr + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K
    acc = _part_sum(x_row, w_row, first, last, BN, BM, BK, EVEN_K, UPCAST)
    at = parts_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    is_in = (row < T)[:, None] & (col < N)[None, :]
    stride = T.to(tl.int64) * N
    tl.store(at + part * stride, tl.trans(acc), mask=is_in)
    # Every thread's part is stored before the ticket is taken.
    tl.debug_barrier()
    ticket = tickets_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        tl.store(ticket, 0)
        total = tl.zeros([BM, BN], tl.float32)
        for i in range(PARTS):
            total += tl.load(at + i * stride, mask=is_in, other=0.0, cache_modifier=".cg")
        _finish(tl.trans(total), bias_ptr, out_ptr, row, col, T, N, HAS_BIAS)


def _tile(T: int, N: int, K: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """BM, BN, BK, warps and stages; measured on an H200 with Qwen3-30B-A3B's projections."""
    if itemsize > 2:
        # float32 has no warpgroup form of this: one tile for every T.
        return 64, 64, 64, 4, 3
    if N <= _NARROW:
        # A router's gate: small tiles for every T, or it would be a handful of programs.
        return (16, 16, 128, 4, 4) if T <= 16 else (16, 16, 128 if T <= 64 else 64, 2, 3)
    # Alone on a multiprocessor a program hides its reads with depth, else with its neighbours.
    is_alone = -(-N // 64) * num_parts(N, K) <= _MULTIPROCESSORS
    if T <= 16:
        return (16, 64, 128, 4, 6) if is_alone else (16, 128, 64, 8, 6)
    if T <= 64:
        return 64, 64, 128, 4, 4 if is_alone else 3
    if T <= MAX_SPLIT_ROWS:
        return 128, 64, 128 if is_alone else 64, 4, 4
    return 128, 128, 64, 8, 4


def num_parts(N: int, K: int) -> int:
    """S: enough parts that one row block fills the card, each at least `_LEAST_DEPTH` deep."""
    tiles = -(-N // (16 if N <= _NARROW else 64))
    parts = 1
    while tiles * parts * 2 <= _PROGRAMS and K % (parts * 2 * _LEAST_DEPTH) == 0:
        parts *= 2
    return parts


class FixedProjection:
    """`linear_fixed` with counters of its own, so that calls need no memory cleared."""

    def __init__(self, device: torch.device) -> None:
        # Here and not at the first call: inside a capture nothing would be zeroed until a replay.
        self._tickets = new_tickets(device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `linear_fixed`."""
        return linear_fixed(x, weight, bias, out, self._tickets)


def new_tickets(device: torch.device) -> torch.Tensor:
    """Counters for every tile of a split product: zero before and after each call."""
    # Where a product has parts, its row block has at most half of _PROGRAMS tiles.
    most = _PROGRAMS // 2 * (MAX_SPLIT_ROWS // 16)
    return torch.zeros(most, dtype=torch.int32, device=device)


def linear_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """X @ weight.T + bias.

    Args:
        x: [T, K], rows may be strided.
        weight: [N, K] contiguous.
        bias: [N].
        out: [T, N] contiguous, allocated where absent.
        tickets: From `new_tickets`, of nobody else at the same time; made where absent.

    Returns:
        [T, N] in x's dtype.
    """
    T, K = x.shape
    N = weight.shape[0]
    if out is None:
        out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    BM, BN, BK, warps, stages = _tile(T, N, K, x.element_size())
    parts = num_parts(N, K)
    options = dependent(x)
    num_m, num_n = triton.cdiv(T, BM), triton.cdiv(N, BN)
    is_even = K % (parts * BK) == 0
    if parts > 1 and T <= MAX_SPLIT_ROWS:
        sums = torch.empty(parts, T, N, dtype=torch.float32, device=x.device)
        linear_parts_kernel[(num_n, parts, num_m)](
            x, weight, bias if bias is not None else x, out, sums,
            tickets if tickets is not None else new_tickets(x.device), T, N, K, x.stride(0),
            BM=BM, BN=BN, BK=BK, PARTS=parts, EVEN_K=is_even, HAS_BIAS=bias is not None,
            UPCAST=not x.is_cuda, PREFETCH=options["PDL"] and x.element_size() == 2,
            num_warps=warps, num_stages=stages, **options,
        )  # fmt: skip
        return out
    linear_kernel[(num_m * num_n,)](
        x, weight, bias if bias is not None else x, out, T, N, K, x.stride(0),
        BM=BM, BN=BN, BK=BK, GROUP=8, PARTS=parts, EVEN_K=is_even, HAS_BIAS=bias is not None,
        UPCAST=not x.is_cuda, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    return out
