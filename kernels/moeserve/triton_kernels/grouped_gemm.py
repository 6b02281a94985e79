"""The two grouped GEMMs of an MoE layer: gather in the first, ordered sum after the second.

`gate_up` reads rows of x by index, multiplies with gate and up rows of w13 and stores
`activation(gate) * up` by slot; `down` multiplies with w2, scales by the router weight in float32
and stores by slot. Slots are `t * K + k`; which slots an expert owns comes from `router.py`. The
sum over a token's slots is `combine.py`; the path for a handful of tokens is `gemv.py`.

Accumulation is float32 in ascending K blocks, without split-K: an element's value depends on
BLOCK_K and the matrix instruction, never on which rows share its tile. Offsets are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM; `is_swapped` puts the weights on the M side of the instruction.

    `is_persistent` launches one program for each multiprocessor and loops over tiles; `uses_tma`
    reads the weights through a tensor descriptor. An expert's last row block, where it has at most
    `tail_m` rows, is computed with that many: without it half of the experts would pay for a whole
    block of padding. 0 turns this off.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    is_swapped: bool = False
    is_persistent: bool = False
    uses_tma: bool = False
    tail_m: int = 0


@triton.jit
def _tile_position(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Tile number -> (m, n): n runs inside groups of GROUP_M row blocks, so weights stay in L2."""
    width = GROUP_M * num_n
    first = (tile // width) * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    return first + (tile % width) % size, (tile % width) // size


@triton.jit
def _owner(ends, counts, lane, pid_m, BM: tl.constexpr):
    """Row block -> (expert, first row inside it, rows it has)."""
    expert = tl.sum((ends <= pid_m).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= pid_m, ends, 0), 0)
    count = tl.sum(tl.where(lane == expert, counts, 0), 0)
    return expert, (pid_m - before) * BM, count


@triton.jit
def _load_weights(
    w, row, k, num_k, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, rows_left,
):  # fmt: skip
    """[BN, BK] of a row-major [rows, num_k] matrix; beyond `rows_left` or num_k it is zero."""
    if TMA:
        tile = w.load([row.to(tl.int32), k])
    else:
        n = tl.arange(0, BN)
        kk = k + tl.arange(0, BK)
        ptr = w + (row + n[:, None].to(tl.int64)) * num_k + kk[None, :]
        if EVEN_N and EVEN_K:
            tile = tl.load(ptr)
        else:
            is_in = (n[:, None] < rows_left) & (kk[None, :] < num_k)
            tile = tl.load(ptr, mask=is_in, other=0.0)
    return tile


@triton.jit
def _dot(a, w, acc, SWAP: tl.constexpr, UPCAST: tl.constexpr):
    """Acc += a [BM, BK] @ w [BN, BK]^T, or its transpose where SWAP."""
    if UPCAST:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    if SWAP:
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    """ACTIVATION: 0 SiLU-gated, 1 SwiGLU-OAI (alpha 1.702, limit 7), 2 squared ReLU, ungated."""
    if ACTIVATION == 0:
        act = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == 1:
        g = tl.minimum(gate, 7.0)
        u = tl.minimum(tl.maximum(up, -7.0), 7.0)
        act = g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)
    else:
        r = tl.maximum(gate, 0.0)
        act = r * r
    return act


