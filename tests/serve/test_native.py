"""Kernels in C against torch: norm, router, experts; and a machine that cannot compile them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from moe_helpers import logits, make_layer, make_spec, random_weights, relative_error, tokens

from moeserve.layers.attention import AttentionShape
from moeserve.layers.attention_native import obstacle
from moeserve.layers.norm import RMSNorm
from moeserve.moe.backends.base import Routed, Unrouted
from moeserve.moe.oracle import registry
from moeserve.moe.reference import reference_experts
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.native import build

needs_compiler = pytest.mark.skipif(
    bool(build.native().reason), reason=build.native().reason or "never"
)
NAN, INF = float("nan"), float("inf")


def prepared(spec: MoESpec) -> tuple[MoEWeights, MoEWeights]:
    """Weights in the checkpoint's layout and in the backend's."""
    raw = random_weights(spec)
    own = MoEWeights(raw.w13.clone(), raw.w2.clone())
    return raw, registry().get("cpu_native").prepare(own)


@needs_compiler
@pytest.mark.parametrize("size", [16, 128, 2048])
def test_add_and_norm(size: int) -> None:
    norm = RMSNorm(size, 1e-6, torch.float32)
    norm.weight.data.uniform_(0.5, 1.5)
    x, residual = torch.randn(5, size), torch.randn(5, size)
    expected = F.rms_norm(x + residual, (size,), norm.weight, 1e-6)
    total = x + residual
    normed, stream = norm.add(x, residual)
    assert torch.equal(stream, total)
    torch.testing.assert_close(normed, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(norm.forward(total), expected, rtol=2e-6, atol=2e-6)
    assert norm.forward(torch.full((1, size), NAN)).isnan().all()


ROUTINGS = [
    RoutingSpec(4),
    RoutingSpec(3, is_renormalized=False),
    RoutingSpec(2, scaling_factor=2.5),
    RoutingSpec(16),
]


@needs_compiler
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_routing_rules(routing: RoutingSpec) -> None:
    spec = make_spec(16, routing=routing)
    values = logits(spec, 40)
    values[0] = 0.0  # all equal: ties go to the lowest id
    values[1, :3] = NAN
    values[2] = NAN
    values[3, 5] = INF
    values[4] = -INF
    values[5, 1:] = -INF
    values[6, [7, 2, 11]] = 9.0
    _, weights = prepared(spec)
    seen: list[Routed] = []
    backend = registry().get("cpu_native")

    class Spy(type(backend)):  # type: ignore[misc]
        def apply(self, spec: MoESpec, x: torch.Tensor, routed: Routed, *_: object) -> torch.Tensor:
            seen.append(routed)
            return x

    nan_rows, expected_rows = torch.zeros(2, 1, dtype=torch.int64)
    Spy().apply_logits(spec, tokens(spec, 40), Unrouted(values, None, nan_rows), weights)
    expected = route(values, routing, None, expected_rows)
    assert torch.equal(seen[0].topk_ids, expected.ids)
    torch.testing.assert_close(seen[0].topk_weights, expected.weights, rtol=1e-6, atol=1e-7)
    assert nan_rows.item() == expected_rows.item() == 2


@needs_compiler
@pytest.mark.parametrize(
    ("num_experts", "hidden", "width", "top_k", "num_tokens"),
    [(8, 32, 16, 2, 1), (32, 128, 128, 4, 32), (60, 48, 80, 4, 21), (4, 64, 48, 2, 300),
     (2, 704, 32, 2, 7)],
)  # fmt: skip
def test_experts_equal_float64(
    num_experts: int, hidden: int, width: int, top_k: int, num_tokens: int
) -> None:
    spec = make_spec(num_experts, hidden, width, routing=RoutingSpec(top_k))
    raw, weights = prepared(spec)
    x = tokens(spec, num_tokens)
    topk = route(logits(spec, num_tokens), spec.routing)
    topk.ids[::7] = -1
    copies = [t.clone() for t in (x, topk.ids, topk.weights, weights.w13, weights.w2)]
    out = registry().get("cpu_native").apply(spec, x, Routed(topk.ids, topk.weights), weights)
    expected = reference_experts(spec, x, topk.weights, topk.ids, raw.w13, raw.w2)
    assert relative_error(out, expected) < 1e-6
    assert torch.equal(out[::7], torch.zeros_like(out[::7]))
    held = (x, topk.ids, topk.weights, weights.w13, weights.w2)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))


@needs_compiler
def test_a_token_with_nan_stays_alone_and_large_gates_do_not_overflow() -> None:
    spec = make_spec(8, 32, 32, routing=RoutingSpec(2))
    raw, weights = prepared(spec)
    x = tokens(spec, 12)
    topk = route(logits(spec, 12), spec.routing)
    run = registry().get("cpu_native").apply
    clean = run(spec, x, Routed(topk.ids, topk.weights), weights)
    spoilt = x.clone()
    spoilt[3, 0] = NAN
    out = run(spec, spoilt, Routed(topk.ids, topk.weights), weights)
    assert out[3].isnan().all()
    rest = torch.arange(12) != 3
    assert torch.equal(out[rest], clean[rest])
    huge = run(spec, x * 1000.0, Routed(topk.ids, topk.weights), weights)
    expected = reference_experts(spec, x * 1000.0, topk.weights, topk.ids, raw.w13, raw.w2)
    assert relative_error(huge, expected) < 1e-6


@needs_compiler
def test_a_layer_whose_weights_were_not_converted_is_refused() -> None:
    spec = make_spec()
    topk = route(logits(spec, 3), spec.routing)
    with pytest.raises(ValueError, match="wants layout 'column_blocks', not 'checkpoint'"):
        registry().get("cpu_native").apply(
            spec, tokens(spec, 3), Routed(topk.ids, topk.weights), random_weights(spec)
        )


def test_what_it_does_not_compute_is_a_reason() -> None:
    backend = registry().get("cpu_native")
    for fields, reason in (
        ({"dtype": torch.bfloat16}, "bfloat16 weights"),
        ({"activation": "relu2"}, "relu2 activation"),
        ({"width": 24}, "I=24, no multiple of 16"),
        ({"is_deterministic": True}, "batch invariance"),
    ):
        support = backend.supports(make_spec(**fields))  # type: ignore[arg-type]
        assert not support.ok
        assert reason in support.reason
    shape = AttentionShape(4, 2, 64, torch.float32)
    assert "bfloat16" in obstacle(replace(shape, dtype=torch.bfloat16), 0)
    assert "pages hold 16 tokens, not 32" in obstacle(shape, 32)
    assert "head_dim 24" in obstacle(replace(shape, head_dim=24), 0)


@pytest.fixture
def fresh_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], build.Native]:
    """Builds anew into an empty cache, with the given text as the compiler."""
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)

    def run(script: str) -> build.Native:
        compiler = tmp_path / "cc"
        compiler.write_text(script)
        compiler.chmod(0o755)
        monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
        return build.native.__wrapped__()

    return run


def test_no_compiler_or_a_broken_one_is_a_reason(
    fresh_build: Callable[[str], build.Native], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = fresh_build("#!/bin/sh\necho 'no such processor' >&2\nexit 1\n")
    assert "do not compile here: no such processor" in broken.reason
    # One that makes something that is no library.
    assert "do not compile here" in fresh_build("#!/bin/sh\nexit 0\n").reason
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".so" and p.stat().st_size]
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    absent = build.native.__wrapped__()
    assert absent.reason.startswith("no C compiler")
    assert absent.functions is None


@needs_compiler
def test_a_layer_by_itself_gives_what_the_backend_in_torch_gives() -> None:
    spec = make_spec(16, 64, 32, routing=RoutingSpec(4))
    gate = torch.randn(16, 64)
    outs = [
        make_layer(spec, random_weights(spec), gate, backend=name)(tokens(spec, 50))
        for name in ("cpu_native", "cpu")
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
