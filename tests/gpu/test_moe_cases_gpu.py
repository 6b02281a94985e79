"""Faults that were reported of MoE kernels, on a GPU, through every backend that runs there.

The same inputs as on a CPU (`tests/serve/test_moe_cases.py`, `test_routing.py`,
`test_conversion.py`); errors at real sizes are `test_moe_gpu.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moeserve.bench.moe import random_routed, relative_error
from moeserve.layers.moe import MoELayer
from moeserve.moe.backends.base import Routed
from moeserve.moe.backends.registry import registry
from moeserve.moe.dispatch import expert_map
from moeserve.moe.oracle import (
    ask,
    convert_to_unquantized_kernel_format,
    select_unquantized_moe_backend,
)
from moeserve.moe.platforms import detect_platform
from moeserve.moe.reference import reference_routing
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.moe.tuning import LayerShape
from moeserve.triton_kernels.router import route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda"
LIMIT = 0.005
BACKENDS = ("triton", "torch_grouped_mm", "flashinfer_cutlass")
LLAMA4 = RoutingSpec(1, scoring="sigmoid", is_renormalized=False, weight_on_input=True)
NAN, INF = math.nan, math.inf


def spec_for(backend: str, shape: LayerShape, **fields: object) -> MoESpec:
    """The layer's spec; skips where the backend refuses it, with its reason."""
    defaults: dict[str, object] = {
        "routing": RoutingSpec(shape.K), "platform": detect_platform(), "max_num_tokens": 16384,
    }  # fmt: skip
    spec = MoESpec(shape.E, shape.H, shape.I, **{**defaults, **fields})  # type: ignore[arg-type]
    answer = ask(spec, backend, registry())
    if not answer.ok:
        pytest.skip(f"{backend}: {answer.reason}")
    return spec


def weights_of(shape: LayerShape) -> MoEWeights:
    w13 = torch.randn(shape.E, 2 * shape.I, shape.H, device=DEVICE) * shape.H**-0.5
    w2 = torch.randn(shape.E, shape.H, shape.I, device=DEVICE) * shape.I**-0.5
    return MoEWeights(w13.bfloat16(), w2.bfloat16())


def converted(backend: str, w: MoEWeights) -> MoEWeights:
    copy = MoEWeights(w.w13.clone(), w.w2.clone())
    return convert_to_unquantized_kernel_format(registry().get(backend), copy)


def apply(
    backend: str, spec: MoESpec, x: torch.Tensor, routed: Routed, w: MoEWeights
) -> torch.Tensor:
    """The backend's output, in memory that held NaN before."""
    experts = registry().get(backend)
    scratch = torch.full(
        (experts.workspace_bytes(spec, x.shape[0]),), 255, dtype=torch.uint8, device=DEVICE
    )
    dirt = torch.full_like(x, NAN)
    del dirt  # the allocator hands it out again
    return experts.apply(spec, x, routed, w, scratch)


def tokens(shape: LayerShape, T: int) -> torch.Tensor:
    return torch.randn(T, shape.H, device=DEVICE, dtype=torch.bfloat16)


ROUTINGS = {
    "softmax": RoutingSpec(4),
    "not renormalised": RoutingSpec(4, is_renormalized=False),
    "sigmoid": RoutingSpec(4, scoring="sigmoid"),
    "groups": RoutingSpec(4, scoring="sigmoid", has_bias=True, num_groups=4, top_k_groups=2,
                          scaling_factor=2.5),
    "llama4": LLAMA4,
}  # fmt: skip


