"""Experts through FlashInfer's TRT-LLM kernel, `flashinfer.fused_moe.trtllm_bf16_moe`.

Receives [T, H] and router logits (the kernel routes by itself), returns [T, H]. Blackwell SM100
only. Weights are shuffled for its loads; the layout is described at `convert_expert` and has been
tested by an independent inverse. The kernel itself was never executed by this project.
"""

from __future__ import annotations

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits, Unrouted
from moeserve.moe.backends.optional import library_reason
from moeserve.moe.routing import sanitise
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec

# FlashInfer's enums RoutingMethodType and WeightLayout.
DEFAULT, DEEPSEEK_V3, LLAMA4, RENORMALIZE_NAIVE, SIGMOID_RENORM, SIGMOID = 0, 2, 3, 4, 6, 8
BLOCK_MAJOR_K = 2
# Rows of the epilogue's tile, 128, are shuffled in blocks of 32; K in blocks of 128 bytes.
SHUFFLE_ROWS = 32
BLOCK_K_BYTES = 128
SIZE_UNIT = 128
MAX_TOP_K = 32


class FlashInferTrtllm(Backend):
    """FlashInfer TRT-LLM BF16."""

    traits = Traits(
        name="flashinfer_trtllm",
        title="FlashInfer TRTLLM",
        platforms=frozenset({"cuda-sm100"}),
        layout="block_major_k",
        takes="logits",
        has_input_weighting=True,
        is_graph_safe=True,
        was_executed=False,
        kernel_patterns=(r"bmm_.*Bfloat16.*sm100", r"routingMainKernel"),
    )

    def limits(self, spec: MoESpec) -> str:
        """The sizes and routing forms that the launcher checks, and H in whole blocks."""
        routing = spec.routing
        for letter, size in (("H", spec.hidden_size), ("I", spec.intermediate_size)):
            if size % SIZE_UNIT:
                return f"kernel does not support {letter}={size}, no multiple of {SIZE_UNIT}"
        if spec.num_experts % 4 or spec.num_experts <= routing.top_k:
            return (
                f"kernel does not support {spec.num_experts} experts with top_k={routing.top_k}: "
                "a multiple of 4 above top_k is needed"
            )
        if spec.num_experts % spec.ep_size:
            return (
                f"kernel does not support parallel config with {spec.num_experts} experts on "
                f"ep_size={spec.ep_size} ranks: no even split"
            )
        if routing.top_k > MAX_TOP_K:
            return f"kernel does not support top_k={routing.top_k}, above {MAX_TOP_K}"
        if routing_method(routing) is None:
            return "kernel does not support routing method of this model"
        return ""

    def missing(self) -> str:
        """FlashInfer 0.6.12 or newer."""
        return library_reason("flashinfer", "flashinfer-python", at_least=(0, 6, 12))

    def convert_expert(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Halves swapped, gate and up rows interleaved, rows shuffled, K cut into blocks.

        Returns:
            w13 [H/64, 2I, 64] and w2 [I/64, H, 64] for BF16.
        """
        gate, up = w13.chunk(2)
        # No name for the pairs: they must not live beside the copy of w2.
        return to_block_major(torch.stack((up, gate), dim=1).view(w13.shape)), to_block_major(w2)

    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Not offered: the kernel takes logits.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("flashinfer_trtllm takes router logits, not ids and weights")

    def apply_logits(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply_logits`; the logits are sanitised first, as the router would."""
        if x.shape[0] == 0:
            return torch.zeros_like(x)
        from flashinfer.fused_moe import trtllm_bf16_moe

        routing = spec.routing
        has_groups = routing.num_groups > 1
        out: torch.Tensor = trtllm_bf16_moe(
            routing_logits=sanitise(unrouted.logits.float()),
            routing_bias=None if unrouted.bias is None else unrouted.bias.to(torch.bfloat16),
            hidden_states=x,
            gemm1_weights=weights.w13,
            gemm2_weights=weights.w2,
            num_experts=spec.num_experts,
            top_k=routing.top_k,
            n_group=routing.num_groups if has_groups else None,
            topk_group=routing.top_k_groups if has_groups else None,
            intermediate_size=spec.intermediate_size,
            local_expert_offset=spec.first_local_expert,
            local_num_experts=spec.num_local_experts,
            routed_scaling_factor=(
                routing.scaling_factor if routing.scaling_factor != 1.0 else None
            ),
            routing_method_type=routing_method(routing),
            use_shuffled_weight=True,
            weight_layout=BLOCK_MAJOR_K,
        )
        return out


def routing_method(routing: RoutingSpec) -> int | None:
    """FlashInfer's number for a model's routing; None where it has none that is the same."""
    if routing.weight_on_input:
        return LLAMA4 if routing.scaling_factor == 1.0 else None
    if routing.has_bias or routing.num_groups > 1:
        is_deepseek = (
            routing.scoring == "sigmoid"
            and routing.has_bias
            and routing.is_renormalized
            and routing.num_groups > 1
            and routing.top_k_groups <= 4
        )
        return DEEPSEEK_V3 if is_deepseek else None
    if routing.scaling_factor != 1.0:
        return None  # the factor is applied by the DeepSeek form only
    if routing.scoring == "sigmoid":
        return SIGMOID_RENORM if routing.is_renormalized else SIGMOID
    return RENORMALIZE_NAIVE if routing.is_renormalized else DEFAULT


def to_block_major(weight: torch.Tensor) -> torch.Tensor:
    """[M, K] to [K/64, M, 64] (BF16), rows shuffled within blocks of 32.

    Old row 4·q + r of a block (q below 8, r below 4) becomes new row 8·r + q: four neighbours end
    up 8 rows apart, where the threads of the transposed product's epilogue hold them.
    """
    rows, width = weight.shape
    block = BLOCK_K_BYTES // weight.element_size()
    cut = weight.view(rows // SHUFFLE_ROWS, 8, 4, width // block, block)
    return cut.permute(3, 0, 2, 1, 4).reshape(width // block, rows, block)  # the only copy


BACKEND = FlashInferTrtllm()
