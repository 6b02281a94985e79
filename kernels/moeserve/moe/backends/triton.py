"""Experts in Triton: two grouped GEMMs with gather and activation inside, then an ordered sum.

Receives [T, H] and a routing, returns [T, H]. Weights stay in the checkpoint's layout. The launch
sequence is `moe/triton_experts.py`, tile sizes are `moe/tuning.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits, Unrouted
from moeserve.moe.backends.optional import library_reason
from moeserve.moe.spec import MoESpec, MoEWeights

if TYPE_CHECKING:
    from moeserve.triton_kernels.combine import SlotSum


class TritonExperts(Backend):
    """This project's own kernels."""

    traits = Traits(
        name="triton",
        title="Triton",
        platforms=frozenset({"cuda-sm90", "cuda-sm100", "cuda-sm120", "rocm", "xpu"}),
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        activations=frozenset({"silu", "swiglu_oai", "relu2"}),
        takes="both",
        has_input_weighting=True,
        is_graph_safe=True,
        is_deterministic=True,
        kernel_patterns=(r"moe_gate_up(_gemv)?_kernel", r"moe_down(_gemv)?_kernel"),
    )

    def missing(self) -> str:
        """Triton itself."""
        return library_reason("triton", "triton", at_least=(3, 6))

    def workspace_bytes(self, spec: MoESpec, num_tokens: int) -> int:
        """Counts and slots of each expert, activations and outputs by slot."""
        # Triton is imported only where it is used: a CPU-only server never needs it.
        from moeserve.moe.triton_experts import workspace_bytes

        return workspace_bytes(_layer_shape(spec), num_tokens, spec.dtype.itemsize)

    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply`."""
        if x.shape[0] == 0 or weights.w13.shape[0] == 0:
            return torch.zeros_like(x)
        from moeserve.moe.triton_experts import Call, run_experts

        out = run_experts(
            Call(
                x=x,
                w13=weights.w13,
                w2=weights.w2,
                topk_ids=routed.topk_ids,
                topk_weights=routed.topk_weights,
                num_experts=spec.num_experts,
                activation=spec.activation,
                expert_map=routed.expert_map,
                is_weight_on_input=spec.routing.weight_on_input,
                is_deterministic=spec.is_deterministic,
            ),
            workspace,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def apply_logits(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply_logits`: the router lists each expert's slots in its own launch."""
        out = self._routed(spec, x, unrouted, weights, workspace)
        assert isinstance(out, torch.Tensor)
        return out

    def apply_logits_unsummed(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
        *,
        has_clear_counts: bool = False,
    ) -> torch.Tensor | SlotSum:
        """See `Backend.apply_logits_unsummed`."""
        return self._routed(
            spec, x, unrouted, weights, workspace,
            leaves_sum=True, has_clear_counts=has_clear_counts,
        )  # fmt: skip

    def _routed(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: torch.Tensor | None,
        *,
        leaves_sum: bool = False,
        has_clear_counts: bool = False,
    ) -> torch.Tensor | SlotSum:
        if x.shape[0] == 0 or weights.w13.shape[0] == 0:
            return torch.zeros_like(x)
        from moeserve.moe.triton_experts import Call, RouterCall, run_experts

        size = (x.shape[0], spec.routing.top_k)
        return run_experts(
            Call(
                x=x,
                w13=weights.w13,
                w2=weights.w2,
                topk_ids=torch.empty(size, dtype=torch.int32, device=x.device),
                topk_weights=torch.empty(size, dtype=torch.float32, device=x.device),
                num_experts=spec.num_experts,
                activation=spec.activation,
                is_weight_on_input=spec.routing.weight_on_input,
                is_deterministic=spec.is_deterministic,
                first_expert=spec.first_local_expert,
                leaves_sum=leaves_sum,
                has_clear_counts=has_clear_counts,
            ),
            workspace,
            RouterCall(unrouted, spec.routing),
        )


def _layer_shape(spec: MoESpec) -> tuple[int, int, int, int]:
    """(E_loc, H, I, K)."""
    return (
        spec.num_local_experts,
        spec.hidden_size,
        spec.intermediate_size,
        spec.routing.top_k,
    )


BACKEND = TritonExperts()
