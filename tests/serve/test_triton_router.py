"""The router kernel against the float64 reference: every rule, every odd row, any E."""

from __future__ import annotations

import pytest
import torch

from moeserve.moe.reference import reference_routing
from moeserve.moe.spec import RoutingSpec
from moeserve.triton_kernels import moe_buckets
from moeserve.triton_kernels.moe_buckets import fill_buckets
from moeserve.triton_kernels.router import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")


def check(logits: torch.Tensor, routing: RoutingSpec, bias: torch.Tensor | None = None) -> None:
    weights, ids = route(logits.to(DEVICE), routing, None if bias is None else bias.to(DEVICE))
    want_weights, want_ids = reference_routing(logits, routing, bias)
    assert ids.cpu().tolist() == want_ids.tolist()
    torch.testing.assert_close(weights.cpu().double(), want_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("E", [8, 16, 60, 72, 128, 160, 288])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_any_number_of_experts(E: int, scoring: str) -> None:
    torch.manual_seed(E)
    for renormalized in (True, False):
        check(torch.randn(5, E), RoutingSpec(4, scoring, renormalized))  # type: ignore[arg-type]


def test_bf16_logits_equal_float32_on_the_same_values() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 32, dtype=torch.bfloat16)
    half = route(logits.to(DEVICE), RoutingSpec(4))
    full = route(logits.float().to(DEVICE), RoutingSpec(4))
    assert torch.equal(half[0], full[0])
    assert torch.equal(half[1], full[1])


def test_rows_of_nan_and_infinities_get_distinct_ids_and_finite_weights() -> None:
    rows = torch.randn(9, 8)
    rows[0] = NAN
    rows[1] = INF
    rows[2] = -INF
    rows[3, 1] = NAN
    rows[4, 5] = INF
    rows[5, :6] = NAN
    rows[6] = -50.0 - torch.arange(8)
    rows[7] = 1.0
    for routing in (RoutingSpec(4), RoutingSpec(4, "sigmoid"), RoutingSpec(4, "softmax", False)):
        check(rows, routing)
        weights, ids = route(rows.to(DEVICE), routing)
        assert torch.isfinite(weights).all()
        for row in ids.tolist():
            assert len(set(row)) == 4
            assert all(0 <= e < 8 for e in row)


def test_one_nan_keeps_the_other_experts() -> None:
    weights, ids = route(torch.tensor([[NAN, 2.0, 1.0, 0.0]], device=DEVICE), RoutingSpec(2))
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.7311, 0.2689]]), atol=1e-4, rtol=0)


def test_a_clean_row_keeps_its_bits_beside_dirty_ones() -> None:
    torch.manual_seed(2)
    clean = torch.randn(1, 16)
    dirty = torch.full((3, 16), NAN)
    alone = route(clean.to(DEVICE), RoutingSpec(4))
    beside = route(torch.cat([dirty, clean, dirty]).to(DEVICE), RoutingSpec(4))
    assert torch.equal(beside[0][3], alone[0][0])
    assert torch.equal(beside[1][3], alone[1][0])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_clean_rows_keep_their_bits_where_a_program_has_four_rows(scoring: str) -> None:
    """From 128 rows of 16 n experts on, clean and dirty rows share a program."""
    torch.manual_seed(8)
    routing = RoutingSpec(8, scoring)  # type: ignore[arg-type]
    rows = torch.randn(130, 128, dtype=torch.bfloat16)
    weights, ids = route(rows.to(DEVICE), routing)
    dirty = torch.rand(130) < 0.3
    assert 0 < int(dirty.sum()) < 130
    spoiled = rows.clone()
    spoiled[dirty] = NAN
    new_weights, new_ids = route(spoiled.to(DEVICE), routing)
    clean = ~dirty.to(DEVICE)
    assert torch.equal(new_ids[clean], ids[clean])
    assert torch.equal(new_weights[clean], weights[clean])
    assert new_ids[~clean].tolist() == [list(range(8))] * int(dirty.sum())


def test_weights_with_and_without_renormalisation() -> None:
    row = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=DEVICE)
    for is_renormalized, want in ((False, [0.64391, 0.23688]), (True, [0.73106, 0.26894])):
        weights, ids = route(row, RoutingSpec(2, is_renormalized=is_renormalized))
        assert ids.tolist() == [[0, 1]]
        assert weights[0].tolist() == pytest.approx(want, abs=5e-6)


def test_bias_chooses_but_does_not_weigh() -> None:
    torch.manual_seed(3)
    bias = torch.randn(32)
    routing = RoutingSpec(4, "sigmoid", True, has_bias=True, scaling_factor=2.5)
    check(torch.randn(6, 32), routing, bias)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("E", "groups", "kept"),
    # Of the last three, lanes of no expert fill up the row; 160 with 8 and 3 is DeepSeek-V2's.
    [(32, 8, 4), (16, 4, 2), (8, 8, 3), (20, 4, 2), (72, 6, 1), (160, 8, 3)],
)
def test_groups(E: int, groups: int, kept: int, has_bias: bool) -> None:
    torch.manual_seed(4)
    # A bias far below zero: experts outside the kept groups must not win by a mask of zeros.
    bias = torch.randn(E) - 5.0 if has_bias else None
    routing = RoutingSpec(
        3, "sigmoid", True, has_bias=has_bias, num_groups=groups, top_k_groups=kept
    )
    check(torch.randn(7, E), routing, bias)


