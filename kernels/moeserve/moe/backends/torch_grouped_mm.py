"""Experts through `torch._grouped_mm`: one call for each of the two products.

Receives [T, H] and a routing, returns [T, H]. One CUTLASS kernel on a Hopper or Blackwell GPU, a
loop inside torch on a CPU. Sorting and the sum over slots are `common.py`.
"""

from __future__ import annotations

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits
from moeserve.moe.backends.common import activate, combine, sort_slots
from moeserve.moe.spec import MoESpec, MoEWeights

# The product wants rows whose stride is a multiple of this.
ALIGNMENT_BYTES = 16


class TorchGroupedMM(Backend):
    """torch's grouped product."""

    traits = Traits(
        name="torch_grouped_mm",
        title="torch grouped_mm",
        platforms=frozenset({"cpu", "cuda-sm90", "cuda-sm100", "cuda-sm120"}),
        dtypes=frozenset({torch.bfloat16, torch.float32}),
        activations=frozenset({"silu", "swiglu_oai", "relu2"}),
        has_input_weighting=True,
        is_graph_safe=True,
        kernel_patterns=(r"2at4cuda.*GroupProblemShape", r"aten::_grouped_mm"),
    )

    def limits(self, spec: MoESpec) -> str:
        """Row strides of 16 bytes; bf16 alone and one kernel only where the GPU has it."""
        unit = ALIGNMENT_BYTES // spec.dtype.itemsize
        for letter, size in (("H", spec.hidden_size), ("I", spec.intermediate_size)):
            if size % unit:
                return f"kernel does not support {letter}={size}, no multiple of {unit}"
        if spec.platform != "cpu" and spec.dtype != torch.bfloat16:
            return "kernel does not support float32 weights on a GPU"
        if spec.needs_graph and spec.platform == "cuda-sm120":
            return "kernel does not support capture in a CUDA graph (a loop with host syncs there)"
        return ""

    def missing(self) -> str:
        """Torch has had the function since 2.8, and its CPU form since 2.9."""
        return "" if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} is too old"

    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply`."""
        num_local = weights.w13.shape[0]
        if x.shape[0] == 0 or num_local == 0:
            return torch.zeros_like(x)
        order, ends = sort_slots(routed.local_ids(), num_local)
        rows = x.index_select(0, order // routed.topk_ids.shape[1])
        topk_weights: torch.Tensor | None = routed.topk_weights
        if spec.routing.weight_on_input:
            rows = (rows * routed.topk_weights.view(-1)[order].unsqueeze(1)).to(x.dtype)
            topk_weights = None
        h = torch._grouped_mm(rows, weights.w13.transpose(1, 2), offs=ends)
        h = activate(h, spec.activation)
        y = torch._grouped_mm(h, weights.w2.transpose(1, 2), offs=ends)
        # Rows behind the last group are not written, and whatever is there must not count.
        is_nobodys = torch.arange(order.shape[0], device=x.device) >= ends[-1]
        y.masked_fill_(is_nobodys.unsqueeze(1), 0.0)
        return combine(y, order, topk_weights)


BACKEND = TorchGroupedMM()
