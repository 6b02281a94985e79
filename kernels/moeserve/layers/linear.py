"""Dense products: which form a projection takes, and the gated MLP of layers without experts.

The MLP receives [T, H] and returns [T, H]; gate and up are one product. Layers with experts are
`layers/moe.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from moeserve.triton_kernels.linear_split import Parts

# (x [T, K], weight [N, K], bias [N] or None, out [T, N] or None) -> [T, N].
Projection = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def fixed_projection() -> Projection:
    """The product whose bits do not depend on T, for deterministic mode on a GPU."""
    # Triton is imported only where it is used: a CPU server never needs it.
    from moeserve.triton_kernels.linear import FixedProjection

    return FixedProjection()


def project(
    projection: Projection | None, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """X [T, K] @ weight [N, K].T + bias, by the library where no projection is given."""
    if projection is None:
        return F.linear(x, weight, bias)
    return projection(x, weight, bias, None)


def project_split(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | Parts:
    """The same as parts to be summed, where that is the faster form for a decode batch on a GPU."""
    # Triton is imported only where it is used: a CPU server never needs it.
    from moeserve.triton_kernels.linear_split import linear_split, tile_for

    tile = tile_for(x.shape[0], weight)
    return F.linear(x, weight, bias) if tile is None else linear_split(x, weight, bias, tile)


def project_narrow(x: Tensor, weight: Tensor) -> Tensor:
    """X [T, K] @ weight [N, K].T of a few columns, such as a router's gate, on a GPU."""
    # Triton is imported only where it is used: a CPU server never needs it.
    from moeserve.triton_kernels.linear_split import linear_narrow

    out = linear_narrow(x, weight)
    return F.linear(x, weight) if out is None else out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden_size: int,
        width: int,
        dtype: torch.dtype,
        projection: Projection | None = None,
    ) -> None:
        super().__init__()
        self.projection = projection
        self.width = width
        self.gate_up_weight = nn.Parameter(
            torch.empty(2 * width, hidden_size, dtype=dtype), requires_grad=False
        )
        self.down_weight = nn.Parameter(
            torch.empty(hidden_size, width, dtype=dtype), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [T, H]."""
        gate_up = project(self.projection, x, self.gate_up_weight)
        hidden = F.silu(gate_up[:, : self.width]) * gate_up[:, self.width :]
        return project(self.projection, hidden, self.down_weight)
