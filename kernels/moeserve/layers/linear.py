"""The dense gated MLP of layers without experts: [T, H] -> [T, H].

Gate and up are one product. Layers with experts are `layers/moe.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.gate_up_weight = nn.Parameter(
            torch.empty(2 * width, hidden_size, dtype=dtype), requires_grad=False
        )
        self.down_weight = nn.Parameter(
            torch.empty(hidden_size, width, dtype=dtype), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [T, H]."""
        gate_up = F.linear(x, self.gate_up_weight)
        hidden = F.silu(gate_up[:, : self.width]) * gate_up[:, self.width :]
        return F.linear(hidden, self.down_weight)
