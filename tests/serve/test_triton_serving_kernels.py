"""Norm, rotary embedding with cache write, greedy choice and fixed-tile products in Triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moeserve.layers.rope import RotaryTable, apply_rope
from moeserve.triton_kernels import combine, gemv_dense, linear, linear_narrow, norm, rope, sample
from moeserve.triton_kernels.combine import SlotSum
from moeserve.triton_kernels.rope import Heads, RopeTables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 1e-6


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    diff = out.cpu().double() - expected.double()
    return float(diff.norm() / expected.double().norm())


@pytest.mark.parametrize("H", [64, 96, 1000])
def test_add_norm_updates_the_stream_and_normalises_it(H: int) -> None:
    x = torch.randn(5, 2 * H)[:, :H] * 3
    residual, weight = torch.randn(5, H), torch.rand(H) + 0.5
    stream = residual.clone().to(DEVICE)
    out = norm.add_norm(x.to(DEVICE), stream, weight.to(DEVICE), 1e-6)
    assert torch.equal(stream.cpu(), residual + x)
    total = (residual + x).double()
    expected = total * (total.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
    assert error(out, expected) < LIMIT
    alone = norm.add_norm(x.to(DEVICE), None, weight.to(DEVICE), 1e-6)
    assert error(alone, F.rms_norm(x, (H,), weight, 1e-6)) < LIMIT


def test_add_norm_takes_the_sum_of_slots_and_clears_the_counts() -> None:
    T, K, E, H = 6, 3, 5, 80
    slots = torch.randn(T * K, H, device=DEVICE)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int().to(DEVICE)
    ids[2, 1] = -1
    slots[2 * K + 1] = float("nan")
    summed = torch.empty(T, H, device=DEVICE)
    combine.combine(slots, ids, summed, num_local=E, num_experts=E)
    stream, weight = torch.randn(T, H, device=DEVICE), torch.rand(H, device=DEVICE)
    before = stream.clone()
    counts = torch.full((E + 1,), 7, dtype=torch.int32, device=DEVICE)
    given = SlotSum(slots, ids, E, E, counts=counts[:E])
    assert given.shape == (T, H)
    out = norm.add_norm(given, stream, weight, 1e-6)
    expected = norm.add_norm(summed, before, weight, 1e-6)
    assert torch.equal(out, expected)
    assert torch.equal(stream, before)
    assert counts.tolist() == [0] * E + [7]
    # All slots written, or so they say: the same sum without a look at the ids.
    whole = torch.where(slots.isnan(), 0.0, slots)
    stream, before = before.clone(), before
    out = norm.add_norm(SlotSum(whole, ids, E, E, is_whole=True), stream, weight, 1e-6)
    assert torch.equal(out, norm.add_norm(summed, before, weight, 1e-6))
    # Without a list of counts nothing else is written.
    norm.add_norm(SlotSum(slots, ids, E, E), stream, weight, 1e-6)
    assert counts.tolist() == [0] * E + [7]


def test_slots_of_other_ranks_add_nothing_to_the_norms_sum() -> None:
    T, K, H = 4, 2, 48
    slots = torch.randn(T * K, H, device=DEVICE)
    ids = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0]], dtype=torch.int32, device=DEVICE)
    where = torch.tensor([-1, 0, -1, 1], dtype=torch.int32, device=DEVICE)
    is_here = (where[ids.long()] >= 0).reshape(-1, 1)
    expected = (slots * is_here).view(T, K, H).sum(1)
    slots = torch.where(is_here, slots, float("nan"))
    weight = torch.ones(H, device=DEVICE)
    stream = torch.zeros(T, H, device=DEVICE)
    norm.add_norm(SlotSum(slots, ids, 2, 4, expert_map=where), stream, weight, 1e-6)
    assert error(stream, expected.cpu()) < LIMIT


@pytest.mark.parametrize(("N", "K"), [(40, 256), (33, 200)])
@pytest.mark.parametrize("T", [1, 20])
def test_narrow_products(N: int, K: int, T: int) -> None:
    x = torch.randn(T, 2 * K, device=DEVICE)[:, :K]
    weight = torch.randn(N, K, device=DEVICE)
    out = linear_narrow.linear_narrow(x, weight)
    assert error(out, (x.double() @ weight.double().T).cpu()) < LIMIT


def test_embedding_takes_pending_tokens_and_never_reads_outside() -> None:
    table = torch.randn(50, 48).to(DEVICE)
    last = torch.tensor([7, 49, 3], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([4, -1, -3, -2, 2**30, 0], dtype=torch.int32, device=DEVICE)
    out = norm.embed(ids, last, table)
    assert torch.equal(out, table[torch.tensor([4, 7, 3, 49, 49, 0], device=DEVICE)])


@pytest.mark.parametrize("heads", [Heads(8, 2, 32, 16), Heads(4, 4, 64, 32), Heads(6, 3, 16, 8)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rope_and_store_equals_the_torch_layers(heads: Heads, has_norm: bool) -> None:
    T, eps = 7, 1e-6
    NQ, NKV, D = heads.NQ, heads.NKV, heads.D
    table = RotaryTable(D, 64, 1e4, torch.float32)
    qkv = torch.randn(T, (NQ + 2 * NKV) * D)
    weight = torch.rand(NQ + NKV, D) + 0.5
    positions = torch.tensor([0, 5, 63, 1, 2, 3, -1], dtype=torch.int32)
    slots = torch.tensor([3, 40, 41, 0, 17, 95, -1], dtype=torch.int32)
    num_pages = -(-96 // heads.page_size)
    cache = torch.full((num_pages, 2, NKV, heads.page_size, D), float("nan"), device=DEVICE)
    before = qkv.clone()
    moved = qkv.clone().to(DEVICE)
    rope.rope_and_store(
        moved,
        (weight.to(DEVICE), eps) if has_norm else None,
        RopeTables(table.cos.to(DEVICE), table.sin.to(DEVICE)),
        (positions.to(DEVICE), slots.to(DEVICE)),
        cache,
        heads,
    )
    split = before.view(T, -1, D)
    qk = split[:, : NQ + NKV]
    if has_norm:
        qk = F.rms_norm(qk, (D,), None, eps) * weight
    turned = torch.empty_like(qk)
    apply_rope(qk, table(positions.clamp(min=0).long()), turned)
    out = moved.cpu().view(T, -1, D)
    assert error(out[:, :NQ], turned[:, :NQ]) < LIMIT
    for t in range(T - 1):
        page, at = divmod(int(slots[t]), heads.page_size)
        stored = cache.cpu()[page, :, :, at]
        assert error(stored[0], turned[t, NQ:]) < LIMIT
        assert torch.equal(stored[1], split[t, NQ + NKV :])
    # Padding stores nothing.
    assert int((~cache.isnan()).sum()) == (T - 1) * 2 * NKV * D


@pytest.mark.parametrize(("R", "V"), [(1, 5000), (3, 151), (40, 1024), (1, 40)])
def test_argmax_takes_the_lowest_of_equals_and_names_bad_rows(R: int, V: int) -> None:
    logits = torch.randint(-5, 6, (R, V)).float()
    rows = torch.arange(R - 1, -1, -1, dtype=torch.int32)
    tokens = torch.full((R + 2,), 99, dtype=torch.int32, device=DEVICE)
    last = torch.full((R,), 99, dtype=torch.int32, device=DEVICE)
    sample.argmax(logits.to(DEVICE), rows.to(DEVICE), tokens, last)
    # torch leaves ties open; the first column that holds the maximum is meant.
    expected = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert tokens[:R].tolist() == expected.tolist()
    assert last.flip(0).tolist() == expected.tolist()
    assert tokens[R:].tolist() == [99, 99]


def test_argmax_calls_rows_without_meaning_bad_and_skips_padding() -> None:
    logits = torch.zeros(5, 100)
    logits[0, 70] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    logits[3, :] = float("-inf")
    logits[3, 42] = -7.0
    rows = torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32, device=DEVICE)
    tokens = torch.empty(5, dtype=torch.int32, device=DEVICE)
    last = torch.full((4,), 99, dtype=torch.int32, device=DEVICE)
    sample.argmax(logits.to(DEVICE), rows, tokens, last)
    assert tokens.tolist() == [-1, -1, -1, 42, 0]
    assert last.tolist() == [0, 0, 0, 42]


@pytest.mark.parametrize(("N", "K"), [(24, 64), (700, 96), (64, 200)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_fixed_products_are_right_and_rows_keep_their_bits(N: int, K: int, has_bias: bool) -> None:
    x = torch.randn(70, 2 * K)[:, :K].to(DEVICE)
    weight = torch.randn(N, K).to(DEVICE)
    bias = torch.randn(N).to(DEVICE) if has_bias else None
    out = linear.linear_fixed(x, weight, bias)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    assert error(out, expected.cpu()) < LIMIT
    for rows in (slice(0, 1), slice(13, 30), slice(69, 70)):
        assert torch.equal(linear.linear_fixed(x[rows], weight, bias), out[rows])


@pytest.mark.parametrize(("N", "K", "parts"), [(24, 1024, 4), (1024, 512, 2)])
def test_fixed_products_have_the_same_bits_whoever_computes_a_part(
    N: int, K: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert linear.num_parts(N, K) == parts
    x, weight = torch.randn(40, K, device=DEVICE), torch.randn(N, K, device=DEVICE)
    project = linear.FixedProjection(torch.device(DEVICE))
    split = project(x, weight)
    assert error(split, (x.double() @ weight.double().T).cpu()) < LIMIT
    # Counters are clear again: a second call gives the same.
    assert torch.equal(project(x, weight), split)
    assert torch.equal(project(x[3:4], weight), split[3:4])
    monkeypatch.setattr(linear, "MAX_SPLIT_ROWS", 0)
    assert torch.equal(project(x, weight), split)


@pytest.mark.parametrize(("N", "K"), [(24, 64), (600, 96)])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("has_more", [True, False])
def test_products_of_few_rows_with_and_without_their_norm(
    N: int, K: int, T: int, has_more: bool
) -> None:
    x, residual = torch.randn(T, 2 * K)[:, :K].to(DEVICE), torch.randn(T, K).to(DEVICE)
    weight, scale = torch.randn(N, K).to(DEVICE), (torch.rand(K) + 0.5).to(DEVICE)
    bias = torch.randn(N).to(DEVICE) if has_more else None
    added = bias.double() if bias is not None else 0.0
    plain = gemv_dense.gemv(x, weight, bias)
    assert error(plain, (x.double() @ weight.double().T + added).cpu()) < LIMIT
    before = residual.clone()
    norm_ = gemv_dense.Norm(scale, 1e-6)
    given = gemv_dense.norm_gemv(x if has_more else None, residual, norm_, weight, bias)
    stream = residual + x if has_more else residual
    assert torch.equal(residual, before)
    assert torch.equal(given.stream, stream)
    normed = F.rms_norm(stream.double(), (K,), scale.double(), 1e-6)
    assert error(given.normed, normed.cpu()) < LIMIT
    assert error(given.out, (normed @ weight.double().T + added).cpu()) < LIMIT


def test_more_rows_than_the_form_is_for_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows"):
        gemv_dense.gemv(torch.zeros(5, 16), torch.zeros(8, 16))
