"""Root-mean-square norm over the last dimension: [T, H] -> [T, H], computed in float32 inside.

Every norm of a decoder follows an addition to the residual stream, so both are one call here. The
one-kernel form for GPUs is `triton_kernels/norm.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeserve.native.build import LANES, native

if TYPE_CHECKING:
    from moeserve.triton_kernels.combine import SlotSum


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, *, is_fused: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self.shape = (size,)
        self.is_fused = is_fused
        has_native = not is_fused and dtype == torch.float32 and size % LANES == 0
        self._native = native().functions if has_native else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [T, H]; keeps dtype."""
        if self.is_fused:
            # Triton is imported only where it is used: a CPU server never needs it.
            from moeserve.triton_kernels.norm import add_norm

            return add_norm(x, None, self.weight, self.eps)
        if self._native is not None and x.device.type == "cpu":
            return self._add_natively(None, x.contiguous())
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def add(self, x: Tensor | SlotSum | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise the sum.

        Args:
            x: [T, H], or None where there is nothing to add yet; where `is_fused`, also a sum that
                is still to be taken.
            residual: [T, H]; may be written to, and is not to be used again.

        Returns:
            The normalised rows, and the stream.
        """
        if x is None:
            return self.forward(residual), residual
        if self.is_fused:
            from moeserve.triton_kernels.norm import add_norm

            return add_norm(x, residual, self.weight, self.eps), residual
        assert isinstance(x, Tensor)
        if self._native is not None and residual.device.type == "cpu":
            return self._add_natively(x.contiguous(), residual), residual
        residual = residual + x
        return self.forward(residual), residual

    def _add_natively(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """The same in C; `residual`, contiguous, becomes the sum."""
        assert self._native is not None
        out = torch.empty_like(residual)
        H = self.shape[0]
        self._native.moeserve_add_norm(
            *(x.data_ptr() if x is not None else None, residual.data_ptr()),
            *(self.weight.data_ptr(), out.data_ptr(), residual.numel() // H, H, self.eps),
        )
        return out
