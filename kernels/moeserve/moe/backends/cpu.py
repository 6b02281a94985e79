"""Experts on a CPU, in plain torch: tokens sorted by expert, one matrix product per expert.

Receives [T, H] and a routing, returns [T, H]. A handful of tokens goes slot by slot instead,
which saves the sorting. The grouped product of torch is `torch_grouped_mm.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moeserve.moe.backends.base import Backend, Routed, Traits
from moeserve.moe.spec import MoESpec, MoEWeights

# Up to this many (token, slot) pairs, one matrix-vector product each is quicker than sorting;
# measured with H = I = 128, E = 32, K = 4 on one and on two cores.
MAX_SLOTS_ONE_BY_ONE = 8


def activate(h: torch.Tensor, spec: MoESpec) -> torch.Tensor:
    """Activation between the two products: [..., 2I] (gate, up) or ungated [..., I] to [..., I]."""
    if spec.activation == "relu2":
        return F.relu(h).square()
    width = h.shape[-1] // 2
    gate, up = h[..., :width], h[..., width:]
    if spec.activation == "swiglu_oai":
        # alpha 1.702, limit 7, +1 on the linear half: gpt-oss's published form.
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)
    return F.silu(gate) * up


class CpuExperts(Backend):
    """Per-expert products on the CPU."""

    traits = Traits(
        name="cpu",
        title="CPU",
        platforms=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        activations=frozenset({"silu", "swiglu_oai", "relu2"}),
        has_input_weighting=True,
        kernel_patterns=(r"^aten::(mm|mv|addmm|addmv)$",),
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
        ids = routed.local_ids()
        if ids.numel() <= MAX_SLOTS_ONE_BY_ONE:
            return _slot_by_slot(spec, x, ids.tolist(), routed.topk_weights, weights)
        return _by_expert(spec, x, ids, routed.topk_weights, weights)


def _slot_by_slot(
    spec: MoESpec,
    x: torch.Tensor,
    ids: list[list[int]],
    topk_weights: torch.Tensor,
    weights: MoEWeights,
) -> torch.Tensor:
    """One matrix-vector product per slot; float32 sum over slots in slot order."""
    slots = [(token, slot) for token, row in enumerate(ids) for slot, e in enumerate(row) if e >= 0]
    out = torch.zeros(x.shape, dtype=torch.float32)
    if not slots:
        return out.to(x.dtype)
    factors = topk_weights.tolist()
    hidden = []
    for token, slot in slots:
        row = x[token]
        if spec.routing.weight_on_input:
            row = row * factors[token][slot]
        hidden.append(torch.mv(weights.w13[ids[token][slot]], row))
    h = activate(torch.stack(hidden), spec)
    for index, (token, slot) in enumerate(slots):
        y = torch.mv(weights.w2[ids[token][slot]], h[index])
        out[token].add_(y, alpha=1.0 if spec.routing.weight_on_input else factors[token][slot])
    return out.to(x.dtype)


def _by_expert(
    spec: MoESpec,
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: MoEWeights,
) -> torch.Tensor:
    """Rows sorted by expert; two products per expert that has any."""
    num_tokens, top_k = ids.shape
    num_experts = weights.w13.shape[0]
    flat = ids.reshape(-1)
    # -1 becomes a last, empty group, whose rows stay zero.
    group = torch.where(flat < 0, num_experts, flat)
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=num_experts + 1).tolist()
    rows = x.index_select(0, order // top_k)
    if spec.routing.weight_on_input:
        rows = (rows * topk_weights.reshape(-1)[order].unsqueeze(1)).to(x.dtype)
    h = rows.new_empty(len(order), weights.w13.shape[1])
    spans = _spans(counts[:num_experts])
    for expert, start, end in spans:
        torch.mm(rows[start:end], weights.w13[expert].t(), out=h[start:end])
    num_kept = len(order) - counts[num_experts]
    h = activate(h[:num_kept], spec)
    y = rows.new_zeros(len(order), x.shape[1])
    for expert, start, end in spans:
        torch.mm(h[start:end], weights.w2[expert].t(), out=y[start:end])
    return combine(y, order, None if spec.routing.weight_on_input else topk_weights, top_k)


def _spans(counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows."""
    spans, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, start, start + count))
            start += count
    return spans


def combine(
    y: torch.Tensor, order: torch.Tensor, topk_weights: torch.Tensor | None, top_k: int
) -> torch.Tensor:
    """Sorted expert outputs [T·K, H] to the weighted sum over slots [T, H], in slot order.

    Args:
        y: Rows in the order of `order`.
        order: Slot number of each row.
        topk_weights: float32 [T, K]; None where the weight went on the input.
        top_k: K.
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    slots = y.index_select(0, inverse).view(-1, top_k, y.shape[1])
    if topk_weights is None:
        return slots.sum(1)
    return torch.bmm(topk_weights.unsqueeze(1), slots.float()).squeeze(1).to(y.dtype)
