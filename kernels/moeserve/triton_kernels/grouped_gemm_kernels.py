"""Device code of the two grouped GEMMs; what they compute and who launches them: `grouped_gemm.py`.

A tile is one expert's row block by a block of columns. Row blocks are numbered expert after
expert from the counts, inside the kernel; rows of `act` lie in the same order, so the second GEMM
reads them without an index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import wait_for_inputs


@triton.jit
def _tile_position(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Tile number -> (m, n): n runs inside groups of GROUP_M row blocks, so weights stay in L2."""
    width = GROUP_M * num_n
    first = (tile // width) * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    return first + (tile % width) % size, (tile % width) // size


@triton.jit
def _owner(ends, counts, lane, pid_m, BM: tl.constexpr):
    """Row block -> (expert, first row inside it, rows it has, rows of all experts before it)."""
    expert = tl.sum((ends <= pid_m).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= pid_m, ends, 0), 0)
    count = tl.sum(tl.where(lane == expert, counts, 0), 0)
    offset = tl.sum(tl.where(lane < expert, counts, 0), 0)
    return expert, (pid_m - before) * BM, count, offset


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
def _load_tokens(
    x, place, slot, is_row, k, stride_x, H,
    K: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, ARRANGED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[BM, BK] of the tokens of `slot`, or of the rows from `place` on where they are ARRANGED.

    Rows past an expert's end are zero where MASKED, else token 0's or another expert's: their sums
    are not stored.
    """
    if ARRANGED:
        a = x.load([place, k])
    else:
        kk = k + tl.arange(0, BK)
        ptr = x + (slot // K).to(tl.int64)[:, None] * stride_x + kk[None, :]
        if EVEN_K and not MASKED:
            a = tl.load(ptr)
        else:
            is_in = is_row if EVEN_K else is_row & (kk[None, :] < H)
            a = tl.load(ptr, mask=is_in, other=0.0)
    return a


@triton.jit
def _described_projections(
    x, w13, place, slot, is_row, expert, pid_n, stride_x, H,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, ARRANGED: tl.constexpr, UPCAST: tl.constexpr, EVEN_K: tl.constexpr,
    IS_GATED: tl.constexpr,
):  # fmt: skip
    """Gate and up [BM, BN] float32: their weights are one block and one operand.

    One instruction of twice the width reads the tokens from shared memory once for both (H200, the
    first GEMM of Qwen3-30B-A3B, T = 8,192: 861 us with two, 789 with one).
    """
    WIDTH: tl.constexpr = 2 * BN if IS_GATED else BN
    acc = tl.zeros([WIDTH, BM] if SWAP else [BM, WIDTH], tl.float32)
    for k in range(0, H, BK):
        a = _load_tokens(x, place, slot, is_row, k, stride_x, H, K, BK, EVEN_K, ARRANGED, False)
        w = tl.reshape(w13.load([expert, 0, pid_n * BN, k]), (WIDTH, BK))
        acc = _dot(a, w, acc, SWAP, UPCAST)
    if SWAP:
        acc = tl.trans(acc)
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
    else:
        gate, up = acc, acc
    return gate, up


@triton.jit
def _pointed_projections(
    x, w13, place, slot, is_row, expert, pid_n, stride_x, H, I,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, ARRANGED: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Gate and up [BM, BN] float32, [BN, BM] where SWAP."""
    rows_per_expert = 2 * I if IS_GATED else I
    gate_row = expert.to(tl.int64) * rows_per_expert + pid_n * BN
    rows_left = I - pid_n * BN
    gate = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    up = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for k in range(0, H, BK):
        a = _load_tokens(x, place, slot, is_row, k, stride_x, H, K, BK, EVEN_K, ARRANGED, True)
        g = _load_weights(w13, gate_row, k, H, BN, BK, EVEN_N, EVEN_K, False, rows_left)
        gate = _dot(a, g, gate, SWAP, UPCAST)
        if IS_GATED:
            u = _load_weights(w13, gate_row + I, k, H, BN, BK, EVEN_N, EVEN_K, False, rows_left)
            up = _dot(a, u, up, SWAP, UPCAST)
    return gate, up


@triton.jit
def _gate_up_tile(
    x, w13, act_ptr, bucket_ptr, weights_ptr, first, count, offset, expert, pid_n,
    stride_x, H, I,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, ARRANGED: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """BM rows of one expert by BN columns of act."""
    row = first + tl.arange(0, BM)
    is_row = (row < count)[:, None]
    slot = tl.load(bucket_ptr + row, mask=row < count, other=0)
    IS_TURNED: tl.constexpr = SWAP and not TMA
    if TMA:
        gate, up = _described_projections(
            x, w13, offset + first, slot, is_row, expert, pid_n, stride_x, H,
            K, BM, BN, BK, SWAP, ARRANGED, UPCAST, EVEN_K, IS_GATED,
        )  # fmt: skip
    else:
        gate, up = _pointed_projections(
            x, w13, offset + first, slot, is_row, expert, pid_n, stride_x, H, I,
            K, BM, BN, BK, SWAP, ARRANGED, UPCAST, EVEN_N, EVEN_K, IS_GATED,
        )  # fmt: skip
    if WEIGHT_ON_INPUT:
        # expert(w * x): both projections are linear, so the weight may follow them.
        weight = tl.load(weights_ptr + slot)
        weight = weight[None, :] if IS_TURNED else weight[:, None]
        gate *= weight
        up *= weight
    act = _activate(gate, up, ACTIVATION).to(act_ptr.dtype.element_ty)
    if IS_TURNED:
        act = tl.trans(act)
    col = pid_n * BN + tl.arange(0, BN)
    place = (offset + row).to(tl.int64)[:, None]
    tl.store(act_ptr + place * I + col[None, :], act, mask=is_row & (col < I)[None, :])


@triton.jit(do_not_specialize=["bucket_stride"])
def moe_gate_up_kernel(
    x, x_tail, w13, act_ptr, counts_ptr, buckets_ptr, weights_ptr,
    bucket_stride, stride_x, num_local, H, I,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_SWAP: tl.constexpr,
    GROUP_M: tl.constexpr, FLAT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    ARRANGED: tl.constexpr,
    UPCAST: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, IS_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """X [T, H] gathered by slot, w13 [E_loc, 2I, H] -> act [T * K, I], expert after expert.

    ARRANGED: x and x_tail are descriptors of tokens that lie in the experts' order, [T * K, H].
    """
    wait_for_inputs(PDL)
    lane = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + lane, mask=lane < num_local, other=0)
    ends = tl.cumsum((counts + BM - 1) // BM, 0)
    num_m = tl.max(ends, 0)
    num_n = tl.cdiv(I, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLAT):
        pid_m, pid_n = _tile_position(tile, num_m, num_n, GROUP_M)
        expert, first, count, offset = _owner(ends, counts, lane, pid_m, BM)
        bucket_ptr = buckets_ptr + expert.to(tl.int64) * bucket_stride
        if TAIL > 0 and count - first <= TAIL:
            _gate_up_tile(
                x_tail, w13, act_ptr, bucket_ptr, weights_ptr, first, count, offset, expert, pid_n,
                stride_x, H, I, K, TAIL, BN, BK, TAIL_SWAP, TMA, ARRANGED, UPCAST,
                EVEN_N, EVEN_K, ACTIVATION, WEIGHT_ON_INPUT, IS_GATED,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x, w13, act_ptr, bucket_ptr, weights_ptr, first, count, offset, expert, pid_n,
                stride_x, H, I, K, BM, BN, BK, SWAP, TMA, ARRANGED, UPCAST,
                EVEN_N, EVEN_K, ACTIVATION, WEIGHT_ON_INPUT, IS_GATED,
            )  # fmt: skip


@triton.jit
def _down_tile(
    act, w2, out_ptr, bucket_ptr, weights_ptr, first, count, offset, expert, pid_n, H, I,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """BM rows of one expert by BN columns of out."""
    row = first + tl.arange(0, BM)
    is_row = (row < count)[:, None]
    slot = tl.load(bucket_ptr + row, mask=row < count, other=0)
    w_row = expert.to(tl.int64) * H + pid_n * BN
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for k in range(0, I, BK):
        if TMA:
            # Rows past the end are another expert's or zero, and their sums are not stored.
            a = act.load([offset + first, k])
        else:
            kk = k + tl.arange(0, BK)
            ptr = act + (offset + row).to(tl.int64)[:, None] * I + kk[None, :]
            is_in = is_row if EVEN_K else is_row & (kk[None, :] < I)
            a = tl.load(ptr, mask=is_in, other=0.0)
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
        mask=is_row & (col < H)[None, :],
    )


@triton.jit(do_not_specialize=["bucket_stride"])
def moe_down_kernel(
    act, act_tail, w2, out_ptr, counts_ptr, buckets_ptr, weights_ptr,
    bucket_stride, num_local, H, I,
    BLOCK_E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_SWAP: tl.constexpr,
    GROUP_M: tl.constexpr, FLAT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    UPCAST: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Act [T * K, I], w2 [E_loc, H, I] -> out [T * K, H] by slot, weighted in float32."""
    wait_for_inputs(PDL)
    lane = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + lane, mask=lane < num_local, other=0)
    ends = tl.cumsum((counts + BM - 1) // BM, 0)
    num_m = tl.max(ends, 0)
    num_n = tl.cdiv(H, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLAT):
        pid_m, pid_n = _tile_position(tile, num_m, num_n, GROUP_M)
        expert, first, count, offset = _owner(ends, counts, lane, pid_m, BM)
        bucket_ptr = buckets_ptr + expert.to(tl.int64) * bucket_stride
        if TAIL > 0 and count - first <= TAIL:
            _down_tile(
                act_tail, w2, out_ptr, bucket_ptr, weights_ptr, first, count, offset, expert, pid_n,
                H, I, TAIL, BN, BK, TAIL_SWAP, TMA, UPCAST, EVEN_N, EVEN_K, HAS_WEIGHT,
            )  # fmt: skip
        else:
            _down_tile(
                act, w2, out_ptr, bucket_ptr, weights_ptr, first, count, offset, expert, pid_n,
                H, I, BM, BN, BK, SWAP, TMA, UPCAST, EVEN_N, EVEN_K, HAS_WEIGHT,
            )  # fmt: skip