@pytest.mark.parametrize("E", [8, 60, 72, 128, 160, 288])
@pytest.mark.parametrize("form", ROUTINGS)
def test_router_rules_on_odd_rows(form: str, E: int) -> None:
    """Compiled, 10 % of the rows NaN; distinct ids everywhere, clean rows bit for bit."""
    routing = ROUTINGS[form]
    generator = torch.Generator().manual_seed(E)
    bias = torch.randn(E, generator=generator) if routing.has_bias else None
    rows = torch.randn(300, E, generator=generator)
    rows[:6] = torch.tensor([NAN, INF, -INF, 0.0, -50.0, 50.0])[:, None]
    rows[6, 0], rows[7, 1], rows[8, :-1] = NAN, INF, NAN
    on_device = None if bias is None else bias.to(DEVICE)
    clean = torch.arange(300) % 10 != 9
    spoiled = rows.clone()
    spoiled[~clean] = NAN
    plain = route(rows.to(DEVICE), routing, on_device)
    weights, ids = (t.cpu() for t in route(spoiled.to(DEVICE), routing, on_device))
    want_weights, want_ids = reference_routing(spoiled, routing, bias)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights.double(), want_weights, atol=1e-5, rtol=1e-5)
    assert all(len(set(row)) == routing.top_k for row in ids.tolist())
    assert torch.equal(weights[clean], plain[0].cpu()[clean])
    assert torch.equal(ids[clean], plain[1].cpu()[clean])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_rows_reach_no_other_row(backend: str) -> None:
    shape = LayerShape(60, 512, 256, 4)
    spec = spec_for(backend, shape)
    ready = converted(backend, weights_of(shape))
    x = tokens(shape, 64)
    logits = torch.randn(64, shape.E, device=DEVICE, dtype=torch.bfloat16)
    outs = []
    for fill in (0.0, NAN, INF, -INF):
        x[40:] = fill
        logits[40:] = fill
        weights, ids = route(logits, spec.routing)
        assert ids[40:].tolist() == [[0, 1, 2, 3]] * 24
        outs.append(apply(backend, spec, x, Routed(ids, weights), ready)[:40].clone())
    assert torch.isfinite(outs[0]).all()
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 64])
def test_llama4_weight_goes_on_the_input(backend: str, T: int) -> None:
    """silu(0.5) * 0.5 = 0.15561; the weight on the output would give 0.36553."""
    shape = LayerShape(1, 64, 64, 1)
    spec = spec_for(backend, shape, routing=LLAMA4)
    w = MoEWeights(
        torch.zeros(1, 128, 64, device=DEVICE, dtype=torch.bfloat16),
        torch.zeros(1, 64, 64, device=DEVICE, dtype=torch.bfloat16),
    )
    w.w13[0, 0, 0] = w.w13[0, 64, 0] = w.w2[0, 0, 0] = 1.0
    x = torch.zeros(T, 64, device=DEVICE, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    weights, ids = route(torch.zeros(T, 1, device=DEVICE), LLAMA4)
    out = apply(backend, spec, x, Routed(ids, weights), converted(backend, w))
    assert out[:, 0].tolist() == pytest.approx([0.15561] * T, rel=4e-3)  # bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape", [LayerShape(128, 2816, 704, 8), LayerShape(8, 2048, 72, 2)], ids=str
)
def test_sizes_that_are_no_multiple_of_a_tile(backend: str, shape: LayerShape) -> None:
    spec = spec_for(backend, shape)
    w = weights_of(shape)
    for T in (1, 33, 700):
        x, routed = tokens(shape, T), random_routed(shape, T, "uniform")
        out = apply(backend, spec, x, routed, converted(backend, w))
        # One token's activations are few numbers to average roundings over.
        assert relative_error(out, x, routed, w) <= (LIMIT if T > 1 else 2 * LIMIT), T


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("E", "ranks"), [(8, 2), (5, 2), (10, 4), (2, 4)])
@pytest.mark.parametrize("T", [3, 200])
def test_ranks_sum_to_the_whole_and_nobodys_slots_add_zero(
    backend: str, E: int, ranks: int, T: int
) -> None:
    shape = LayerShape(E, 512, 256, 2)
    spec = spec_for(backend, shape, ep_size=ranks)
    w = weights_of(shape)
    x, routed = tokens(shape, T), random_routed(shape, T, "uniform")
    routed.topk_ids[::3, 1] = -1
    routed.topk_ids[2] = -1
    total = torch.zeros(T, shape.H, device=DEVICE)
    for rank in range(ranks):
        mine = replace(spec, ep_rank=rank)
        here = slice(mine.first_local_expert, mine.first_local_expert + mine.num_local_experts)
        local = converted(backend, MoEWeights(w.w13[here], w.w2[here]))
        mapping = expert_map(mine, torch.device(DEVICE))
        part = Routed(routed.topk_ids, routed.topk_weights, mapping)
        out = apply(backend, mine, x, part, local)
        assert out.shape == x.shape
        assert torch.equal(out[2], torch.zeros_like(out[2]))
        total += out.float()
        # The expert behind this rank's last one is another rank's.
        elsewhere = torch.tensor([[here.stop % E, -1]] * T, dtype=torch.int32, device=DEVICE)
        away = apply(backend, mine, x, replace(part, topk_ids=elsewhere), local)
        assert torch.equal(away, torch.zeros_like(away))
    # Each rank rounds its own sum.
    assert relative_error(total, x, routed, w) <= 2 * LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_activations_beyond_31_bits(backend: str) -> None:
    """131,080 tokens, K = 8, I = 2048: row 1,048,576 of the activations begins at 2^31."""
    T, shape = 131_080, LayerShape(8, 64, 2048, 8)
    spec = spec_for(backend, shape, max_num_tokens=T)
    ready = converted(backend, weights_of(shape))
    x, routed = tokens(shape, T), random_routed(shape, T, "uniform")
    x[-1] = x[0]
    routed.topk_ids[-1] = routed.topk_ids[0]
    routed.topk_weights[-1] = routed.topk_weights[0]
    out = apply(backend, spec, x, routed, ready).float()
    assert float((out[-1] - out[0]).norm() / out[0].norm()) <= LIMIT
    one = Routed(routed.topk_ids[:1], routed.topk_weights[:1])
    alone = apply(backend, spec, x[:1], one, ready).float()
    assert float((out[-1] - alone[0]).norm() / alone.norm()) <= LIMIT


@pytest.mark.parametrize("name", sorted(registry().in_tree))
def test_conversion_takes_about_one_expert_of_memory(name: str) -> None:
    w = weights_of(LayerShape(64, 2048, 768, 8))
    one_expert = w.w13[0].nbytes + w.w2[0].nbytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    convert_to_unquantized_kernel_format(registry().get(name), w)
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * one_expert


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_graph_takes_reloaded_weights(backend: str) -> None:
    """Same addresses, new numbers, converted once: a replay gives the new layer's result."""
    shape = LayerShape(16, 512, 256, 4)
    spec = spec_for(backend, shape, needs_graph=True)
    plan = select_unquantized_moe_backend(spec, backend)
    gate = torch.randn(shape.E, shape.H, device=DEVICE) * shape.H**-0.5

    def load(layer: MoELayer, w: MoEWeights) -> MoELayer:
        layer.gate_weight.copy_(gate)
        layer.w13_weight.copy_(w.w13)
        layer.w2_weight.copy_(w.w2)
        layer.process_weights()
        return layer

    old, new = weights_of(shape), weights_of(shape)
    layer = load(MoELayer(spec, plan, DEVICE), old)
    x = tokens(shape, 48)
    before = layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, before)
    load(layer, new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, load(MoELayer(spec, plan, DEVICE), new)(x))
    assert not torch.equal(out, before)
