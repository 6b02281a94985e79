"""The launch sequence of one MoE layer: route, gate and up, down, sum; or the gemv pair.

Receives a `Call`, returns [T, H]. It chooses nothing but what `moe/tuning.py` says for the token
count; the contract around it is `moe/backends/triton.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from moeserve.moe.backends.base import Unrouted
from moeserve.moe.spec import RoutingSpec
from moeserve.moe.tuning import (
    LayerShape,
    LayerTiles,
    choose,
    deterministic_tiles,
    load_table,
)
from moeserve.triton_kernels import combine, gemv, grouped_gemm, router
from moeserve.triton_kernels.combine import SlotSum
from moeserve.triton_kernels.gemv import GemvTile
from moeserve.triton_kernels.grouped_gemm import Tile
from moeserve.triton_kernels.moe_arrange import arrange
from moeserve.triton_kernels.moe_buckets import fill_buckets

# Parts of the workspace start at multiples of this, which vector loads and descriptors want.
ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Call:
    """One forward of one layer on one rank.

    Attributes:
        x: [T, H], T at least 1; not written to.
        w13: [E_loc, 2I, H], gate rows first ([E_loc, I, H] for "relu2").
        w2: [E_loc, H, I].
        topk_ids: [T, K] int32, global ids; -1 is nobody's.
        topk_weights: [T, K] float32.
        num_experts: E, global.
        activation: "silu", "swiglu_oai" or "relu2".
        expert_map: [E] int32, global id -> local id or -1; None where all are here.
        is_weight_on_input: The weight multiplies the token, K = 1 (Llama-4).
        is_deterministic: A token's bits must not depend on the batch.
        first_expert: Global id of the first local expert, where there is no map.
        leaves_sum: The sum over slots may be left to the caller.
        has_clear_counts: Whoever took the sum of the layer before has cleared the counts that
            begin the workspace.
    """

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int
    activation: str
    expert_map: torch.Tensor | None = None
    is_weight_on_input: bool = False
    is_deterministic: bool = False
    first_expert: int = 0
    leaves_sum: bool = False
    has_clear_counts: bool = False

    @property
    def shape(self) -> LayerShape:
        """The table key: E_loc, H, I, K."""
        return LayerShape(
            self.w2.shape[0], self.w2.shape[1], self.w2.shape[2], self.topk_ids.shape[1]
        )

    @property
    def output_weights(self) -> torch.Tensor | None:
        """Weights for the second GEMM, None where they went into the token."""
        return None if self.is_weight_on_input else self.topk_weights

    @property
    def input_weights(self) -> torch.Tensor | None:
        """Weights for the first GEMM, None in all but Llama-4's form."""
        return self.topk_weights if self.is_weight_on_input else None


@dataclass(frozen=True)
class RouterCall:
    """Routing that is still to be done; its result goes into the `Call`'s ids and weights.

    Attributes:
        unrouted: What it is done by.
        routing: The model's rule.
    """

    unrouted: Unrouted
    routing: RoutingSpec


def workspace_bytes(shape: tuple[int, int, int, int], T: int, itemsize: int) -> int:
    """Bytes for a forward of T tokens.

    Args:
        shape: (E_loc, H, I, K).
        T: Tokens.
        itemsize: Bytes of an activation.
    """
    return sum(_part_bytes(shape, T, itemsize))


def _part_bytes(shape: tuple[int, int, int, int], T: int, itemsize: int) -> tuple[int, ...]:
    """Counts, slots, activations, rows of H: tokens in the experts' order, then outputs by slot."""
    E, H, I, K = shape
    sizes = (E * 4, E * T * K * 4, T * K * I * itemsize, T * K * H * itemsize)
    return tuple(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)


def run_experts(
    call: Call, workspace: torch.Tensor | None = None, routing: RouterCall | None = None
) -> torch.Tensor | SlotSum:
    """Run the local experts.

    Args:
        call: The layer's tensors.
        workspace: uint8, at least `workspace_bytes`; allocated where absent or too small.
        routing: Route first; the router then lists the experts' slots in the same launch.

    Returns:
        [T, H] in the dtype of `x`; slots of other ranks' experts add exactly zero. A `SlotSum`
        where `call.leaves_sum` and there is a sum to be taken.
    """
    tiles = tiles_for(call)
    E, H, I, K = call.shape.E, call.shape.H, call.shape.I, call.shape.K
    T = call.x.shape[0]
    parts = _part_bytes((E, H, I, K), T, call.x.element_size())
    if workspace is None or workspace.numel() < sum(parts):
        workspace = torch.empty(sum(parts), dtype=torch.uint8, device=call.x.device)
        call = replace(call, has_clear_counts=False)
    counts, slots, act, by_slot = torch.split(workspace[: sum(parts)], list(parts))
    act = _view(act, call.x.dtype, T * K, I)
    if isinstance(tiles.gate_up, GemvTile) and isinstance(tiles.down, GemvTile):
        if routing is not None:
            _route(call, routing, None)
        return _run_gemv(call, act, tiles.gate_up, tiles.down)
    if isinstance(tiles.gate_up, GemvTile) or isinstance(tiles.down, GemvTile):
        raise TypeError("a tile table mixes the gemv path with tiles for one token count")
    buckets = _view(counts, torch.int32, E), _view(slots, torch.int32, E, T * K)
    by_slot = _view(by_slot, call.x.dtype, T * K, H)
    if routing is not None:
        if not call.has_clear_counts:
            buckets[0].zero_()
        _route(call, routing, buckets)
    else:
        fill_buckets(
            call.topk_ids, *buckets, num_experts=call.num_experts,
            first_expert=call.first_expert, expert_map=call.expert_map,
        )  # fmt: skip
    return _run_grouped(call, buckets, act, by_slot, (tiles.gate_up, tiles.down))


