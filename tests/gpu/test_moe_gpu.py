"""The MoE layer on a GPU: every backend against float32, graphs against eager, large offsets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from moeserve.bench.moe import SHAPES, random_routed, relative_error
from moeserve.moe import triton_experts
from moeserve.moe.backends.base import Routed
from moeserve.moe.backends.registry import registry
from moeserve.moe.oracle import ask, convert_to_unquantized_kernel_format
from moeserve.moe.platforms import detect_platform
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.moe.tuning import LayerShape, LayerTiles
from moeserve.triton_kernels.grouped_gemm import Tile
from moeserve.triton_kernels.linear import linear_fixed
from moeserve.triton_kernels.router import route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# ||out - ref|| / ||ref|| of BF16 against float32; the peer's kernels are at 0.0039 to 0.0046.
LIMIT = 0.005
BACKENDS = ("triton", "torch_grouped_mm", "flashinfer_cutlass")


def layer_weights(shape: LayerShape) -> MoEWeights:
    w13 = torch.empty(shape.E, 2 * shape.I, shape.H, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(shape.E, shape.H, shape.I, device="cuda", dtype=torch.bfloat16)
    return MoEWeights(w13.normal_(std=shape.H**-0.5), w2.normal_(std=shape.I**-0.5))


def spec_of(shape: LayerShape, is_deterministic: bool = False) -> MoESpec:
    return MoESpec(
        shape.E, shape.H, shape.I, RoutingSpec(shape.K), platform=detect_platform(),
        needs_graph=True, is_deterministic=is_deterministic, max_num_tokens=16384,
    )  # fmt: skip


def backend_or_skip(name: str, spec: MoESpec) -> None:
    answer = ask(spec, name, registry())
    if not answer.ok:
        pytest.skip(f"{name}: {answer.reason}")


def apply(name: str, spec: MoESpec, x: torch.Tensor, routed: Routed, w: MoEWeights) -> torch.Tensor:
    return registry().get(name).apply(spec, x, routed, w)


def converted(name: str, w: MoEWeights) -> MoEWeights:
    copy = MoEWeights(w.w13.clone(), w.w2.clone())
    return convert_to_unquantized_kernel_format(registry().get(name), copy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "llama-4-scout"])
def test_error_at_real_sizes(backend: str, name: str) -> None:
    shape = SHAPES[name]
    spec = spec_of(shape)
    backend_or_skip(backend, spec)
    w = layer_weights(shape)
    ready = converted(backend, w)
    for T in (1, 2, 8, 64, 128, 512, 2048, 8192, 16384):
        for kind in ("uniform", "skewed"):
            x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
            routed = random_routed(shape, T, kind)
            error = relative_error(apply(backend, spec, x, routed, ready), x, routed, w)
            assert error <= LIMIT, (T, kind, error)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(seed: int) -> None:
    """Ten shapes a seed: sizes that are no multiple of a tile, odd expert counts, any T."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        E = rng.choice([4, 8, 10, 60, 64, 72, 128])
        shape = LayerShape(E, 8 * rng.randint(4, 96), 8 * rng.randint(4, 96), rng.choice([1, 2, 4]))
        T = rng.choice([1, 3, 17, 64, 200, 700])
        spec = spec_of(shape)
        w = layer_weights(shape)
        x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
        routed = random_routed(shape, T, rng.choice(["uniform", "skewed"]))
        error = relative_error(apply("triton", spec, x, routed, w), x, routed, w)
        assert error <= LIMIT, (shape, T, error)