@triton.jit
def _gate_up_tile(
    x_ptr, w13, act_ptr, bucket_ptr, weights_ptr, first, count, expert, pid_n,
    stride_x, H, I,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """BM rows of one expert by BN columns of act."""
    row = first + tl.arange(0, BM)
    # Rows past the end read slot 0: a valid address whose result is never stored.
    slot = tl.load(bucket_ptr + row, mask=row < count, other=0)
    x_row = x_ptr + (slot // K).to(tl.int64)[:, None] * stride_x
    rows_per_expert = 2 * I if IS_GATED else I
    gate_row = expert.to(tl.int64) * rows_per_expert + pid_n * BN
    rows_left = I - pid_n * BN
    if SWAP:
        gate = tl.zeros([BN, BM], tl.float32)
        up = tl.zeros([BN, BM], tl.float32)
    else:
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, H, BK):
        kk = k + tl.arange(0, BK)
        if EVEN_K:
            a = tl.load(x_row + kk[None, :])
        else:
            a = tl.load(x_row + kk[None, :], mask=kk[None, :] < H, other=0.0)
        g = _load_weights(w13, gate_row, k, H, BN, BK, EVEN_N, EVEN_K, TMA, rows_left)
        gate = _dot(a, g, gate, SWAP, UPCAST)
        if IS_GATED:
            u = _load_weights(w13, gate_row + I, k, H, BN, BK, EVEN_N, EVEN_K, TMA, rows_left)
            up = _dot(a, u, up, SWAP, UPCAST)
    if WEIGHT_ON_INPUT:
        # expert(w * x): both projections are linear, so the weight may follow them.
        weight = tl.load(weights_ptr + slot)
        weight = weight[None, :] if SWAP else weight[:, None]
        gate *= weight
        up *= weight
    act = _activate(gate, up, ACTIVATION).to(act_ptr.dtype.element_ty)
    if SWAP:
        act = tl.trans(act)
    col = pid_n * BN + tl.arange(0, BN)
    tl.store(
        act_ptr + slot.to(tl.int64)[:, None] * I + col[None, :],
        act,
        mask=(row < count)[:, None] & (col < I)[None, :],
    )


@triton.jit(do_not_specialize=["bucket_stride"])
def moe_gate_up_kernel(
    x_ptr, w13, act_ptr, counts_ptr, buckets_ptr, weights_ptr,
    bucket_stride, stride_x, num_local, H, I,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_SWAP: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """X [T, H] gathered by slot, w13 [E_loc, 2I, H] -> act [T * K, I] by slot."""
    lane = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + lane, mask=lane < num_local, other=0)
    ends = tl.cumsum((counts + BM - 1) // BM, 0)
    num_m = tl.max(ends, 0)
    num_n = tl.cdiv(I, BN)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        pid_m, pid_n = _tile_position(tile, num_m, num_n, GROUP_M)
        expert, first, count = _owner(ends, counts, lane, pid_m, BM)
        bucket_ptr = buckets_ptr + expert.to(tl.int64) * bucket_stride
        if TAIL > 0 and count - first <= TAIL:
            _gate_up_tile(
                x_ptr, w13, act_ptr, bucket_ptr, weights_ptr, first, count, expert, pid_n,
                stride_x, H, I, K, TAIL, BN, BK, TAIL_SWAP, TMA, UPCAST,
                EVEN_N, EVEN_K, ACTIVATION, WEIGHT_ON_INPUT, IS_GATED,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x_ptr, w13, act_ptr, bucket_ptr, weights_ptr, first, count, expert, pid_n,
                stride_x, H, I, K, BM, BN, BK, SWAP, TMA, UPCAST,
                EVEN_N, EVEN_K, ACTIVATION, WEIGHT_ON_INPUT, IS_GATED,
            )  # fmt: skip


@triton.jit
def _down_tile(
    act_ptr, w2, out_ptr, bucket_ptr, weights_ptr, first, count, expert, pid_n, H, I,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """BM rows of one expert by BN columns of out."""
    row = first + tl.arange(0, BM)
    slot = tl.load(bucket_ptr + row, mask=row < count, other=0)
    act_row = act_ptr + slot.to(tl.int64)[:, None] * I
    w_row = expert.to(tl.int64) * H + pid_n * BN
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for k in range(0, I, BK):
        kk = k + tl.arange(0, BK)
        if EVEN_K:
            a = tl.load(act_row + kk[None, :])
        else:
            a = tl.load(act_row + kk[None, :], mask=kk[None, :] < I, other=0.0)
        w = _load_weights(w2, w_row, k, I, BN, BK, EVEN_N, EVEN_K, TMA, H - pid_n * BN)
        acc = _dot(a, w, acc, SWAP, UPCAST)
    if HAS_WEIGHT:
        weight = tl.load(weights_ptr + slot)
        acc *= weight[None, :] if SWAP else weight[:, None]
    out = acc.to(out_ptr.dtype.element_ty)
    if SWAP:
        out = tl.trans(out)
    col = pid_n * BN + tl.arange(0, BN)
    tl.store(
        out_ptr + slot.to(tl.int64)[:, None] * H + col[None, :],
        out,
        mask=(row < count)[:, None] & (col < H)[None, :],
    )


@triton.jit(do_not_specialize=["bucket_stride"])
def moe_down_kernel(
    act_ptr, w2, out_ptr, counts_ptr, buckets_ptr, weights_ptr,
    bucket_stride, num_local, H, I,
    BLOCK_E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_SWAP: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Act [T * K, I] by slot, w2 [E_loc, H, I] -> out [T * K, H] by slot, weighted in float32."""
    lane = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + lane, mask=lane < num_local, other=0)
    ends = tl.cumsum((counts + BM - 1) // BM, 0)
    num_m = tl.max(ends, 0)
    num_n = tl.cdiv(H, BN)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        pid_m, pid_n = _tile_position(tile, num_m, num_n, GROUP_M)
        expert, first, count = _owner(ends, counts, lane, pid_m, BM)
        bucket_ptr = buckets_ptr + expert.to(tl.int64) * bucket_stride
        if TAIL > 0 and count - first <= TAIL:
            _down_tile(
                act_ptr, w2, out_ptr, bucket_ptr, weights_ptr, first, count, expert, pid_n, H, I,
                TAIL, BN, BK, TAIL_SWAP, TMA, UPCAST, EVEN_N, EVEN_K, HAS_WEIGHT,
            )  # fmt: skip
        else:
            _down_tile(
                act_ptr, w2, out_ptr, bucket_ptr, weights_ptr, first, count, expert, pid_n, H, I,
                BM, BN, BK, SWAP, TMA, UPCAST, EVEN_N, EVEN_K, HAS_WEIGHT,
            )  # fmt: skip


ACTIVATION_CODES = {"silu": 0, "swiglu_oai": 1, "relu2": 2}


def num_row_blocks(num_slots: int, num_local: int, block_m: int) -> int:
    """Upper bound of row blocks over all splits of `num_slots` among the local experts."""
    return min(num_slots, (num_slots + num_local * (block_m - 1)) // block_m)


def _grid(tile: Tile, num_slots: int, num_local: int, width: int, device: torch.device) -> int:
    num_n = -(-width // tile.block_n)
    tiles = num_row_blocks(num_slots, num_local, tile.block_m) * num_n
    if not tile.is_persistent:
        return tiles
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, num_sms)


def _is_tail_swapped(tile: Tile) -> bool:
    """Few rows go on the N side of the instruction, if the weights fill its M side."""
    return tile.is_swapped or (tile.tail_m < 64 and tile.block_n >= 64)


def _weight_operand(w: torch.Tensor, tile: Tile) -> object:
    """The flat [rows, k] matrix, or a descriptor of it."""
    flat = w.view(-1, w.shape[-1])
    if not tile.uses_tma:
        return flat
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(flat, [tile.block_n, tile.block_k])


def gate_up(
    x: torch.Tensor,
    w13: torch.Tensor,
    act: torch.Tensor,
    buckets: tuple[torch.Tensor, torch.Tensor],
    tile: Tile,
    *,
    top_k: int,
    activation: str,
    weights_on_input: torch.Tensor | None = None,
) -> None:
    """First grouped GEMM with its activation.

    Args:
        x: [T, H], rows may be strided.
        w13: [E_loc, 2I, H] (or [E_loc, I, H] for "relu2"), contiguous, gate rows first.
        act: [T * K, I], written for every slot listed in `buckets`.
        buckets: (counts [E_loc], slots [E_loc, >= T * K]) from `router.py`.
        tile: Tile sizes.
        top_k: K.
        activation: A name of `ACTIVATION_CODES`.
        weights_on_input: [T, K] float32, multiplied into the token (Llama-4).
    """
    counts, slots = buckets
    num_local, H = w13.shape[0], w13.shape[2]
    I = act.shape[1]
    is_interpreted = not x.is_cuda
    moe_gate_up_kernel[(_grid(tile, act.shape[0], num_local, I, x.device),)](
        x, _weight_operand(w13, tile), act, counts, slots,
        weights_on_input if weights_on_input is not None else x,
        slots.stride(0), x.stride(0), num_local, H, I,
        K=top_k, BLOCK_E=triton.next_power_of_2(num_local),
        BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP_M=tile.group_m,
        TAIL=tile.tail_m, TAIL_SWAP=_is_tail_swapped(tile),
        SWAP=tile.is_swapped, TMA=tile.uses_tma, UPCAST=is_interpreted,
        EVEN_N=I % tile.block_n == 0, EVEN_K=H % tile.block_k == 0,
        ACTIVATION=ACTIVATION_CODES[activation],
        WEIGHT_ON_INPUT=weights_on_input is not None, IS_GATED=activation != "relu2",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def down(
    act: torch.Tensor,
    w2: torch.Tensor,
    out: torch.Tensor,
    buckets: tuple[torch.Tensor, torch.Tensor],
    tile: Tile,
    *,
    weights: torch.Tensor | None,
) -> None:
    """Second grouped GEMM.

    Args:
        act: [T * K, I] by slot.
        w2: [E_loc, H, I], contiguous.
        out: [T * K, H], written for every slot listed in `buckets`.
        buckets: As for `gate_up`.
        tile: Tile sizes.
        weights: [T, K] float32 multiplied into the result, None where they went into the input.
    """
    counts, slots = buckets
    num_local, H, I = w2.shape
    is_interpreted = not act.is_cuda
    moe_down_kernel[(_grid(tile, act.shape[0], num_local, H, act.device),)](
        act, _weight_operand(w2, tile), out, counts, slots,
        weights if weights is not None else act,
        slots.stride(0), num_local, H, I,
        BLOCK_E=triton.next_power_of_2(num_local),
        BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP_M=tile.group_m,
        TAIL=tile.tail_m, TAIL_SWAP=_is_tail_swapped(tile),
        SWAP=tile.is_swapped, TMA=tile.uses_tma, UPCAST=is_interpreted,
        EVEN_N=H % tile.block_n == 0, EVEN_K=I % tile.block_k == 0,
        HAS_WEIGHT=weights is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
