"""Numerical truth of the MoE layer: slow, in float64, one token and one expert at a time.

Receives the same tensors as the fast paths, returns float64. Everything else is compared with
this page; it shares no code with what it checks. ("Oracle" is the other word, for the selector.)
"""

from __future__ import annotations

import math

import torch

from moeserve.moe.spec import Activation, MoESpec, RoutingSpec

FLOAT32_MAX = torch.finfo(torch.float32).max


def reference_routing(
    logits: torch.Tensor, routing: RoutingSpec, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float64 [T, K] and ids int64 [T, K], as `routing.route` defines them.

    Args:
        logits: [T, E].
        routing: The model's routing.
        bias: [E] or None; counts for the choice only.
    """
    shift = [0.0] * logits.shape[1] if bias is None else bias.double().tolist()
    rows = [_reference_row(row, routing, shift) for row in logits.double().tolist()]
    weights = torch.tensor([w for w, _ in rows], dtype=torch.float64).view(-1, routing.top_k)
    ids = torch.tensor([i for _, i in rows], dtype=torch.int64).view(-1, routing.top_k)
    return weights, ids


def _reference_row(
    row: list[float], routing: RoutingSpec, bias: list[float]
) -> tuple[list[float], list[int]]:
    # NaN counts as -inf, +inf as the largest finite value, a row of nothing else as equal logits.
    clean = [-math.inf if math.isnan(v) else min(v, FLOAT32_MAX) for v in row]
    if max(clean) == -math.inf:
        clean = [0.0] * len(row)
    if routing.scoring == "sigmoid" or routing.weight_on_input:
        scores = [1.0 / (1.0 + math.exp(-v)) if v > -700 else 0.0 for v in clean]
    else:
        largest = max(clean)
        exps = [math.exp(v - largest) for v in clean]
        scores = [e / sum(exps) for e in exps]
    # Each expert is ranked by (has a number, score or logit, lowest id); a bias raises no expert
    # without a number above another one.
    rank = [
        (v > -math.inf, (s + b if routing.has_bias else v) if v > -math.inf else 0.0, -e)
        for e, (v, s, b) in enumerate(zip(clean, scores, bias, strict=True))
    ]
    candidates = _candidates(rank, routing)
    ids = sorted(candidates, key=lambda e: rank[e], reverse=True)[: routing.top_k]
    weights = [scores[e] for e in ids]
    if routing.is_renormalized and not routing.weight_on_input:
        total = sum(weights)
        weights = [w / total if total > 0 else 1.0 / len(ids) for w in weights]
    return [w * routing.scaling_factor for w in weights], ids


def _candidates(rank: list[tuple[bool, float, int]], routing: RoutingSpec) -> list[int]:
    """Experts of the kept groups."""
    if routing.num_groups == 1:
        return list(range(len(rank)))
    size = len(rank) // routing.num_groups

    def group_rank(group: int) -> tuple[int, float, int]:
        members = sorted(rank[group * size : (group + 1) * size], reverse=True)
        counted = members[:2] if routing.has_bias else members[:1]
        # A group that lacks one of its numbers has no sum to go by.
        numbers = sum(m[0] for m in counted)
        return numbers, sum(m[1] for m in counted) if numbers == len(counted) else 0.0, -group

    kept = sorted(range(routing.num_groups), key=group_rank, reverse=True)
    kept = kept[: routing.top_k_groups]
    return [e for g in sorted(kept) for e in range(g * size, (g + 1) * size)]


def reference_activation(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[2I] (gate, up) or ungated [I] to [I], float64."""
    if activation == "relu2":
        return h.clamp_min(0.0) ** 2
    gate, up = h.chunk(2)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate / (1.0 + torch.exp(-1.702 * gate)) * (up + 1.0)
    return gate / (1.0 + torch.exp(-gate)) * up


def reference_experts(
    spec: MoESpec,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """Experts' weighted sum, float64 [T, H].

    Args:
        spec: The layer; its activation and whether the weight goes on the input count.
        x: [T, H].
        topk_weights: [T, K].
        topk_ids: [T, K], indices into `w13`; -1 adds nothing.
        w13: [E, 2I, H] in the checkpoint's layout ([E, I, H] ungated).
        w2: [E, H, I].
    """
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(
            topk_weights[token].tolist(), topk_ids[token].tolist(), strict=True
        ):
            if expert < 0:
                continue
            row = x[token].double()
            if spec.routing.weight_on_input:
                row, weight = row * weight, 1.0
            h = reference_activation(w13[expert].double() @ row, spec.activation)
            out[token] += weight * (w2[expert].double() @ h)
    return out