DESCRIBED = LayerTiles(
    Tile(128, 128, 64, 8, 3, group_m=8, uses_tma=True, tail_m=32),
    Tile(128, 256, 64, 8, 4, group_m=8, is_persistent=True, uses_tma=True, tail_m=64),
)
SWAPPED = LayerTiles(
    Tile(64, 64, 64, 4, 3, group_m=2, is_swapped=True, tail_m=32),
    Tile(32, 128, 64, 4, 3, is_swapped=True, uses_tma=True, tail_m=16),
)
ARRANGED = LayerTiles(replace(DESCRIBED.gate_up, is_arranged=True), DESCRIBED.down)
FLAT = LayerTiles(
    Tile(128, 128, 64, 8, 3, group_m=8, uses_tma=True, is_arranged=True, is_persistent=True),
    Tile(64, 128, 64, 4, 3, uses_tma=True, is_persistent=True, programs_per_sm=2),
)
PATHS = {
    "described": DESCRIBED, "arranged": ARRANGED, "flat": FLAT, "swapped": SWAPPED,
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_every_kernel_at_sizes_that_are_no_multiple_of_a_tile(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Whole layers and halves of one: ids of the other rank and of nobody, then the sum of both."""
    monkeypatch.setattr(triton_experts, "tiles_for", lambda call: PATHS[path])
    for shape, T in (
        (LayerShape(10, 264, 392, 2), 777),
        (LayerShape(60, 520, 136, 4), 1000),
        (LayerShape(4, 1024, 512, 1), 3),
    ):
        torch.manual_seed(T)
        spec = spec_of(shape)
        w = layer_weights(shape)
        x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
        routed = random_routed(shape, T, "skewed")
        # Weights that sum to 1 hide a slot that is counted twice and another that is not.
        routed.topk_weights.uniform_(0.5, 1.5)
        whole = apply("triton", spec, x, routed, w)
        assert relative_error(whole, x, routed, w) <= LIMIT, shape
        total = torch.zeros_like(whole, dtype=torch.float32)
        first = shape.E // 2
        for here in (slice(0, first), slice(first, shape.E)):
            local = torch.full((shape.E,), -1, dtype=torch.int32, device="cuda")
            local[here] = torch.arange(here.stop - here.start, dtype=torch.int32, device="cuda")
            part = MoEWeights(w.w13[here].contiguous(), w.w2[here].contiguous())
            out = apply(
                "triton", spec, x, Routed(routed.topk_ids, routed.topk_weights, local), part
            )
            assert torch.isfinite(out).all()
            total += out.float()
        assert float((total - whole.float()).norm() / total.norm()) <= LIMIT, shape


def test_a_workspace_serves_a_large_batch_and_then_a_small_one() -> None:
    """What the large one left behind is not read by the small one."""
    shape = SHAPES["qwen3-30b-a3b"]
    spec = spec_of(shape)
    w = layer_weights(shape)
    size = registry().get("triton").workspace_bytes(spec, 4096)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")  # NaN in BF16
    for T in (4096, 1, 130, 2048, 7, 512):
        x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
        routed = random_routed(shape, T, "uniform")
        out = registry().get("triton").apply(spec, x, routed, w, workspace)
        assert torch.isfinite(out).all(), T
        assert relative_error(out, x, routed, w) <= LIMIT, T


def test_65537_tokens_equal_their_two_halves() -> None:
    shape = LayerShape(8, 512, 256, 2)
    spec = spec_of(shape)
    w = layer_weights(shape)
    T, cut = 65_537, 30_000
    x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
    routed = random_routed(shape, T, "uniform")
    whole = apply("triton", spec, x, routed, w)
    for part in (slice(0, cut), slice(cut, T)):
        half = Routed(routed.topk_ids[part], routed.topk_weights[part])
        out = apply("triton", spec, x[part], half, w)
        assert float((out.float() - whole[part].float()).norm() / out.float().norm()) <= LIMIT


# Of a layer of 128 experts at 64 tokens. A fault has to be seen at the smallest of its doses.
FAULTS = ("one expert wrong", "a row of a tile lost", "K tail dropped")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_limit_catches_every_dose(backend: str) -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    spec = spec_of(shape)
    backend_or_skip(backend, spec)
    w = layer_weights(shape)
    T = 64
    x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
    routed = random_routed(shape, T, "uniform")
    table = {
        "none": relative_error(apply(backend, spec, x, routed, converted(backend, w)), x, routed, w)
    }
    for fault in FAULTS:
        bad = MoEWeights(w.w13.clone(), w.w2.clone())
        if fault == "one expert wrong":
            used = int(routed.topk_ids[0, 0])
            bad.w2[used] = bad.w2[(used + 1) % shape.E]
        elif fault == "K tail dropped":
            bad.w13[:, :, -8:] = 0  # the last 16 bytes of 4 KiB
        out = apply(backend, spec, x, routed, converted(backend, bad))
        if fault == "a row of a tile lost":
            out[17] = 0
        table[fault] = relative_error(out, x, routed, w)
    print(backend, {name: f"{value:.4f}" for name, value in table.items()})
    assert table.pop("none") <= LIMIT
    assert min(table.values()) > 2 * LIMIT, table


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_graph_equals_eager_on_other_tokens(backend: str) -> None:
    shape = LayerShape(16, 512, 256, 4)
    spec = spec_of(shape)
    backend_or_skip(backend, spec)
    ready = converted(backend, layer_weights(shape))
    T = 48
    x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
    routed = random_routed(shape, T, "uniform")
    apply(backend, spec, x, routed, ready)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply(backend, spec, x, routed, ready)
    for _ in range(3):
        x.normal_()
        fresh = random_routed(shape, T, "skewed")
        routed.topk_ids.copy_(fresh.topk_ids)
        routed.topk_weights.copy_(fresh.topk_weights)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, apply(backend, spec, x, routed, ready))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "llama-4-scout"])
def test_deterministic_bits_do_not_depend_on_the_batch(name: str) -> None:
    """Counts that take every tile of deterministic mode give the same bits."""
    shape = SHAPES[name]
    spec = spec_of(shape, is_deterministic=True)
    w = layer_weights(shape)
    T = 4000
    x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
    routed = random_routed(shape, T, "uniform")
    whole = apply("triton", spec, x, routed, w)
    for rows in ([3], [T - 1, 0, 250], list(range(64)), list(range(100, 800)), list(range(2500))):
        part = Routed(routed.topk_ids[rows].contiguous(), routed.topk_weights[rows].contiguous())
        assert torch.equal(apply("triton", spec, x[rows], part, w), whole[rows]), len(rows)


@pytest.mark.parametrize(("N", "K"), [(5120, 2048), (2048, 4096), (128, 2048), (4000, 1000)])
def test_fixed_projection_bits_do_not_depend_on_the_batch(N: int, K: int) -> None:
    x = torch.randn(3000, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
    whole = linear_fixed(x, w)
    want = x.float() @ w.float().T
    assert float((whole.float() - want).norm() / want.norm()) < LIMIT
    for rows in ([5], list(range(10, 50)), list(range(200)), list(range(7, 2000))):
        assert torch.equal(linear_fixed(x[rows], w), whole[rows]), len(rows)


def test_padding_rows_of_nan_leave_real_rows_alone() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    spec = spec_of(shape)
    w = layer_weights(shape)
    x = torch.randn(48, shape.H, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(48, shape.E, device="cuda", dtype=torch.bfloat16)
    outs = []
    for fill in (0.0, float("nan"), float("inf")):
        x[35:] = fill
        logits[35:] = fill
        weights, ids = route(logits, spec.routing)
        assert all(len(set(row)) == shape.K for row in ids.tolist())
        outs.append(apply("triton", spec, x, Routed(ids, weights), w)[:35].clone())
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_token_131079_equals_token_0() -> None:
    """T * K * H passes 2**31 elements: an int32 offset would land in front of the buffer."""
    T, shape = 131_080, LayerShape(8, 2048, 64, 8)
    spec = spec_of(shape)
    w = layer_weights(shape)
    x = torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16)
    routed = random_routed(shape, T, "uniform")
    x[-1] = x[0]
    routed.topk_ids[-1] = routed.topk_ids[0]
    routed.topk_weights[-1] = routed.topk_weights[0]
    out = apply("triton", spec, x, routed, w)
    assert torch.equal(out[-1], out[0])
    one = Routed(routed.topk_ids[:1], routed.topk_weights[:1])
    alone = apply("triton", spec, x[:1], one, w)
    assert float((alone.float() - out[:1].float()).norm() / out[:1].float().norm()) < LIMIT


@pytest.mark.parametrize("E", [8, 60, 72, 128, 160, 256, 288])
def test_router_against_torch(E: int) -> None:
    torch.manual_seed(E)
    logits = torch.randn(1000, E, device="cuda", dtype=torch.bfloat16)
    # Distinct values: torch.topk leaves ties open.
    logits = logits.float() + torch.arange(E, device="cuda") * 1e-5
    weights, ids = route(logits, RoutingSpec(4))
    top = torch.topk(torch.softmax(logits.double(), -1), 4, dim=-1)
    assert torch.equal(ids.long(), top.indices)
    want = (top.values / top.values.sum(-1, keepdim=True)).float()
    torch.testing.assert_close(weights, want, atol=1e-5, rtol=1e-5)
