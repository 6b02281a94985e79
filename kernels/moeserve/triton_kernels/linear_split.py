"""Dense products of a decode batch, cut over K so that a small weight still fills the card.

Receives x [T, K] and a weight [N, K]; returns `Parts` [S, T, N] float32, whose sum over S is the
product: whoever reads it next (`norm.add_norm`, `attention_decode.py`) takes the sum in order of
the parts while it reads. The weights fill the M side of the instruction and are read once. A
library's product of this size runs at 1.7 to 2.6 times the reading of its weight (H200, T = 128).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs


@dataclass(frozen=True)
class SplitTile:
    """BN columns (rows of the weight) by BM tokens, K in S parts of steps of BK."""

    block_n: int
    block_m: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Parts:
    """A product as a sum to be taken.

    Attributes:
        values: [S, T, N] float32.
    """

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(T, N) of the sum."""
        return self.values.shape[1], self.values.shape[2]


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
def linear_split_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, T, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of BM rows over one part of K; EVEN: BN divides N and every part is whole BKs."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    size = tl.cdiv(tl.cdiv(K, PARTS), BK) * BK
    first = part * size
    last = tl.minimum(first + size, K)
    if PREFETCH:
        prefetch_rows(w_ptr, N, K, col, first, last, 4)
    wait_for_inputs(PDL)
    # Rows and columns past the end read the last valid one; their results are not stored.
    x_row = x_ptr + tl.minimum(row, T - 1).to(tl.int64)[:, None] * stride_x
    w_row = w_ptr + tl.minimum(col, N - 1).to(tl.int64)[:, None] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(first, last, BK):
        k = (start + tl.arange(0, BK))[None, :]
        if EVEN:
            x = tl.load(x_row + k)
            w = tl.load(w_row + k)
        else:
            x = tl.load(x_row + k, mask=k < last, other=0.0)
            w = tl.load(w_row + k, mask=k < last, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)
        acc += tl.where(part == 0, bias, 0.0)[:, None]
    at = (part.to(tl.int64) * T + row)[:, None] * N + col[None, :]
    tl.store(
        out_ptr + at,
        tl.trans(acc.to(out_ptr.dtype.element_ty)),
        mask=(row < T)[:, None] & (col < N)[None, :],
    )


# Rows up to which these products are faster than a library's.
MAX_ROWS = 256
# Programs that fill the card, about one for each multiprocessor.
_PROGRAMS = 128


def tile_for(T: int, weight: torch.Tensor) -> SplitTile | None:
    """The tile for T rows; None where the library is as good.

    Args:
        T: Rows.
        weight: [N, K].
    """
    N, K = weight.shape
    if not weight.is_cuda or weight.element_size() != 2 or T > MAX_ROWS or N > 8192 or K < 1024:
        return None
    parts = 1
    while -(-N // 64) * parts * 2 <= _PROGRAMS * 5 // 4 and K % (parts * 2 * 256) == 0:
        parts *= 2
    return SplitTile(64, 64 if T <= 64 else 128, 64, parts, 4, 5)


# A router's gate: a tile of the usual size would leave it to a handful of programs.
NARROW = 512
NARROW_TILE = SplitTile(16, 16, 128, 1, 2, 5)


def linear_narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """X @ weight.T of few columns as rows [T, N]; None where the library is as good."""
    (T, K), N = x.shape, weight.shape[0]
    if not x.is_cuda or x.element_size() != 2 or T > MAX_ROWS or N > NARROW or K < 512:
        return None
    out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    linear_split(x, weight, None, NARROW_TILE, out)
    return out


def linear_split(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: SplitTile,
    out: torch.Tensor | None = None,
) -> Parts:
    """X @ weight.T + bias, as parts.

    Args:
        x: [T, K], rows may be strided.
        weight: [N, K] contiguous.
        bias: [N]; the first part has it.
        tile: Tile.
        out: [S, T, N] or, of one part, [T, N]; allocated as float32 where absent.
    """
    (T, K), N = x.shape, weight.shape[0]
    if out is None:
        out = torch.empty(tile.parts, T, N, dtype=torch.float32, device=x.device)
    if T:
        grid = (triton.cdiv(N, tile.block_n), tile.parts, triton.cdiv(T, tile.block_m))
        options = dependent(x)
        linear_split_kernel[grid](
            x, weight, bias if bias is not None else x, out, T, N, K, x.stride(0),
            BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, PARTS=tile.parts,
            EVEN=N % tile.block_n == 0 and K % (tile.parts * tile.block_k) == 0,
            HAS_BIAS=bias is not None, UPCAST=not x.is_cuda,
            PREFETCH=options["PDL"] and x.element_size() == 2,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
        )  # fmt: skip
    return Parts(out)
