"""Dense products: which form a projection takes, and the gated MLP of layers without experts.

The MLP receives [T, H] and returns [T, H]; gate and up are one product. Layers with experts are
`layers/moe.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (x [T, K], weight [N, K], bias [N] or None, out [T, N] or None) -> [T, N].
Projection = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def fixed_projection(device: torch.device) -> Projection:
    """The product whose bits do not depend on T, for deterministic mode on a GPU."""
    # Triton is imported only where it is used: a CPU server never needs it.
    from moeserve.triton_kernels.linear import FixedProjection

    return FixedProjection(device)


def project(
    projection: Projection | None, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """X [T, K] @ weight [N, K].T + bias, by the library where no projection is given."""
    if projection is None:
        return F.linear(x, weight, bias)
    return projection(x, weight, bias, None)


def project_narrow(x: Tensor, weight: Tensor) -> Tensor:
    """X [T, K] @ weight [N, K].T of a router's gate, on a GPU."""
    # Triton is imported only where it is used: a CPU server never needs it.
    from moeserve.triton_kernels.linear_narrow import is_narrow, linear_narrow

    return linear_narrow(x, weight) if is_narrow(x, weight) else F.linear(x, weight)


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
