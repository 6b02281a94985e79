"""Router: logits [T, E] -> ids and weights [T, K] in one pass, NaN-safe, for any E.

Receives raw logits; returns `topk_ids` int32 and `topk_weights` float32, and on request counts
per expert and each expert's list of slots, which the grouped GEMMs read. One warp owns one row,
so every reduction stays in registers. The same rules in torch: `moe/routing.py`; lists from ids
that another router made: `moe_buckets.py`.

NaN rule: NaN counts as -inf before the row reduction, +inf as the largest finite value; a row
without any finite logit counts as a row of zeros. Selection compares order-preserving integer
keys and removes a winner by mask, so K ids of a row are distinct whatever the row holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moeserve.triton_kernels.dependent import dependent, wait_for_inputs

if TYPE_CHECKING:  # device code depends on nothing of `moe/` when it runs
    from moeserve.moe.spec import RoutingSpec

# Keys: padding lanes and lanes already taken are below every real value, -inf included.
_TAKEN = tl.constexpr(-(2**31))
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_NEVER = tl.constexpr(2**30)


@triton.jit
def _ordered_key(x):
    """float32 -> int32 that sorts alike; -0.0 and +0.0 get one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key_value(key):
    """Inverse of `_ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _group_mask(
    score, lane, E: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, IS_TOP2: tl.constexpr
):
    """Lanes whose expert group is among the KEPT best; ties to the lowest group."""
    size: tl.constexpr = E // G
    group = lane // size
    group_key = tl.full(score.shape, _TAKEN, tl.int32)
    for g in tl.static_range(G):
        in_group = group == g
        key = tl.where(in_group, _ordered_key(score), _TAKEN)
        best = tl.max(key, 1, keep_dims=True)
        value = _key_value(best)
        if IS_TOP2 and size > 1:
            winner = tl.min(tl.where(key == best, lane, _NEVER), 1, keep_dims=True)
            second = tl.max(tl.where(lane == winner, _TAKEN, key), 1, keep_dims=True)
            value += _key_value(second)
        group_key = tl.where(in_group, _ordered_key(value), group_key)
    is_kept = lane < 0
    for _ in tl.static_range(KEPT):
        free = tl.where(is_kept | (lane >= E), _TAKEN, group_key)
        best = tl.max(free, 1, keep_dims=True)
        winner = tl.min(tl.where((free == best) & (lane < E), group, _NEVER), 1, keep_dims=True)
        is_kept = is_kept | ((group == winner) & (lane < E))
    return is_kept


@triton.jit(do_not_specialize=["num_rows", "bucket_stride", "first_expert"])
def moe_router_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    buckets_ptr,
    nan_rows_ptr,
    num_rows,
    stride_row,
    bucket_stride,
    first_expert,
    num_local,
    scaling_factor,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    G: tl.constexpr,
    KEPT: tl.constexpr,
    IS_LLAMA4: tl.constexpr,
    HAS_BUCKETS: tl.constexpr,
    HAS_NAN_COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows a program, one warp a row; see the module's docstring for the rules."""
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, BLOCK_E)[None, :]
    is_lane = lane < E
    is_row = row < num_rows
    x = tl.load(
        logits_ptr + row.to(tl.int64) * stride_row + lane, mask=is_row & is_lane, other=0.0
    ).to(tl.float32)
    if HAS_NAN_COUNT:
        is_nan_row = tl.max((x != x).to(tl.int32), 1)
        num_nan = tl.sum(is_nan_row, 0)
        tl.atomic_add(nan_rows_ptr, num_nan.to(tl.int64), mask=num_nan > 0, sem="relaxed")
    x = tl.where(x != x, float("-inf"), x)
    x = tl.minimum(x, _FLOAT_MAX)
    x = tl.where(is_lane, x, float("-inf"))
    top = tl.max(x, 1, keep_dims=True)
    is_void = top == float("-inf")
    x = tl.where(is_void & is_lane, 0.0, x)
    top = tl.where(is_void, 0.0, top)

    if IS_LLAMA4 or IS_SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        exp = tl.exp(x - top)
        score = exp / tl.sum(exp, 1, keep_dims=True)
    # Without a bias the order of the scores is the order of the logits; comparing logits keeps
    # apart what exp() would round together.
    choice = x
    if HAS_BIAS:
        bias = tl.load(bias_ptr + lane, mask=is_lane, other=0.0).to(tl.float32)
        choice = score + bias
    # Finite, so that sums over a group stay comparable.
    choice = tl.where(x == float("-inf"), -_FLOAT_MAX, choice)
    choice = tl.where(is_lane, choice, float("-inf"))
    key = tl.where(is_lane, _ordered_key(choice), _TAKEN)
    if G > 1:
        key = tl.where(_group_mask(choice, lane, E, G, KEPT, HAS_BIAS), key, _TAKEN)

    slot = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([ROWS, BLOCK_K], tl.int32)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    for k in tl.static_range(K):
        best = tl.max(key, 1, keep_dims=True)
        winner = tl.min(tl.where((key == best) & is_lane, lane, _NEVER), 1, keep_dims=True)
        is_winner = lane == winner
        weight = tl.sum(tl.where(is_winner, score, 0.0), 1, keep_dims=True)
        key = tl.where(is_winner, _TAKEN, key)
        ids = tl.where(slot == k, winner, ids)
        weights = tl.where(slot == k, weight, weights)
        total += weight
    if IS_RENORMALIZED:
        # A row whose K scores are all zero gets equal weights.
        weights = tl.where(total > 0.0, weights / tl.where(total > 0.0, total, 1.0), 1.0 / K)
    weights *= scaling_factor

    out = row.to(tl.int64) * K + slot
    is_out = is_row & (slot < K)
    tl.store(ids_ptr + out, ids, mask=is_out)
    tl.store(weights_ptr + out, weights, mask=is_out)
    if HAS_BUCKETS:
        local = ids - first_expert
        is_local = is_out & (local >= 0) & (local < num_local)
        rank = tl.atomic_add(counts_ptr + local, 1, mask=is_local, sem="relaxed")
        at = local.to(tl.int64) * bucket_stride + rank
        tl.store(buckets_ptr + at, (row * K + slot).to(tl.int32), mask=is_local)


