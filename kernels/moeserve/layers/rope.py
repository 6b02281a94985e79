"""Rotary position embedding, halves rotated against each other.

Receives positions [T]; returns the step's tables once, which every layer then applies to its
queries and keys. Angles are computed in float32 whatever the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """Cosine and sine of every position up to the context length.

    Attributes:
        cos: [positions, head_dim], both halves alike.
        sin: [positions, head_dim / 2].
    """

    def __init__(self, head_dim: int, max_positions: int, theta: float, dtype: torch.dtype) -> None:
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32)
        angles = torch.outer(
            torch.arange(max_positions, dtype=torch.float32), 1.0 / theta ** (steps / head_dim)
        )
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=1).to(dtype)
        self.sin = angles.sin().to(dtype)

    def to(self, device: torch.device) -> RotaryTable:
        """Move the tables; returns self."""
        self.cos = self.cos.to(device)
        self.sin = self.sin.to(device)
        return self

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of one step: cosine [T, 1, head_dim], sine [T, 1, head_dim / 2]."""
        return (
            self.cos.index_select(0, positions).unsqueeze(1),
            self.sin.index_select(0, positions).unsqueeze(1),
        )


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Rotate x [T, heads, head_dim] into `out`, which may be x only where it does not overlap.

    Args:
        x: Queries and keys.
        rope: From `RotaryTable`.
        out: Same shape; receives the result.
    """
    cos, sin = rope
    half = sin.shape[-1]
    first, second = x[..., :half], x[..., half:]
    turned = x * cos
    turned[..., :half].addcmul_(second, sin, value=-1)
    turned[..., half:].addcmul_(first, sin)
    out.copy_(turned)
