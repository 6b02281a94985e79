"""Small MoE layers with random weights, for tests of routing, backends and dispatch."""

from __future__ import annotations

from dataclasses import replace

import torch

from moeserve.layers.moe import MoELayer
from moeserve.moe.oracle import select_unquantized_moe_backend
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.parallel import Parallel

# Largest ‖out - ref‖ / ‖ref‖ against float64, by number format.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make_spec(
    num_experts: int = 8, hidden_size: int = 32, width: int = 16, **fields: object
) -> MoESpec:
    """A float32 layer for the CPU; `fields` go into the spec."""
    defaults: dict[str, object] = {"routing": RoutingSpec(2), "dtype": torch.float32}
    return MoESpec(num_experts, hidden_size, width, **{**defaults, **fields})  # type: ignore[arg-type]


def random_weights(spec: MoESpec, seed: int = 0) -> MoEWeights:
    """All E experts in the checkpoint's layout, scaled so that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    E, H, I = spec.num_experts, spec.hidden_size, spec.intermediate_size
    rows = 2 * I if spec.is_gated else I
    w13 = torch.randn(E, rows, H, generator=generator) * H**-0.5
    w2 = torch.randn(E, H, I, generator=generator) * I**-0.5
    return MoEWeights(w13.to(spec.dtype), w2.to(spec.dtype))


def tokens(spec: MoESpec, num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Hidden states [T, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, spec.hidden_size, generator=generator).to(spec.dtype)


def logits(spec: MoESpec, num_tokens: int, seed: int = 2) -> torch.Tensor:
    """Router logits [T, E], float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, spec.num_experts, generator=generator)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out - ref‖ / ‖ref‖; NaN where out has one."""
    difference = (out.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp_min(1e-30))


def local_part(weights: MoEWeights, spec: MoESpec) -> MoEWeights:
    """This rank's experts of all."""
    part = slice(spec.first_local_expert, spec.first_local_expert + spec.num_local_experts)
    return MoEWeights(weights.w13[part].clone(), weights.w2[part].clone())


def width_part(weights: MoEWeights, rank: int, size: int) -> MoEWeights:
    """This TP rank's slice of every gated expert's width."""
    gate, up = weights.w13.chunk(2, dim=1)
    w13 = torch.cat([gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], dim=1)
    return MoEWeights(w13, weights.w2.chunk(size, 2)[rank].contiguous())


def make_layer(
    spec: MoESpec,
    weights: MoEWeights,
    gate: torch.Tensor,
    *,
    backend: str = "auto",
    parallel: Parallel | None = None,
) -> MoELayer:
    """A layer of this rank, loaded and converted; shared experts are left to the caller."""
    layer = MoELayer(spec, select_unquantized_moe_backend(spec, backend), "cpu", parallel=parallel)
    layer.gate_weight.copy_(gate)
    layer.w13_weight.copy_(weights.w13)
    layer.w2_weight.copy_(weights.w2)
    layer.process_weights()
    return layer


def gate_weight(spec: MoESpec, seed: int = 3) -> torch.Tensor:
    """Gate [E, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(spec.num_experts, spec.hidden_size, generator=generator)


def on(spec: MoESpec, **fields: object) -> MoESpec:
    """The spec with other fields."""
    return replace(spec, **fields)  # type: ignore[arg-type]
