"""Every expert over every token, weighted by a dense matrix: a backend in thirty lines."""

from __future__ import annotations

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits
from moeserve.moe.backends.common import activate
from moeserve.moe.spec import MoESpec, MoEWeights

NOT_A_BACKEND = 7


class ExampleDense(Backend):
    """Dense experts in plain torch; runs wherever torch does."""

    traits = Traits(
        name="example_dense",
        title="Example",
        platforms=frozenset({"cpu", "oot"}),
        dtypes=frozenset({torch.float32}),
        kernel_patterns=(r"^aten::bmm$",),
    )

    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply`."""
        ids = routed.local_ids().long()
        num_local = weights.w13.shape[0]
        # One column more than there are experts takes the slots of nobody.
        dense = x.new_zeros(x.shape[0], num_local + 1)
        dense.scatter_add_(1, torch.where(ids < 0, num_local, ids), routed.topk_weights)
        h = activate(x @ weights.w13.mT, spec.activation)  # [E_loc, T, I]
        y = h @ weights.w2.mT  # [E_loc, T, H]
        return torch.einsum("te,eth->th", dense[:, :num_local], y)
