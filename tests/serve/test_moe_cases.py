"""Experts against float64, and the faults that were reported of kernels like these."""

from __future__ import annotations

import pytest
import torch
from moe_helpers import (
    TOLERANCE,
    gate_weight,
    logits,
    make_layer,
    make_spec,
    on,
    random_weights,
    relative_error,
    tokens,
)

from moeserve.moe.backends.base import Routed
from moeserve.moe.backends.common import sort_slots
from moeserve.moe.backends.registry import registry
from moeserve.moe.dispatch import expert_map
from moeserve.moe.reference import reference_experts
from moeserve.moe.routing import TopK, route
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec

BACKENDS = ["cpu", "torch_grouped_mm"]
LLAMA4 = RoutingSpec(1, scoring="sigmoid", is_renormalized=False, weight_on_input=True)


def run(
    name: str,
    spec: MoESpec,
    x: torch.Tensor,
    topk: TopK,
    weights: MoEWeights,
    mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    return registry().get(name).apply(spec, x, Routed(topk.ids, topk.weights, mapping), weights)


def reference(spec: MoESpec, x: torch.Tensor, topk: TopK, weights: MoEWeights) -> torch.Tensor:
    return reference_experts(spec, x, topk.weights, topk.ids, weights.w13, weights.w2)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 33])
def test_experts_equal_float64(
    name: str, dtype: torch.dtype, activation: str, num_tokens: int
) -> None:
    spec = make_spec(dtype=dtype, activation=activation, routing=RoutingSpec(3))
    weights, x = random_weights(spec), tokens(spec, num_tokens)
    if activation == "swiglu_oai":  # large enough for the limits to bite
        weights.w13.mul_(6)
    topk = route(logits(spec, num_tokens), spec.routing)
    out = run(name, spec, x, topk, weights)
    assert out.dtype == dtype
    assert relative_error(out, reference(spec, x, topk, weights)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("num_experts", "hidden", "width", "top_k"),
    [
        (60, 40, 24, 4),
        (72, 16, 88, 6),
        (160, 64, 8, 6),
        (288, 8, 16, 8),
        (2, 704, 24, 2),
        (3, 2816, 704, 2),
    ],
)
def test_odd_sizes(name: str, num_experts: int, hidden: int, width: int, top_k: int) -> None:
    spec = make_spec(num_experts, hidden, width, routing=RoutingSpec(top_k))
    weights, x = random_weights(spec), tokens(spec, 21)
    topk = route(logits(spec, 21), spec.routing)
    error = relative_error(run(name, spec, x, topk, weights), reference(spec, x, topk, weights))
    assert error < TOLERANCE[torch.float32]


def test_cpu_takes_sizes_that_are_no_multiple_of_anything() -> None:
    spec = make_spec(5, 37, 13)
    weights, x = random_weights(spec), tokens(spec, 21)
    topk = route(logits(spec, 21), spec.routing)
    error = relative_error(run("cpu", spec, x, topk, weights), reference(spec, x, topk, weights))
    assert error < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", BACKENDS)
def test_gate_rows_come_before_up_rows(name: str) -> None:
    spec = make_spec()
    weights, x = random_weights(spec), tokens(spec, 9)
    topk = route(logits(spec, 9), spec.routing)
    swapped = MoEWeights(weights.w13.roll(spec.intermediate_size, dims=1), weights.w2)
    right = reference(spec, x, topk, weights)
    assert relative_error(run(name, spec, x, topk, weights), right) < TOLERANCE[torch.float32]
    assert relative_error(run(name, spec, x, topk, swapped), right) > 0.3


@pytest.mark.parametrize("name", BACKENDS)
def test_swiglu_oai_is_not_plain_swiglu(name: str) -> None:
    spec = make_spec(activation="swiglu_oai")
    weights, x = random_weights(spec), tokens(spec, 9)
    topk = route(logits(spec, 9), spec.routing)
    plain = run(name, on(spec, activation="silu"), x, topk, weights)
    assert relative_error(run(name, spec, x, topk, weights), plain) > 0.3


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 12, 40])
def test_inputs_are_not_written(name: str, num_tokens: int) -> None:
    for routing in (RoutingSpec(2), LLAMA4):
        spec = make_spec(routing=routing)
        weights, x = random_weights(spec), tokens(spec, num_tokens)
        topk = route(logits(spec, num_tokens), routing)
        held = [x, topk.weights, topk.ids, weights.w13, weights.w2]
        copies = [t.clone() for t in held]
        out = run(name, spec, x, topk, weights)
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
        assert out.data_ptr() not in {t.data_ptr() for t in held}


@pytest.mark.parametrize("name", BACKENDS)
def test_no_tokens(name: str) -> None:
    spec = make_spec()
    topk = TopK(torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32))
    assert run(name, spec, tokens(spec, 0), topk, random_weights(spec)).shape == (0, 32)
    layer = make_layer(spec, random_weights(spec), gate_weight(spec), backend=name)
    assert layer(tokens(spec, 0)).shape == (0, 32)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_tokens", [4, 100])
def test_one_expert_takes_all_tokens(name: str, num_tokens: int) -> None:
    spec = make_spec()
    weights, x = random_weights(spec), tokens(spec, num_tokens)
    values = logits(spec, num_tokens)
    values[:, 5] = 50.0
    topk = route(values, spec.routing)
    assert (topk.ids[:, 0] == 5).all()
    error = relative_error(run(name, spec, x, topk, weights), reference(spec, x, topk, weights))
    assert error < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_tokens", [3, 50])
