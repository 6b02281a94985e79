"""Checkpoint names of the parts of a Qwen3-MoE layer, and which part of a tensor is a rank's.

Receives a layer or its shapes; returns views to be filled by name, or cuts by name. The model is
`qwen3_moe.py`, cuts are described in `shards.py`.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.layers.linear import GatedMLP
from moeserve.layers.moe import MoELayer
from moeserve.models.config import ModelSpec
from moeserve.models.shards import Cut, first_kv_head
from moeserve.parallel import Parallel

MLP_PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def attention_cuts(prefix: str, spec: ModelSpec, parallel: Parallel) -> dict[str, Cut]:
    """Cuts of one attention layer; the heads of a rank are neighbours."""
    if parallel.tp_size == 1:
        return {}
    width = spec.num_heads * spec.head_dim
    start = parallel.tp_rank * width // parallel.tp_size
    kv_start = first_kv_head(spec, parallel) * spec.head_dim
    kv_cut = Cut(0, kv_start, spec.num_kv_heads * spec.head_dim)
    cuts = {"o_proj.weight": Cut(1, start, width)}
    for part in ("weight", "bias") if spec.has_attention_bias else ("weight",):
        cuts[f"q_proj.{part}"] = Cut(0, start, width)
        cuts[f"k_proj.{part}"] = cuts[f"v_proj.{part}"] = kv_cut
    return {prefix + name: cut for name, cut in cuts.items()}


def mlp_cuts(prefix: str, width: int, parallel: Parallel) -> dict[str, Cut]:
    """Cuts of one gated MLP or expert by its width."""
    if parallel.tp_size == 1:
        return {}
    start = parallel.tp_rank * width // parallel.tp_size
    dims = zip(MLP_PARTS, (0, 0, 1), strict=True)
    return {prefix + part: Cut(dim, start, width) for part, dim in dims}


def moe_destinations(prefix: str, layer: MoELayer) -> dict[str, Tensor]:
    """Names of one layer's gate and of the experts on this rank -> their parameters."""
    out = {prefix + "gate.weight": layer.gate_weight.data}
    width, first = layer.spec.intermediate_size, layer.spec.first_local_expert
    for index in range(layer.spec.num_local_experts):
        name = f"{prefix}experts.{first + index}."
        out[name + "gate_proj.weight"] = layer.w13_weight.data[index, :width]
        out[name + "up_proj.weight"] = layer.w13_weight.data[index, width:]
        out[name + "down_proj.weight"] = layer.w2_weight.data[index]
    return out


def mlp_destinations(prefix: str, layer: GatedMLP) -> dict[str, Tensor]:
    """Names of one dense MLP -> its parameters."""
    return {
        prefix + "gate_proj.weight": layer.gate_up_weight.data[: layer.width],
        prefix + "up_proj.weight": layer.gate_up_weight.data[layer.width :],
        prefix + "down_proj.weight": layer.down_weight.data,
    }