def test_llama4_weight_is_the_sigmoid_of_the_winner() -> None:
    logits = torch.tensor([[0.0, -1.0], [3.0, 2.0], [-4.0, -3.0]])
    check(logits, RoutingSpec(1, "sigmoid", False, weight_on_input=True))


def test_ties_go_to_the_lowest_id() -> None:
    _, ids = route(torch.zeros(2, 72, device=DEVICE), RoutingSpec(6))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    _, ids = route(torch.tensor([[0.0, -0.0, 0.0]], device=DEVICE), RoutingSpec(2))
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_rows_with_few_numbers(scoring: str, groups: int, has_bias: bool) -> None:
    torch.manual_seed(9)
    rows = torch.randn(12, 60)
    rows[torch.rand(12, 60) < torch.linspace(0.5, 1.0, 12)[:, None]] = NAN
    rows[::3] = rows[::3].nan_to_num(-INF)
    bias = torch.randn(60) if has_bias else None
    kept = max(1, groups // 2)
    routing = RoutingSpec(
        4,
        scoring,
        True,
        has_bias=has_bias,
        num_groups=groups,
        top_k_groups=kept,  # type: ignore[arg-type]
    )
    check(rows, routing, bias)


def test_strided_rows_and_no_rows() -> None:
    torch.manual_seed(5)
    wide = torch.randn(4, 48)
    check(wide[:, :32], RoutingSpec(2))
    weights, ids = route(torch.empty(0, 32, device=DEVICE), RoutingSpec(2))
    assert weights.shape == ids.shape == (0, 2)


def test_buckets_hold_every_local_slot_once() -> None:
    torch.manual_seed(6)
    T, E, K, first, local = 9, 12, 3, 4, 5
    logits = torch.randn(T, E, device=DEVICE)
    counts = torch.zeros(local, dtype=torch.int32, device=DEVICE)
    slots = torch.full((local, T * K), -7, dtype=torch.int32, device=DEVICE)
    _, ids = route(logits, RoutingSpec(K), buckets=(counts, slots), first_expert=first)
    for e in range(local):
        want = (ids.flatten() == first + e).nonzero().flatten().tolist()
        assert sorted(slots[e, : counts[e]].tolist()) == want
        assert (slots[e, counts[e] :] == -7).all()


def test_buckets_from_ids_with_a_map_skip_strangers_and_minus_one() -> None:
    ids = torch.tensor([[0, 5], [-1, 3], [5, 1], [2, 9]], dtype=torch.int32, device=DEVICE)
    expert_map = torch.tensor([-1, 1, -1, 0, -1, 2], dtype=torch.int32, device=DEVICE)
    counts = torch.full((3,), 99, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(3, 8, dtype=torch.int32, device=DEVICE)
    fill_buckets(ids, counts, slots, num_experts=6, expert_map=expert_map)
    assert counts.tolist() == [1, 1, 2]
    assert slots[0, :1].tolist() == [3]
    assert slots[1, :1].tolist() == [5]
    assert sorted(slots[2, :2].tolist()) == [1, 4]


@pytest.mark.parametrize("most", [0, 10**6], ids=["counted", "scanned"])
@pytest.mark.parametrize("kind", ["spread", "one takes all", "nobody's"])
def test_buckets_of_many_experts(monkeypatch: pytest.MonkeyPatch, most: int, kind: str) -> None:
    """Both ways of listing, 288 experts: every valid slot once, nothing past the counts."""
    monkeypatch.setattr(moe_buckets, "SCAN_SLOTS", most)
    E, T, K = 288, 50, 6
    torch.manual_seed(7)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    ids[torch.rand(T, K) < 0.2] = -1
    if kind == "one takes all":
        ids[:] = 287
    elif kind == "nobody's":
        ids[:] = -1
    counts = torch.full((E,), 99, dtype=torch.int32, device=DEVICE)
    slots = torch.full((E, T * K), -7, dtype=torch.int32, device=DEVICE)
    fill_buckets(ids.to(DEVICE), counts, slots, num_experts=E)
    for e in range(E):
        want = (ids.flatten() == e).nonzero().flatten().tolist()
        listed = slots[e, : counts[e]].tolist()
        assert sorted(listed) == want
        assert most == 0 or listed == want
        assert (slots[e, counts[e] :] == -7).all()


@pytest.mark.parametrize("E", [128, 256])
def test_a_row_of_nan_names_the_first_k(E: int) -> None:
    rows = torch.randn(3, E)
    rows[1] = NAN
    weights, ids = route(rows.to(DEVICE), RoutingSpec(8))
    assert ids[1].tolist() == list(range(8))
    assert weights[1].tolist() == [0.125] * 8
    alone, alone_ids = route(rows[[0, 2]].to(DEVICE), RoutingSpec(8))
    assert torch.equal(ids[[0, 2]], alone_ids)
    assert torch.equal(weights[[0, 2]], alone)
