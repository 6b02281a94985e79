"""Experts through FlashInfer's CUTLASS kernel, `flashinfer.fused_moe.cutlass_fused_moe`.

Receives [T, H] and a routing, returns [T, H]. The kernel wants the up rows before the gate rows,
int32 ids that are distinct in every row (a duplicate is an illegal access: flashinfer#3011; the
router never makes one), and an empty list of scales for BF16 (vllm#38215). It knows expert
parallelism by rank, so the expert map stays unused.
"""

from __future__ import annotations

from functools import cache

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits
from moeserve.moe.backends.optional import library_reason
from moeserve.moe.spec import MoESpec, MoEWeights

# FlashInfer's enum ActivationType. "Silu" (2) would be the ungated one: it reads I rows of w13
# instead of 2I (Megatron-LM#6045).
ACTIVATION_IDS = {"silu": 3, "swiglu_oai": 5, "relu2": 6}
# 16-byte loads of bf16 rows.
SIZE_UNIT = 8
# Tactics are tuned for batches up to this; above it the largest bucket's tactic is taken.
TUNED_MAX_TOKENS = 8192


class FlashInferCutlass(Backend):
    """FlashInfer CUTLASS, for Hopper and both Blackwells."""

    traits = Traits(
        name="flashinfer_cutlass",
        title="FlashInfer CUTLASS",
        platforms=frozenset({"cuda-sm90", "cuda-sm100", "cuda-sm120"}),
        layout="up_gate",
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        activations=frozenset(ACTIVATION_IDS),
        is_graph_safe=True,
        was_executed=True,
        kernel_patterns=(r"cutlass.*MoeFCGemm", r"finalizeMoeRoutingKernel", r"expandInputRows"),
    )

    def limits(self, spec: MoESpec) -> str:
        """H and I multiples of 8, experts divisible by ranks, rows × experts in int32."""
        for letter, size in (("H", spec.hidden_size), ("I", spec.intermediate_size)):
            if size % SIZE_UNIT:
                return f"kernel does not support {letter}={size}, no multiple of {SIZE_UNIT}"
        if spec.num_experts % spec.ep_size:
            return (
                f"kernel does not support parallel config with {spec.num_experts} experts on "
                f"ep_size={spec.ep_size} ranks: no even split"
            )
        rows = spec.max_num_tokens * spec.dp_size * spec.routing.top_k
        if rows * spec.num_experts > torch.iinfo(torch.int32).max:
            return f"kernel does not support {rows} rows × {spec.num_experts} experts (over int32)"
        return ""

    def missing(self) -> str:
        """FlashInfer 0.6.12 or newer."""
        return library_reason("flashinfer", "flashinfer-python", at_least=(0, 6, 12))

    def convert_expert(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Up rows before gate rows; ungated weights stay."""
        return swap_halves(w13, w2), w2

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
        from flashinfer.fused_moe import cutlass_fused_moe
        from flashinfer.fused_moe.core import ActivationType

        out = torch.empty_like(x)
        cutlass_fused_moe(
            x,
            routed.topk_ids,
            routed.topk_weights,
            weights.w13,
            weights.w2,
            x.dtype,
            quant_scales=[],
            output=out,
            ep_size=spec.ep_size,
            ep_rank=spec.ep_rank,
            tune_max_num_tokens=TUNED_MAX_TOKENS,
            activation_type=ActivationType(ACTIVATION_IDS[spec.activation]),
            **_oai_constants(weights.w13.shape[0], x.device, spec.activation),
        )
        return out


def swap_halves(w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """[gate; up] to [up; gate] of one expert; ungated weights (I rows) come back unchanged."""
    width = w2.shape[1]
    return w13.roll(width, dims=0) if w13.shape[0] == 2 * width else w13


@cache
def _oai_constants(
    num_experts: int, device: torch.device, activation: str
) -> dict[str, torch.Tensor]:
    """Per-expert constants of SwiGLU-OAI, made once: the addresses go into captured graphs."""
    if activation != "swiglu_oai":
        return {}

    def constant(value: float) -> torch.Tensor:
        return torch.full((num_experts,), value, dtype=torch.float32, device=device)

    return {
        "swiglu_alpha": constant(1.702),
        "swiglu_beta": constant(1.0),
        "swiglu_limit": constant(7.0),
    }


BACKEND = FlashInferCutlass()
