"""What several backends in plain torch share: activation, sorting by expert, sum over slots.

Receives and returns tensors only; nothing here syncs with a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from moeserve.moe.spec import Activation


def activate(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Activation between the two products: [..., 2I] (gate, up) or ungated [..., I] to [..., I]."""
    if activation == "relu2":
        return F.relu(h).square()
    width = h.shape[-1] // 2
    gate, up = h[..., :width], h[..., width:]
    if activation == "swiglu_oai":
        # alpha 1.702, limit 7 and +1 on the linear half: the published form of gpt-oss.
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)
    return F.silu(gate) * up


def activate_exactly(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activate` whose elements do not depend on their place in the tensor.

    On a CPU, exp() of the last few elements of a chunk takes another path than that of the others,
    and rounds otherwise; which they are depends on the batch. In float64 the difference is too
    small to be seen after rounding back.
    """
    return activate(h.double(), activation).to(h.dtype)


def sigmoid_exactly(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid whose elements do not depend on their place; see `activate_exactly`."""
    return torch.sigmoid(x.double()).to(x.dtype)


class SortedSlots(NamedTuple):
    """The T·K slots by expert.

    Attributes:
        order: int64 [T·K], slot numbers by rising local expert; slots of nobody come last.
        ends: int32 [E_loc], row after the last one of each expert; `ends[-1]` rows count.
    """

    order: torch.Tensor
    ends: torch.Tensor


def sort_slots(local_ids: torch.Tensor, num_experts: int) -> SortedSlots:
    """Sorts slots by expert, in slot order within an expert.

    Args:
        local_ids: int32 [T, K]; -1 = nobody here.
        num_experts: E_loc.
    """
    flat = local_ids.reshape(-1)
    groups, order = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    experts = torch.arange(num_experts, dtype=groups.dtype, device=groups.device)
    ends = torch.searchsorted(groups, experts, right=True)
    return SortedSlots(order, ends.to(torch.int32))


def combine(
    y: torch.Tensor, order: torch.Tensor, topk_weights: torch.Tensor | None
) -> torch.Tensor:
    """Sorted expert outputs to the weighted sum over slots, in slot order, in float32.

    Args:
        y: [T·K, H], rows in the order of `order`.
        order: int64 [T·K], slot of each row.
        topk_weights: float32 [T, K]; None (weight on the input) means K = 1 and no weight.

    Returns:
        [T, H] in `y.dtype`.
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    slots = y.index_select(0, inverse)
    if topk_weights is None:
        return slots
    num_tokens, top_k = topk_weights.shape
    weighted = slots.view(num_tokens, top_k, -1) * topk_weights.unsqueeze(-1)
    total = weighted[:, 0]
    for slot in range(1, top_k):
        # One after another: `sum` may add in another order for another number of rows.
        total = total + weighted[:, slot]
    return total.to(y.dtype)


# Deterministic mode on a CPU: every product has exactly this many rows, so that the library takes
# the same path, and the same order of additions, whatever the batch.
TILE_ROWS = 16


def linear_by_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`F.linear` whose rows do not depend on each other's number: [T, n] by [m, n] to [T, m]."""
    num_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_rows % TILE_ROWS))
    parts = [torch.mm(tile, weight.t()) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(parts)[:num_rows] if parts else x.new_empty(0, weight.shape[0])
