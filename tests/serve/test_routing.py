"""Routing in torch against the float64 definition, and every fault that was reported of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_helpers import make_spec

from moeserve.moe.reference import reference_routing
from moeserve.moe.routing import route
from moeserve.moe.spec import RoutingSpec

NAN, INF = math.nan, math.inf
FORMS = {
    "softmax": RoutingSpec(4),
    "softmax, no renormalisation": RoutingSpec(4, is_renormalized=False),
    "sigmoid": RoutingSpec(4, scoring="sigmoid"),
    "sigmoid, no renormalisation": RoutingSpec(4, scoring="sigmoid", is_renormalized=False),
    "softmax, bias": RoutingSpec(4, has_bias=True),
    "deepseek": RoutingSpec(
        4, scoring="sigmoid", has_bias=True, num_groups=4, top_k_groups=2, scaling_factor=2.5
    ),
    "groups without bias": RoutingSpec(4, num_groups=4, top_k_groups=2, is_renormalized=False),
    "llama4": RoutingSpec(1, scoring="sigmoid", is_renormalized=False, weight_on_input=True),
}


def bias_for(form: RoutingSpec, num_experts: int) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(num_experts, generator=generator) * 0.3 if form.has_bias else None


def check(logits: torch.Tensor, form: RoutingSpec) -> None:
    bias = bias_for(form, logits.shape[1])
    topk = route(logits, form, bias)
    weights, ids = reference_routing(logits.float(), form, bias)
    assert topk.ids.dtype == torch.int32
    assert topk.weights.dtype == torch.float32
    assert torch.equal(topk.ids.long(), ids)
    torch.testing.assert_close(topk.weights.double(), weights, rtol=2e-6, atol=1e-7)
    assert all(len(set(row)) == form.top_k for row in topk.ids.tolist())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("num_experts", [8, 60, 64, 72, 128, 160, 256, 288])
def test_any_number_of_experts_equals_the_definition(form: RoutingSpec, num_experts: int) -> None:
    for num_tokens in (0, 1, 7, 65):
        check(torch.randn(num_tokens, num_experts), form)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bf16_logits_equal_float32_ones_of_the_same_value(form: RoutingSpec) -> None:
    rounded = torch.randn(64, 64).bfloat16()
    bias = bias_for(form, 64)
    narrow, wide = route(rounded, form, bias), route(rounded.float(), form, bias)
    assert torch.equal(narrow.ids, wide.ids)
    assert torch.equal(narrow.weights, wide.weights)


SPECIAL = st.one_of(
    st.floats(-80, 80, width=32), st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1e30, -1e30, 3e38])
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(SPECIAL, min_size=8, max_size=8), min_size=1, max_size=4),
    form=st.sampled_from(sorted(FORMS)),
)
def test_any_values_give_distinct_ids_and_finite_weights(
    rows: list[list[float]], form: str
) -> None:
    routing = FORMS[form]
    topk = route(torch.tensor(rows), routing, bias_for(routing, 8))
    for row, ids, weights in zip(rows, topk.ids.tolist(), topk.weights.tolist(), strict=True):
        assert len(set(ids)) == routing.top_k
        assert all(0 <= e < 8 for e in ids)
        assert all(math.isfinite(w) and w >= 0 for w in weights)
        if routing.num_groups == 1:
            good = sum(not math.isnan(v) and v > -INF for v in row)
            taken = sum(math.isnan(row[e]) or row[e] == -INF for e in ids)
            # An expert without a number is taken only where others run out.
            if good:
                assert taken == max(0, routing.top_k - good)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(8, 4), (8, 8), (60, 8), (72, 6), (160, 6), (256, 8), (288, 8)]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rows_without_a_finite_value(
    num_experts: int, top_k: int, value: float, dtype: torch.dtype
) -> None:
    logits = torch.full((3, num_experts), value, dtype=dtype)
    topk = route(logits, RoutingSpec(top_k))
    assert topk.ids.tolist() == [list(range(top_k))] * 3
    torch.testing.assert_close(topk.weights, torch.full((3, top_k), 1 / top_k))
    plain = route(logits, RoutingSpec(top_k, is_renormalized=False))
    assert plain.ids.tolist() == [list(range(top_k))] * 3
    torch.testing.assert_close(plain.weights, torch.full((3, top_k), 1 / num_experts))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("num_experts", [8, 60, 160])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_rows_with_few_numbers_equal_the_definition(
    form: RoutingSpec, num_experts: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(40, num_experts, generator=generator)
    logits[torch.rand(40, num_experts, generator=generator) < share] = NAN
    logits[::4] = logits[::4].nan_to_num(-INF)
    check(logits, form)


def test_one_nan_keeps_the_valid_scores() -> None:
    batch = torch.tensor([[NAN, 2.0, 1.0, 0.0], [2.0, 1.0, 0.0, -1.0]])
    topk = route(batch, RoutingSpec(2))
    assert topk.ids.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(topk.weights[0], torch.tensor([0.7310586, 0.2689414]))
    masked = route(torch.tensor([[-INF, 2.0, 1.0, 0.0]]), RoutingSpec(2))
    assert torch.equal(topk.ids[:1], masked.ids)
    assert torch.equal(topk.weights[:1], masked.weights)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_clean_rows_keep_their_bits_beside_nan_rows(form: RoutingSpec) -> None:
    clean = torch.randn(16, 32)
    dirty = torch.full((5, 32), NAN)
    bias = bias_for(form, 32)
    alone, beside = route(clean, form, bias), route(torch.cat([dirty, clean]), form, bias)
    assert torch.equal(alone.ids, beside.ids[5:])
    assert torch.equal(alone.weights, beside.weights[5:])


def test_input_is_not_written() -> None:
    logits = torch.tensor([[NAN, 1.0, INF, 0.0]])
    before = logits.clone()
    route(logits, RoutingSpec(2))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


def test_nan_rows_are_counted() -> None:
    counter = torch.zeros(1, dtype=torch.int64)
    logits = torch.randn(6, 8)
    route(logits, RoutingSpec(2), nan_rows=counter)
    assert int(counter) == 0
    logits[1, 3] = NAN
    logits[4] = NAN
    logits[5, 0] = INF
    route(logits, RoutingSpec(2), nan_rows=counter)
    assert int(counter) == 2


@pytest.mark.parametrize("form", [RoutingSpec(3), RoutingSpec(3, scoring="sigmoid", has_bias=True)])
def test_ties_go_to_the_lowest_id(form: RoutingSpec) -> None:
    bias = torch.zeros(6) if form.has_bias else None
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 3.0, 0.0, 3.0, 3.0]])
    for _ in range(3):
        assert route(logits, form, bias).ids.tolist() == [[0, 1, 2], [1, 2, 4]]


def test_all_negative_logits_choose_as_after_a_shift() -> None:
    logits = torch.randn(32, 64).abs().neg() * 4
    low, high = route(logits, RoutingSpec(6)), route(logits + 8.0, RoutingSpec(6))
    assert torch.equal(low.ids, high.ids)
    torch.testing.assert_close(low.weights, high.weights, rtol=1e-5, atol=1e-7)


def test_softmax_weights_with_and_without_renormalisation() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = route(logits, RoutingSpec(2, is_renormalized=False))
    torch.testing.assert_close(plain.weights, torch.tensor([[0.64391, 0.23688]]), rtol=0, atol=5e-6)
    unit = route(logits, RoutingSpec(2))
    torch.testing.assert_close(unit.weights, torch.tensor([[0.73106, 0.26894]]), rtol=0, atol=5e-6)
    assert plain.ids.tolist() == unit.ids.tolist() == [[0, 1]]


def test_scaling_factor_counts_once() -> None:
    logits = torch.randn(9, 16)
    for scoring in ("softmax", "sigmoid"):
        base = route(logits, RoutingSpec(4, scoring=scoring))  # type: ignore[arg-type]
        scaled = route(logits, RoutingSpec(4, scoring=scoring, scaling_factor=2.5))  # type: ignore[arg-type]
        torch.testing.assert_close(base.weights.sum(-1), torch.ones(9))
        torch.testing.assert_close(scaled.weights, base.weights * 2.5)


def test_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    form = RoutingSpec(2, scoring="sigmoid", has_bias=True, is_renormalized=False)
    topk = route(logits, form, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert topk.ids.tolist() == [[3, 0]]
    torch.testing.assert_close(topk.weights, logits[:, [3, 0]].sigmoid())


def test_groups_not_kept_lose_even_with_negative_scores() -> None:
    # Masking with 0 instead of -inf would let experts of dropped groups win here.
    form = RoutingSpec(2, scoring="sigmoid", has_bias=True, num_groups=4, top_k_groups=1)
    logits = torch.randn(64, 16)
    ids = route(logits, form, torch.full((16,), -10.0)).ids
    assert (ids // 4 == (ids // 4)[:, :1]).all()
    check(logits, form)


def test_group_score_is_the_sum_of_two_with_a_bias_and_the_largest_without() -> None:
    # Group 0 has the best expert, group 1 the best pair.
    logits = torch.tensor([[4.0, -9.0, 2.0, 2.0]])
    largest = RoutingSpec(1, scoring="sigmoid", num_groups=2, top_k_groups=1)
    assert route(logits, largest).ids.tolist() == [[0]]
    pair = RoutingSpec(1, scoring="sigmoid", has_bias=True, num_groups=2, top_k_groups=1)
    assert route(logits, pair, torch.zeros(4)).ids.tolist() == [[2]]


def test_one_expert_per_group() -> None:
    form = RoutingSpec(3, scoring="sigmoid", has_bias=True, num_groups=8, top_k_groups=3)
    logits = torch.randn(20, 8)
    bias = torch.randn(8)
    expected = (logits.sigmoid() + bias).topk(3).indices
    assert torch.equal(route(logits, form, bias).ids.long(), expected)


def test_nan_expert_of_a_kept_group_beats_a_dropped_group() -> None:
    form = RoutingSpec(2, scoring="sigmoid", has_bias=True, num_groups=2, top_k_groups=1)
    logits = torch.tensor([[9.0, 9.0, NAN, -30.0]])
    ids = route(logits, form, torch.tensor([-5.0, -5.0, 9.0, 9.0])).ids.tolist()
    assert ids == [[0, 1]]  # the NaN makes group 1 the worse one
    only_nan = torch.tensor([[NAN, 1.0, -50.0, -50.0]])
    form = RoutingSpec(2, num_groups=2, top_k_groups=1)
    assert route(only_nan, form).ids.tolist() == [[1, 0]]


def test_underflow_does_not_hide_a_nan() -> None:
    # softmax gives 0 to everything but expert 0; NaN at 1 must not win that tie.
    topk = route(torch.tensor([[1000.0, NAN, 0.0, -1.0]]), RoutingSpec(3))
    assert topk.ids.tolist() == [[0, 2, 3]]


def test_sigmoid_weights_that_all_underflow_are_equal() -> None:
    topk = route(torch.full((1, 4), -200.0), RoutingSpec(2, scoring="sigmoid"))
    assert topk.weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2, "num_groups": 2, "top_k_groups": 3}, "top_k_groups=3"),
        ({"top_k": 2, "weight_on_input": True}, "weight_on_input with top_k=2"),
        ({"top_k": 2, "scoring": "tanh"}, "scoring='tanh'"),
    ],
)
def test_impossible_routing_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingSpec(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (RoutingSpec(9), "top_k=9 exceeds the 8 experts"),
        (RoutingSpec(5, num_groups=4, top_k_groups=2), "top_k=5 exceeds the 4 experts"),
        (RoutingSpec(2, num_groups=3), "num_groups=3 does not divide num_experts=8"),
    ],
)
def test_impossible_layer_is_refused(routing: RoutingSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(routing=routing)
