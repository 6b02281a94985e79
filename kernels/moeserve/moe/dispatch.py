"""The modular kernel: prepare and finalise between ranks, around the experts of a plan.

Receives tokens and router logits, returns the experts' sum. Which backend runs is in the plan;
what it computes is in `backends/`; the shared expert belongs to `layers/moe.py`.
"""

from __future__ import annotations

import torch

from moeserve.moe.backends.base import Backend, Routed
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights, Plan
from moeserve.parallel import Parallel


class MoEKernel:
    """Routing, transport and experts of one layer on one rank."""

    def __init__(
        self, spec: MoESpec, plan: Plan, experts: dict[str, Backend], parallel: Parallel
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.experts = experts
        self.parallel = parallel
        self.expert_map = expert_map(spec)

    @property
    def is_partial(self) -> bool:
        """Whether the result is this rank's part of a sum over the TP group."""
        return self.parallel.tp_size > 1

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        weights: MoEWeights,
    ) -> torch.Tensor:
        """Experts' sum [T, H] in `x.dtype`, for tokens [T, H] and logits [T, E]."""
        backend = self.experts[self.plan.backend_for(x.shape[0])]
        topk = route(logits, self.spec.routing, bias)
        routed = Routed(topk.ids, topk.weights, self.expert_map)
        return backend.apply(self.spec, x, routed, weights)


def expert_map(spec: MoESpec) -> torch.Tensor | None:
    """int32 [E]: global id to index on this rank, -1 elsewhere; None where all are here."""
    if spec.num_local_experts == spec.num_experts:
        return None
    first = spec.first_local_expert
    local = torch.full((spec.num_experts,), -1, dtype=torch.int32)
    local[first : first + spec.num_local_experts] = torch.arange(
        spec.num_local_experts, dtype=torch.int32
    )
    return local
