"""Root-mean-square norm over the last dimension: [T, H] -> [T, H], computed in float32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self.shape = (size,)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [T, H]; keeps dtype."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)
