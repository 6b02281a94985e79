"""Experts through SonicMoE on Hopper, `sonicmoe.functional.moe_general_routing_inputs`.

Receives [T, H] and a routing, returns [T, H]. Gate and up rows are interleaved, and the weights go
in as views [rows, columns, E]. Release 0.1.2.post1 wants Python 3.12, torch up to 2.9.1 and one
version of the CUTLASS DSL, and its products know gated activations only.
"""

from __future__ import annotations

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits
from moeserve.moe.backends.optional import library_reason
from moeserve.moe.spec import MoESpec, MoEWeights


class SonicMoE(Backend):
    """SonicMoE."""

    traits = Traits(
        name="sonicmoe",
        title="SonicMoE",
        platforms=frozenset({"cuda-sm90"}),
        layout="gate_up_interleaved",
        activations=frozenset({"silu"}),
        has_expert_maps=False,
        was_executed=False,
        kernel_patterns=(r"sonicmoe|quack",),
    )

    def limits(self, spec: MoESpec) -> str:
        """Sizes in 16-byte units."""
        for letter, size in (("H", spec.hidden_size), ("I", spec.intermediate_size)):
            if size % 8:
                return f"kernel does not support {letter}={size}, no multiple of 8"
        return ""

    def missing(self) -> str:
        """Python 3.12 and the versions that it pins."""
        return library_reason("sonicmoe", "sonic-moe", python=(3, 12), has_binding_pins=True)

    def convert_expert(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Row 2i is gate row i, row 2i + 1 is up row i."""
        width = w2.shape[1]
        return w13.view(2, width, -1).transpose(0, 1).reshape(w13.shape), w2

    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply`."""
        if x.shape[0] == 0:
            return torch.zeros_like(x)
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        num_tokens, top_k = routed.topk_ids.shape
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
        out: torch.Tensor
        out, _ = moe_general_routing_inputs(
            x,
            routed.topk_weights.reshape(-1),
            tokens.repeat_interleave(top_k, output_size=num_tokens * top_k),
            routed.topk_ids.reshape(-1),
            weights.w13.permute(1, 2, 0),
            None,
            weights.w2.permute(1, 2, 0),
            None,
            spec.num_experts,
            torch.cuda.current_stream().cuda_stream,
            ActivationType.SWIGLU,
            True,
        )
        return out


BACKEND = SonicMoE()
