"""Routing in torch: logits [T, E] to ids and weights [T, K], on any device.

The rule for values that are no numbers is applied before the row reduction: NaN becomes -inf,
+inf the largest finite value, and a row without any finite value counts as a row of equal logits.
So every row gets K distinct ids, an expert with a NaN is not taken while K others are finite, and
a clean row keeps its bits. `triton_kernels/router.py` does the same in one kernel on a GPU;
`reference.py` is the definition that both are tested against.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeserve.moe.spec import RoutingSpec


class TopK(NamedTuple):
    """Weights float32 [T, K] and ids int32 [T, K], by falling score, ties to the lowest id."""

    weights: torch.Tensor
    ids: torch.Tensor


def route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    bias: torch.Tensor | None = None,
    nan_rows: torch.Tensor | None = None,
) -> TopK:
    """Chooses K experts for every token.

    Args:
        logits: [T, E], any float dtype; not written to.
        routing: The model's routing.
        bias: Correction bias [E], float32; used for the choice only, never for the weights.
        nan_rows: int64 [1]; the number of rows that hold a NaN is added to it.

    Returns:
        Weights and ids; K distinct ids in every row.
    """
    logits = logits.float()
    if not is_clean(logits):
        if nan_rows is not None:
            nan_rows += logits.isnan().any(-1).sum()
        logits = sanitise(logits)
    if routing.weight_on_input:
        values, ids = _top_k(logits, 1)
        weights = _sigmoid(values)
    elif bias is None and routing.num_groups == 1:
        values, ids = _top_k(logits, routing.top_k)
        weights = _scores_of_chosen(values, ids, logits, routing)
    else:
        scores = logits.softmax(-1) if routing.scoring == "softmax" else _sigmoid(logits)
        ids = _select(scores, logits, routing, bias)
        weights = _renormalise(scores.gather(1, ids), routing)
    if routing.scaling_factor != 1.0:
        weights = weights * routing.scaling_factor
    return TopK(weights, ids.to(torch.int32))


def sanitise(logits: torch.Tensor) -> torch.Tensor:
    """Float32 logits [T, E] with at least one finite value in every row."""
    clean = torch.nan_to_num(
        logits, nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf
    )
    is_void = (clean == -torch.inf).all(dim=-1, keepdim=True)
    return clean.masked_fill(is_void, 0.0)


def is_clean(logits: torch.Tensor) -> bool:
    """Whether nothing needs sanitising; costs a host sync, so only CPU tensors are asked.

    A sum is not finite as soon as one value is not; an overflow of finite values only takes the
    longer way, with the same result.
    """
    return logits.device.type == "cpu" and bool(torch.isfinite(logits.sum()))


def _top_k(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of every row, ties to the lowest index.

    `torch.topk` leaves ties open and a stable sort does not, but costs two to four times as much
    on a CPU. Asked for one value more than k, topk shows by itself whether a tie touches the
    choice; on a GPU, where looking would be a sync, the sort is taken at once.
    """
    if values.device.type == "cpu":
        top = torch.topk(values, min(k + 1, values.shape[-1]), dim=-1)
        if not bool((top.values[:, 1:] == top.values[:, :-1]).any()):
            return top.values[:, :k], top.indices[:, :k]
    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered.values[:, :k], ordered.indices[:, :k]


def _scores_of_chosen(
    values: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, routing: RoutingSpec
) -> torch.Tensor:
    """Weights [T, K] from the chosen logits.

    Softmax and sigmoid are monotonic, so the choice was made on the logits: scores that underflow
    to one value would no longer tell a small logit from a masked one.
    """
    if routing.scoring == "sigmoid":
        return _renormalise(_sigmoid(values), routing)
    if routing.is_renormalized:
        return values.softmax(-1)  # the sum over all E cancels
    return logits.softmax(-1).gather(1, ids)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid by float64: in float32 on a CPU a row's bits depend on its place in the batch.

    The last elements of a tensor take another path through exp() than the others there, and a
    clean row has to keep its bits whatever stands beside it.
    """
    return x.double().sigmoid().float()


def _renormalise(weights: torch.Tensor, routing: RoutingSpec) -> torch.Tensor:
    """Weights that sum to 1 where the model wants it; equal ones where all K underflowed to 0."""
    if not routing.is_renormalized:
        return weights
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0.0, weights / total, 1.0 / routing.top_k)


def _select(
    scores: torch.Tensor, logits: torch.Tensor, routing: RoutingSpec, bias: torch.Tensor | None
) -> torch.Tensor:
    """Ids [T, K] by biased score, within the kept groups."""
    # Without a bias the logits order the experts as the scores do, and do not underflow.
    choice = logits if bias is None else scores + bias
    # An expert whose logit was no number loses to every other one of its group, and still wins
    # over a group that was not kept (-inf).
    choice = choice.masked_fill(logits == -torch.inf, torch.finfo(torch.float32).min)
    if routing.num_groups == 1:
        return _top_k(choice, routing.top_k)[1]
    num_tokens, num_experts = choice.shape
    groups = choice.view(num_tokens, routing.num_groups, num_experts // routing.num_groups)
    if bias is None or groups.shape[-1] == 1:
        group_scores = groups.amax(-1)
    else:
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
    kept = _top_k(group_scores, routing.top_k_groups)[1]
    is_dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    choice = groups.masked_fill(is_dropped.unsqueeze(-1), -torch.inf).view_as(choice)
    return _top_k(choice, routing.top_k)[1]