def test_minus_one_adds_exactly_zero(name: str, num_tokens: int) -> None:
    spec = make_spec()
    weights, x = random_weights(spec), tokens(spec, num_tokens)
    topk = route(logits(spec, num_tokens), spec.routing)
    topk.ids[::3] = -1  # whole rows of nobody
    topk.ids[1::3, 0] = -1
    out = run(name, spec, x, topk, weights)
    assert torch.equal(out[::3], torch.zeros_like(out[::3]))
    assert relative_error(out, reference(spec, x, topk, weights)) < TOLERANCE[torch.float32]
    nobody = TopK(topk.weights, torch.full_like(topk.ids, -1))
    assert torch.equal(run(name, spec, x, nobody, weights), torch.zeros_like(x))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("num_experts", "ranks"), [(5, 2), (10, 4), (128, 6), (2, 4)])
def test_expert_maps_of_an_uneven_split(name: str, num_experts: int, ranks: int) -> None:
    spec = make_spec(num_experts, ep_size=ranks)
    weights, x = random_weights(spec), tokens(spec, 23)
    topk = route(logits(spec, 23), spec.routing)
    total = torch.zeros(23, 32)
    owned: list[int] = []
    for rank in range(ranks):
        mine = on(spec, ep_rank=rank)
        part = slice(mine.first_local_expert, mine.first_local_expert + mine.num_local_experts)
        owned += range(num_experts)[part]
        mapping = expert_map(mine, torch.device("cpu"))
        local = MoEWeights(weights.w13[part], weights.w2[part])
        out = run(name, mine, x, topk, local, mapping)
        assert out.shape == x.shape
        assert not out.isnan().any()
        total += out
    assert owned == list(range(num_experts))
    assert relative_error(total, reference(spec, x, topk, weights)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("num_experts", "ranks", "counts"),
    [(5, 2, [3, 2]), (128, 6, [22, 22, 21, 21, 21, 21]), (2, 4, [1, 1, 0, 0]),
     (10, 4, [3, 3, 2, 2])],
)  # fmt: skip
def test_uneven_splits(num_experts: int, ranks: int, counts: list[int]) -> None:
    spec = make_spec(num_experts, ep_size=ranks)
    assert [on(spec, ep_rank=r).num_local_experts for r in range(ranks)] == counts


@pytest.mark.parametrize("name", BACKENDS)
def test_every_token_routed_to_the_other_rank(name: str) -> None:
    spec = make_spec(ep_size=2)
    weights, x = random_weights(spec), tokens(spec, 20)
    values = logits(spec, 20)
    values[:, :4] = -torch.inf
    topk = route(values, spec.routing)
    local = MoEWeights(weights.w13[:4], weights.w2[:4])
    out = run(name, spec, x, topk, local, expert_map(spec, torch.device("cpu")))
    assert torch.equal(out, torch.zeros_like(x))


@pytest.mark.parametrize("name", BACKENDS)
def test_llama4_weight_goes_on_the_input(name: str) -> None:
    # One expert, all sizes 1, all weights 1, x = 1, logit 0: silu(0.5) · 0.5 = 0.15561. The weight
    # on the output would give 0.36553, a softmax over one expert 0.73106.
    spec = make_spec(1, 8, 8, routing=LLAMA4)
    ones = MoEWeights(torch.zeros(1, 16, 8), torch.zeros(1, 8, 8))
    ones.w13[0, 0, 0] = ones.w13[0, 8, 0] = ones.w2[0, 0, 0] = 1.0
    layer = make_layer(spec, ones, torch.zeros(1, 8), backend=name)
    x = torch.zeros(1, 8)
    x[0, 0] = 1.0
    assert float(layer(x)[0, 0]) == pytest.approx(0.15561, abs=5e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_llama4_weight_is_applied_once(name: str, num_tokens: int) -> None:
    spec = make_spec(routing=LLAMA4)
    weights, x = random_weights(spec), tokens(spec, num_tokens)
    topk = TopK(torch.full((num_tokens, 1), 0.3), route(logits(spec, num_tokens), LLAMA4).ids)
    out = run(name, spec, x, topk, weights)
    plain = make_spec(routing=RoutingSpec(1))
    ones = TopK(torch.ones(num_tokens, 1), topk.ids)
    torch.testing.assert_close(out, run(name, plain, x * 0.3, ones, weights), rtol=1e-5, atol=1e-6)
    assert relative_error(out, run(name, plain, x, topk, weights)) > 0.1


def test_offsets_beyond_31_bits_are_refused_or_int64() -> None:
    # 131,072 rows of 16,384 begin at 2^31. Row numbers are int64 here; a library whose rows are
    # int32 refuses a layer that could get there.
    slots = sort_slots(torch.zeros(8, 2, dtype=torch.int32), 4)
    assert slots.order.dtype == torch.int64
    spec = make_spec(128, 2048, 768, routing=RoutingSpec(8), dtype=torch.bfloat16)
    cutlass = registry().get("flashinfer_cutlass")
    assert cutlass.limits(on(spec, max_num_tokens=2_097_151)) == ""
    assert "over int32" in cutlass.limits(on(spec, max_num_tokens=2_097_152))


@pytest.mark.parametrize("name", BACKENDS)
def test_more_than_64k_tokens(name: str) -> None:
    spec = make_spec(4, 8, 8, routing=RoutingSpec(1))
    weights, x = random_weights(spec), tokens(spec, 65_537)
    topk = route(logits(spec, 65_537), spec.routing)
    whole = run(name, spec, x, topk, weights)
    cut = 30_000
    parts = [
        run(name, spec, x[s], TopK(topk.weights[s], topk.ids[s]), weights)
        for s in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-6)
