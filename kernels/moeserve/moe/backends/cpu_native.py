"""Experts on a CPU in C: routing, both products, activation and sum in two calls.

Receives [T, H] and logits or a routing, returns [T, H]. Weights are stored in blocks of columns,
[E, blocks, H, columns] and [E, blocks, I, columns], so that a tile of a product is a broadcast and
a multiply-add over one stream of memory.
The kernels are `native/kernels.c`; without a C compiler the backend `cpu` serves in plain torch.
"""

from __future__ import annotations

import ctypes

import torch

from moeserve.moe.backends.base import Backend, Routed, Traits, Unrouted
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.native.build import LANES, native

# Columns of a block of weights, where a width is a multiple; `BLOCK` of kernels.c.
BLOCK_COLUMNS = 64
# What a profiler sees of a call into C.
EVENT = "moeserve::cpu_native_experts"


class _Experts(ctypes.Structure):
    """`Experts` of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("T", "H", "I", "E", "K")),
        ("w13", ctypes.c_void_p),
        ("w2", ctypes.c_void_p),
    )


class CpuNativeExperts(Backend):
    """Experts in C."""

    traits = Traits(
        name="cpu_native",
        title="CPU (native)",
        platforms=frozenset({"cpu"}),
        layout="column_blocks",
        dtypes=frozenset({torch.float32}),
        takes="both",
        kernel_patterns=(f"^{EVENT}$",),
    )

    def limits(self, spec: MoESpec) -> str:
        """See `Backend.limits`."""
        for name, size in (("H", spec.hidden_size), ("I", spec.intermediate_size)):
            if size % LANES:
                return f"kernel does not support {name}={size}, no multiple of {LANES}"
        return ""

    def missing(self) -> str:
        """See `Backend.missing`."""
        return native().reason

    def workspace_bytes(self, spec: MoESpec, num_tokens: int) -> int:
        """See `Backend.workspace_bytes`."""
        functions = native().functions
        if functions is None:
            return 0
        sizes = (num_tokens, spec.hidden_size, spec.intermediate_size)
        K, E = spec.routing.top_k, spec.num_local_experts
        needed: int = functions.moeserve_experts_work(*sizes, E, K)
        # Ids and weights of the router, and its scratch.
        return needed + 8 * num_tokens * K + 8 * spec.num_experts + 64

    def convert_expert(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[2I, H] to [blocks, H, columns], and [H, I] to [blocks, I, columns]."""
        return _in_blocks(w13), _in_blocks(w2)

    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply`.

        Raises:
            ValueError: The weights are in another layout; C would read past their end.
        """
        if weights.layout != self.layout:
            raise ValueError(f"{self.name} wants layout {self.layout!r}, not {weights.layout!r}")
        ids = routed.local_ids().to(torch.int32).contiguous()
        factors = routed.topk_weights.to(torch.float32).contiguous()
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with torch.profiler.record_function(EVENT):
                return _experts(x, ids, factors, weights, workspace)
        return _experts(x, ids, factors, weights, workspace)

    def apply_logits(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.apply_logits`."""
        logits, bias, nan_rows = unrouted.logits, unrouted.bias, unrouted.nan_rows
        if _is_plain(spec.routing) and bias is None:
            ids, factors = _route(logits.float().contiguous(), spec.routing, nan_rows)
        else:
            factors, ids = route(logits, spec.routing, bias, nan_rows)
        if spec.num_local_experts < spec.num_experts:
            # Global ids to indices on this rank; -1 is skipped.
            ids = ids - spec.first_local_expert
            ids = torch.where((ids >= 0) & (ids < spec.num_local_experts), ids, -1)
        return self.apply(spec, x, Routed(ids, factors), weights, workspace)


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] to [N / columns, K, columns]."""
    N, K = weight.shape
    columns = BLOCK_COLUMNS if N % BLOCK_COLUMNS == 0 else LANES
    return weight.view(N // columns, columns, K).mT.contiguous()


def _is_plain(routing: RoutingSpec) -> bool:
    """Whether the router in C knows this routing."""
    return routing.scoring == "softmax" and routing.num_groups == 1 and not routing.weight_on_input


def _route(
    logits: torch.Tensor, routing: RoutingSpec, nan_rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    functions = native().functions
    assert functions is not None
    T, E = logits.shape
    K = routing.top_k
    ids = torch.empty(T, K, dtype=torch.int32)
    factors = torch.empty(T, K)
    work = torch.empty(2 * E)
    bad = functions.moeserve_route(
        *(logits.data_ptr(), T, E, K, int(routing.is_renormalized), routing.scaling_factor),
        *(ids.data_ptr(), factors.data_ptr(), work.data_ptr()),
    )
    if bad and nan_rows is not None:
        nan_rows += bad
    return ids, factors


def _experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: MoEWeights,
    workspace: torch.Tensor | None,
) -> torch.Tensor:
    functions = native().functions
    assert functions is not None
    x = x.contiguous()
    (T, H), (E, _, I, _), K = x.shape, weights.w2.shape, ids.shape[1]
    needed = functions.moeserve_experts_work(T, H, I, E, K)
    if workspace is None or workspace.numel() < needed:
        workspace = torch.empty(needed, dtype=torch.uint8)
    layer = _Experts(T, H, I, E, K, weights.w13.data_ptr(), weights.w2.data_ptr())
    out = torch.empty_like(x)
    functions.moeserve_experts(
        *(ctypes.addressof(layer), x.data_ptr(), ids.data_ptr(), factors.data_ptr()),
        *(out.data_ptr(), workspace.data_ptr()),
    )
    return out


BACKEND = CpuNativeExperts()
