"""Experts through AITER on ROCm, `aiter.fused_moe.fused_moe`.

Receives [T, H] and a routing, returns [T, H]. Weights are shuffled into the tiles of its matrix
instructions; the conversion is tested by an independent inverse. The kernel itself was never
executed by this project.
"""

from __future__ import annotations

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits
from moeserve.moe.backends.optional import library_reason
from moeserve.moe.spec import MoESpec, MoEWeights

# Tile of the shuffle for 2-byte numbers: 16 rows by 32 columns, in vectors of 16 bytes.
TILE_ROWS, TILE_COLUMNS, VECTOR = 16, 32, 8


class AiterExperts(Backend):
    """AITER's fused MoE."""

    traits = Traits(
        name="aiter",
        title="ROCm AITER",
        platforms=frozenset({"rocm"}),
        layout="aiter_16x16",
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        is_graph_safe=True,
        was_executed=False,
        kernel_patterns=(r"aiter.*fmoe", r"ck_moe_stage[12]", r"kernel_moe_gemm"),
    )

    def limits(self, spec: MoESpec) -> str:
        """H and I in whole tiles."""
        for letter, size in (("H", spec.hidden_size), ("I", spec.intermediate_size)):
            if size % TILE_COLUMNS:
                return f"kernel does not support {letter}={size}, no multiple of {TILE_COLUMNS}"
        return ""

    def missing(self) -> str:
        """AITER is distributed as `amd-aiter`."""
        return library_reason("aiter", "amd-aiter")

    def convert_expert(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both matrices shuffled into tiles; shapes stay."""
        return shuffle(w13), shuffle(w2)

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
        from aiter import ActivationType, QuantType
        from aiter.fused_moe import fused_moe

        # Kernels for shuffled weights are chosen by this mark on the tensors.
        for weight in (weights.w13, weights.w2):
            weight.is_shuffled = True  # type: ignore[attr-defined]
        local = routed.expert_map
        out: torch.Tensor = fused_moe(
            x,
            weights.w13,
            weights.w2,
            routed.topk_weights,
            routed.topk_ids,
            expert_mask=None if local is None else (local >= 0).to(torch.int32),
            activation=ActivationType.Silu,
            quant_type=QuantType.No,
            doweight_stage1=False,
        )
        return out


def shuffle(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] in tiles of 16 × 32: tile by tile, in each the vectors of 8 by column, then by row."""
    rows, columns = weight.shape
    tiles = weight.view(
        rows // TILE_ROWS, TILE_ROWS, columns // TILE_COLUMNS, TILE_COLUMNS // VECTOR, VECTOR
    )
    return tiles.permute(0, 2, 3, 1, 4).reshape(rows, columns)


BACKEND = AiterExperts()
