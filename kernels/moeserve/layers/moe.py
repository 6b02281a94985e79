"""One MoE layer as a module: gate, routed experts, optional shared expert.

Receives hidden states [T, H], returns [T, H], summed over ranks. The choice of a backend is
`moe/oracle.py`, the transport between ranks `moe/dispatch.py`; loading fills the parameters and
then calls `process_weights` once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moeserve.moe.backends.base import CHECKPOINT
from moeserve.moe.backends.cpu import activate
from moeserve.moe.oracle import (
    convert_to_unquantized_kernel_format,
    make_unquantized_moe_kernel,
)
from moeserve.moe.spec import MoESpec, MoEWeights, Plan
from moeserve.parallel import Parallel


class MoELayer(nn.Module):
    """Gate, experts of this rank, and a shared expert where the model has one.

    Parameters, all in the checkpoint's layout until `process_weights`:
        gate_weight [E, H] (float32 where the routing asks for it), gate_bias [E] float32
        (correction bias, only with `routing.has_bias`), w13_weight [E_loc, 2I, H] (gate rows, then
        up rows; [E_loc, I, H] ungated), w2_weight [E_loc, H, I]; with a shared expert
        shared_w13_weight [2S, H], shared_w2_weight [H, S], and shared_gate_weight [1, H] where the
        model gates it.

    Attributes:
        nan_rows: Rows of router logits that held a NaN, so far.
        padding_rows: Padding rows seen so far, as the batch says.
    """

    def __init__(
        self,
        spec: MoESpec,
        plan: Plan,
        device: torch.device | str = "cpu",
        *,
        parallel: Parallel | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.parallel = parallel or Parallel()
        self.kernel = make_unquantized_moe_kernel(spec, plan, self.parallel)
        self.layout = CHECKPOINT
        self._weights: MoEWeights | None = None
        self.padding_rows = 0

        def new(*shape: int, dtype: torch.dtype = spec.dtype) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(*shape, dtype=dtype, device=device), requires_grad=False
            )

        hidden, width, shared = (
            spec.hidden_size,
            spec.intermediate_size,
            spec.shared_intermediate_size,
        )
        halves = 2 if spec.is_gated else 1
        gate_dtype = torch.float32 if spec.routing.has_float32_gate else spec.dtype
        self.gate_weight = new(spec.num_experts, hidden, dtype=gate_dtype)
        self.gate_bias = (
            new(spec.num_experts, dtype=torch.float32) if spec.routing.has_bias else None
        )
        self.w13_weight = new(spec.num_local_experts, halves * width, hidden)
        self.w2_weight = new(spec.num_local_experts, hidden, width)
        self.shared_w13_weight = new(halves * shared, hidden) if shared else None
        self.shared_w2_weight = new(hidden, shared) if shared else None
        self.shared_gate_weight = new(1, hidden) if shared and spec.has_shared_gate else None

    def begin_load(self) -> None:
        """Says that every weight is about to be written again, in the checkpoint's layout."""
        self.layout = CHECKPOINT
        self._weights = None

    def process_weights(self) -> None:
        """Converts the experts into the plan's layout; once per load, in place."""
        if self._weights is not None:
            return
        raw = MoEWeights(self.w13_weight.data, self.w2_weight.data)
        self._weights = convert_to_unquantized_kernel_format(self.kernel.plan, raw)
        self.layout = self._weights.layout

    def forward(self, x: torch.Tensor, batch: object = None) -> torch.Tensor:
        """Runs the layer.

        Args:
            x: [T, H]; not written to.
            batch: The forward batch; `num_padding_tokens` is counted where it has any.

        Returns:
            [T, H], complete on every TP rank.
        """
        if self._weights is None:
            raise RuntimeError("process_weights() has to follow loading")
        self.padding_rows += getattr(batch, "num_padding_tokens", 0)
        logits = F.linear(x.to(self.gate_weight.dtype), self.gate_weight)
        out = self.kernel(x, logits, self.gate_bias, self._weights)
        if self.shared_w13_weight is not None:
            out = out + self._shared(x)
        return self.parallel.all_reduce_tp(out) if self.kernel.is_partial else out

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """The shared expert's output, this rank's part of it."""
        assert self.shared_w13_weight is not None
        assert self.shared_w2_weight is not None
        h = activate(F.linear(x, self.shared_w13_weight), self.spec)
        y = F.linear(h, self.shared_w2_weight)
        if self.shared_gate_weight is not None:
            y = y * torch.sigmoid(F.linear(x, self.shared_gate_weight))
        return y