def route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    bias: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    buckets: tuple[torch.Tensor, torch.Tensor] | None = None,
    first_expert: int = 0,
    nan_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the router kernel.

    Args:
        logits: [T, E] bf16, fp16 or fp32; rows may be strided, experts are contiguous.
        routing: The model's rule.
        bias: [E], selection only; required where `routing.has_bias`.
        out: Preallocated (weights [T, K] float32, ids [T, K] int32).
        buckets: (counts [E_loc] int32, zero on entry; slots [E_loc, T * K] int32), filled
            with the slots `t * K + k` of each local expert in no particular order.
        first_expert: Global id of the first local expert, for `buckets`.
        nan_rows: [1] int64; the number of rows that hold a NaN is added to it.

    Returns:
        (topk_weights [T, K] float32, topk_ids [T, K] int32).
    """
    T, E = logits.shape
    K = routing.top_k
    if out is None:
        out = (
            torch.empty(T, K, dtype=torch.float32, device=logits.device),
            torch.empty(T, K, dtype=torch.int32, device=logits.device),
        )
    weights, ids = out
    if T == 0:
        return weights, ids
    block_e = max(32, triton.next_power_of_2(E))
    # One warp a row either way; four rows a program pay where rows are short and aligned (H200).
    rows = 4 if T >= 128 and block_e <= 128 and E % 16 == 0 else 1
    counts, slots = buckets if buckets is not None else (ids, ids)
    programs: int = -(-T // rows)
    moe_router_kernel[(programs,)](
        logits,
        bias if bias is not None else logits,
        ids,
        weights,
        counts,
        slots,
        nan_rows if nan_rows is not None else ids,
        T,
        logits.stride(0),
        slots.stride(0),
        first_expert,
        counts.shape[0] if buckets is not None else 0,
        routing.scaling_factor,
        E=E,
        K=K,
        BLOCK_E=block_e,
        BLOCK_K=triton.next_power_of_2(K),
        ROWS=rows,
        IS_SIGMOID=routing.scoring == "sigmoid",
        IS_RENORMALIZED=routing.is_renormalized and not routing.weight_on_input,
        HAS_BIAS=routing.has_bias,
        G=routing.num_groups,
        KEPT=routing.top_k_groups,
        IS_LLAMA4=routing.weight_on_input,
        HAS_BUCKETS=buckets is not None,
        HAS_NAN_COUNT=nan_rows is not None,
        num_warps=rows,
        **dependent(logits, programs),
    )
    return weights, ids
