"""The modular kernel: prepare and finalise between ranks, around the experts of a plan.

Receives tokens and router logits, returns the experts' sum. How tokens travel is `transport.py`;
which backend runs is in the plan, what it computes is in `backends/`; the shared expert belongs to
`layers/moe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from moeserve.errors import Unsupported
from moeserve.moe.backends.base import Backend, Routed, Unrouted
from moeserve.moe.routing import TopK, route
from moeserve.moe.spec import MoESpec, MoEWeights, Plan, RoutingSpec
from moeserve.moe.transport import make_transport
from moeserve.parallel import Parallel

if TYPE_CHECKING:
    from moeserve.triton_kernels.combine import SlotSum


class Workspace:
    """One scratch buffer for all layers of a device: layers run one after another.

    It grows while layers are built and never after, because captured graphs hold its address.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """Makes room for `num_bytes`."""
        if num_bytes > (0 if self._buffer is None else self._buffer.numel()):
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @property
    def buffer(self) -> torch.Tensor | None:
        """uint8 scratch; None where no backend wants any."""
        return self._buffer


class MoEKernel:
    """Routing, transport and experts of one layer on one rank.

    Attributes:
        nan_rows: int64 [1] on the layer's device, rows of logits that held a NaN, since start.
    """

    def __init__(
        self,
        spec: MoESpec,
        plan: Plan,
        experts: Mapping[str, Backend],
        device: torch.device,
        parallel: Parallel,
        workspace: Workspace,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.experts = experts
        self.transport = make_transport(spec, parallel)
        self.workspace = workspace
        self.expert_map = expert_map(spec, device)
        self.nan_rows = torch.zeros(1, dtype=torch.int64, device=device)
        self._route = _fused_route if device.type == "cuda" else route
        largest = spec.max_num_tokens * parallel.dp_size
        for backend in experts.values():
            if backend.traits.takes == "logits" and not self.transport.carries_logits:
                raise Unsupported(
                    f"{backend.name} takes router logits, which {parallel.dispatch} cannot carry"
                )
            workspace.reserve(backend.workspace_bytes(spec, largest), device)

    @property
    def is_partial(self) -> bool:
        """Whether the result is this rank's part of a sum over the TP group."""
        return self.transport.is_partial

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        weights: MoEWeights,
        dp_num_tokens: Sequence[int] | None = None,
        *,
        leaves_sum: bool = False,
        has_clear_counts: bool = False,
    ) -> torch.Tensor | SlotSum:
        """Runs routing and experts.

        Args:
            x: [T, H]; not written to.
            logits: [T, E].
            bias: Correction bias [E], float32, where the routing has one.
            weights: In the plan's layout.
            dp_num_tokens: T of every DP rank; None lets the transport ask, where it has to know.
            leaves_sum: The sum over slots may be left to the caller. Only where tokens stay here.
            has_clear_counts: The layer before, of as many tokens, left its sum and it was taken.

        Returns:
            [T, H] in `x.dtype`; a part of a sum where `is_partial`.
        """
        num_tokens = x.shape[0]
        if dp_num_tokens is not None and not self.transport.is_local:
            # One answer on all ranks: what a backend takes decides which collectives are entered.
            num_tokens = max(dp_num_tokens) * len(dp_num_tokens)
        backend = self.experts[self.plan.backend_for(num_tokens)]
        takes = backend.traits.takes
        if takes == "logits" or (takes == "both" and self.transport.is_local):
            moved, logits, state = self.transport.prepare_logits(x, logits, dp_num_tokens)
            unrouted = Unrouted(logits, bias, self.nan_rows)
            if moved.shape[0] == 0 or self.spec.num_local_experts == 0:
                out = torch.zeros_like(moved)
            elif leaves_sum and self.transport.is_local:
                return backend.apply_logits_unsummed(
                    self.spec, moved, unrouted, weights, self.workspace.buffer,
                    has_clear_counts=has_clear_counts,
                )  # fmt: skip
            else:
                out = backend.apply_logits(
                    self.spec, moved, unrouted, weights, self.workspace.buffer
                )
            return self.transport.finalise(out, state)
        topk = self._route(logits, self.spec.routing, bias, self.nan_rows)
        moved, topk, state = self.transport.prepare(x, topk, dp_num_tokens)
        if moved.shape[0] == 0 or self.spec.num_local_experts == 0:
            return self.transport.finalise(torch.zeros_like(moved), state)
        routed = Routed(topk.ids, topk.weights, self.expert_map)
        spec = self.transport.experts_spec(self.spec)
        out = backend.apply(spec, moved, routed, weights, self.workspace.buffer)
        return self.transport.finalise(_finish(backend, out, topk.weights), state)


def _finish(backend: Backend, out: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Weighting and sum over slots, as far as the backend leaves them to others."""
    if backend.traits.has_reduction:
        return out
    if not backend.traits.has_weighting:
        out = out * topk_weights.unsqueeze(-1)
    return out.sum(1)


def _fused_route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    bias: torch.Tensor | None,
    nan_rows: torch.Tensor | None,
) -> TopK:
    """The one-kernel router of a GPU, behind the signature of `routing.route`."""
    # Triton is imported only where there is a GPU.
    from moeserve.triton_kernels.router import route as fused

    return TopK(*fused(logits, routing, bias, nan_rows=nan_rows))


def expert_map(spec: MoESpec, device: torch.device) -> torch.Tensor | None:
    """int32 [E]: global id to index on this rank, -1 elsewhere; None where all are here."""
    if spec.num_local_experts == spec.num_experts:
        return None
    first, count = spec.first_local_expert, spec.num_local_experts
    local = torch.full((spec.num_experts,), -1, dtype=torch.int32)
    local[first : first + count] = torch.arange(count, dtype=torch.int32)
    return local.to(device)
