"""One MoE layer as a module: gate, routed experts, optional shared expert.

Receives hidden states [T, H], returns [T, H], summed over ranks. The choice of a backend is
`moe/oracle.py`, the transport between ranks `moe/transport.py`. Loading fills the parameters and
then calls `process_weights`; loading again does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from moeserve.layers.linear import fixed_projection, project_narrow
from moeserve.moe.backends.common import (
    activate,
    activate_exactly,
    linear_by_tiles,
    sigmoid_exactly,
)
from moeserve.moe.dispatch import Workspace
from moeserve.moe.oracle import convert_to_unquantized_kernel_format, make_unquantized_moe_kernel
from moeserve.moe.spec import MoESpec, MoEWeights, Plan
from moeserve.parallel import Parallel

if TYPE_CHECKING:
    from moeserve.triton_kernels.combine import SlotSum


class MoELayer(nn.Module):
    """Gate, experts of this rank, and a shared expert where the model has one.

    Parameters, in the checkpoint's layout until `process_weights`:
        gate_weight [E, H] (float32 where the routing asks for it), gate_bias [E] float32
        (correction bias, only with `routing.has_bias`), w13_weight [E_loc, 2I, H] (gate rows, then
        up rows; [E_loc, I, H] ungated), w2_weight [E_loc, H, I]; with a shared expert
        shared_w13_weight [2S, H], shared_w2_weight [H, S], and shared_gate_weight [1, H] where the
        model gates it.

    Attributes:
        padding_rows: Padding rows seen so far, as the batches said. Replays of a captured graph do
            not come by here; the runner counts those.
    """

    def __init__(
        self,
        spec: MoESpec,
        plan: Plan,
        device: torch.device | str = "cpu",
        *,
        parallel: Parallel | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.parallel = parallel or Parallel()
        self.kernel = make_unquantized_moe_kernel(
            spec, plan, device, parallel=self.parallel, workspace=workspace
        )
        self.padding_rows = 0
        self._weights: MoEWeights | None = None
        self._versions = (0, 0)
        self._linear = _linear_for(spec, torch.device(device))
        is_fast_gpu = torch.device(device).type == "cuda" and not spec.is_deterministic
        self._gate = project_narrow if is_fast_gpu else self._linear
        self._make_parameters(torch.device(device))

    def _make_parameters(self, device: torch.device) -> None:
        spec = self.spec
        H, I, S = spec.hidden_size, spec.intermediate_size, spec.shared_intermediate_size
        halves = 2 if spec.is_gated else 1

        def new(*shape: int, dtype: torch.dtype = spec.dtype) -> nn.Parameter:
            tensor = torch.empty(*shape, dtype=dtype, device=device)
            return nn.Parameter(tensor, requires_grad=False)

        gate_dtype = torch.float32 if spec.routing.has_float32_gate else spec.dtype
        self.gate_weight = new(spec.num_experts, H, dtype=gate_dtype)
        has_bias = spec.routing.has_bias
        self.gate_bias = new(spec.num_experts, dtype=torch.float32) if has_bias else None
        self.w13_weight = new(spec.num_local_experts, halves * I, H)
        self.w2_weight = new(spec.num_local_experts, H, I)
        self.shared_w13_weight = new(halves * S, H) if S else None
        self.shared_w2_weight = new(H, S) if S else None
        self.shared_gate_weight = new(1, H) if S and spec.has_shared_gate else None

    @property
    def nan_rows(self) -> int:
        """Rows of router logits that held a NaN; reading it waits for the device."""
        return int(self.kernel.nan_rows)

    def process_weights(self) -> None:
        """Converts the experts into the plan's layout: once per load, in place.

        A second call without new weights does nothing. New weights are noticed by torch's version
        counters; a loader that writes through `.data`, which does not count, calls `begin_load`
        first.

        Raises:
            RuntimeError: Only one of w13 and w2 was loaded again.
        """
        versions = (self.w13_weight._version, self.w2_weight._version)
        if self._weights is not None:
            changed = [new != old for new, old in zip(versions, self._versions, strict=True)]
            if not any(changed):
                return
            if not all(changed):
                raise RuntimeError(
                    "w13_weight and w2_weight are converted together; only one was loaded again"
                )
        raw = MoEWeights(self.w13_weight.data, self.w2_weight.data)
        self._weights = convert_to_unquantized_kernel_format(self.kernel.plan, raw)
        self._versions = versions

    def begin_load(self) -> None:
        """Says that w13 and w2 are about to be written again, in the checkpoint's layout."""
        self._weights = None

    def forward(
        self,
        x: torch.Tensor,
        batch: object = None,
        logits: torch.Tensor | None = None,
        *,
        leaves_sum: bool = False,
        follows_sum: bool = False,
    ) -> torch.Tensor | SlotSum:
        """Runs the layer.

        Args:
            x: [T, H]; not written to.
            batch: The forward batch. `num_padding_tokens` is counted and `dp_num_tokens` (T of
                every DP rank) is used where it has them.
            logits: [T, E], the gate's product where the caller has taken it already.
            leaves_sum: The caller takes a `SlotSum` too, which comes where nothing else is to be
                added: no shared expert, no other rank.
            follows_sum: The layer before, of as many rows, gave a `SlotSum` that a norm has taken.

        Returns:
            [T, H], complete on every TP rank.

        Raises:
            RuntimeError: `process_weights` was not called.
        """
        if self._weights is None:
            raise RuntimeError("process_weights() has to follow loading")
        self.padding_rows += getattr(batch, "num_padding_tokens", 0)
        if logits is None:
            logits = self._gate(x.to(self.gate_weight.dtype), self.gate_weight)
        dp_num_tokens = getattr(batch, "dp_num_tokens", None)
        is_alone = not self.kernel.is_partial and self.shared_w13_weight is None
        out = self.kernel(
            x,
            logits,
            self.gate_bias,
            self._weights,
            dp_num_tokens,
            leaves_sum=leaves_sum and is_alone,
            has_clear_counts=follows_sum and is_alone,
        )
        if not isinstance(out, torch.Tensor):
            return out
        if not self.kernel.is_partial:
            shared = self._shared(x)
            return out if shared is None else out + self.parallel.all_reduce_tp(shared)
        shared = self._shared(x)
        # One sum over the ranks for both parts: the shared expert must come in once, not tp times.
        return self.parallel.all_reduce_tp(out if shared is None else out + shared)

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        """The shared expert's output, this rank's part of it; None without one."""
        if self.shared_w13_weight is None or self.shared_w2_weight is None:
            return None
        is_exact = self.spec.is_deterministic
        h = self._linear(x, self.shared_w13_weight)
        h = (activate_exactly if is_exact else activate)(h, self.spec.activation)
        y = self._linear(h, self.shared_w2_weight)
        if self.shared_gate_weight is not None:
            gate = self._linear(x, self.shared_gate_weight)
            y = y * (sigmoid_exactly if is_exact else torch.sigmoid)(gate)
        return y


def _linear_for(
    spec: MoESpec, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product of gate and shared expert: the library's, or one whose bits ignore T."""
    if not spec.is_deterministic:
        return F.linear
    if spec.platform == "cpu":
        return linear_by_tiles
    fixed = fixed_projection(device)
    return lambda x, weight: fixed(x, weight, None, None)