def _route(
    call: Call, routing: RouterCall, buckets: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    unrouted = routing.unrouted
    router.route(
        unrouted.logits, routing.routing, unrouted.bias,
        out=(call.topk_weights, call.topk_ids), buckets=buckets,
        first_expert=call.first_expert, nan_rows=unrouted.nan_rows,
    )  # fmt: skip


def _view(part: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numel = 1
    for size in shape:
        numel *= size
    return part.view(dtype)[:numel].view(*shape)


def _run_gemv(call: Call, act: torch.Tensor, first: GemvTile, second: GemvTile) -> torch.Tensor:
    gemv.gate_up_gemv(
        call.x, call.w13, act, call.topk_ids, first,
        num_experts=call.num_experts, activation=call.activation, first_expert=call.first_expert,
        expert_map=call.expert_map, weights_on_input=call.input_weights,
    )  # fmt: skip
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    gemv.down_gemv(
        act, call.w2, out, call.topk_ids, second,
        num_experts=call.num_experts, weights=call.output_weights,
        first_expert=call.first_expert, expert_map=call.expert_map,
    )  # fmt: skip
    return out


def _run_grouped(
    call: Call,
    buckets: tuple[torch.Tensor, torch.Tensor],
    act: torch.Tensor,
    by_slot: torch.Tensor,
    tiles: tuple[Tile, Tile],
) -> torch.Tensor | SlotSum:
    x = call.x
    if tiles[0].is_arranged:
        x = by_slot
        arrange(call.x, x, buckets, top_k=call.shape.K)
    grouped_gemm.gate_up(
        x, call.w13, act, buckets, tiles[0],
        top_k=call.shape.K, activation=call.activation, weights_on_input=call.input_weights,
    )  # fmt: skip
    if call.shape.K == 1:
        # A slot is its token; what no local expert writes has to be zero.
        by_slot = torch.zeros_like(call.x, memory_format=torch.contiguous_format)
    grouped_gemm.down(act, call.w2, by_slot, buckets, tiles[1], weights=call.output_weights)
    if call.shape.K == 1:
        return by_slot
    if call.leaves_sum:
        return SlotSum(
            by_slot, call.topk_ids, call.shape.E, call.num_experts, call.first_expert,
            call.expert_map, buckets[0], is_whole=call.num_experts == call.shape.E,
        )  # fmt: skip
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    combine.combine(
        by_slot, call.topk_ids, out,
        num_local=call.shape.E, num_experts=call.num_experts,
        first_expert=call.first_expert, expert_map=call.expert_map,
    )  # fmt: skip
    return out


def tiles_for(call: Call) -> LayerTiles:
    """Tiles for this call: the deterministic one, a measured one, or the default."""
    if call.is_deterministic:
        tiles = deterministic_tiles(call.shape, call.x.shape[0])
        # float32 has no warpgroup form of this: one tile for every T.
        return (
            tiles if call.x.element_size() == 2 else _narrowed(deterministic_tiles(call.shape, 1))
        )
    name = _device_name(call.x.device)
    table = _table(name, call.shape) if call.x.dtype == torch.bfloat16 else {}
    tiles = choose(table, call.shape, call.x.shape[0])
    return tiles if call.x.element_size() == 2 else _narrowed(tiles)


def _narrowed(tiles: LayerTiles) -> LayerTiles:
    """Tiles whose operands are float32: half the depth and half the stages, to fit."""
    if isinstance(tiles.gate_up, GemvTile) or isinstance(tiles.down, GemvTile):
        return tiles
    return LayerTiles(
        Tile(min(tiles.gate_up.block_m, 64), min(tiles.gate_up.block_n, 64), 32, 4, 2),
        Tile(min(tiles.down.block_m, 64), min(tiles.down.block_n, 64), 32, 4, 2),
    )


@lru_cache(maxsize=8)
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@lru_cache(maxsize=64)
def _table(device_name: str, shape: LayerShape) -> dict[int, LayerTiles]:
    return load_table(device_name, shape)
