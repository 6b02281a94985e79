"""Faults of an MoE layer with a dose, as a backend that wraps a real one: for tests of the gates.

Receives a `Fault` ("noise:0.03", "experts-zeroed:1@2") and a backend; returns a backend that
routes by itself, spoils routing, weights or arithmetic as the fault says, and lets the real one
compute. A dose of 0 changes no bit. It is no member of the registry: in process it is given to a
`MoEKernel`, and a server can name it only where a package outside this tree registers it
(`tests/serve/faulty_backend`). What the doses do is measured by `measure`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch
from torch import Tensor

from moeserve.moe.backends.base import CHECKPOINT, Backend, Routed, Unrouted
from moeserve.moe.backends.common import activate, combine
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights

NAME = "faulty"
SEED = 5
# Kind -> what it does; the number is the dose.
KINDS = {
    "random-routing": "this share of the tokens goes to K random experts",
    "halves-swapped": "gate and up are swapped in this many experts",
    "no-renormalisation": "the K weights keep the size they have among all E",
    "slots-dropped": "this many of a token's K experts are left out, the least first",
    "experts-zeroed": "this many experts answer zero",
    "experts-swapped": "this many experts (an even number) hold each other's weights",
    "row-lost": "the last row of every tile of this many rows is lost",
    "noise": "normal noise on the experts' weights, relative to their root mean square",
    "narrow-sums": "products are summed in bf16, rounded after every block of this many",
    "expert-scale": "one expert's output is this much too large (0.1: by a tenth)",
    "layer-scale": "the output of all experts is this much too large",
}
WHOLE_DOSES = frozenset(
    {"halves-swapped", "slots-dropped", "experts-zeroed", "experts-swapped", "row-lost"}
    | {"narrow-sums"}
)


@dataclass(frozen=True)
class Fault:
    """One fault at one dose.

    Attributes:
        kind: a key of `KINDS`.
        dose: how much of it, in the unit that `KINDS` says; 0 is no fault.
        layer: the one MoE layer that has it; None is every layer.
    """

    kind: str
    dose: float
    layer: int | None = None

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ValueError: names the kind or the dose.
        """
        if self.kind not in KINDS:
            close = get_close_matches(self.kind, KINDS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"fault {self.kind!r} is not one of {', '.join(KINDS)}{hint}")
        if not 0 <= self.dose < float("inf"):
            raise ValueError(f"fault {self.kind}: dose {self.dose} is no number from 0 up")
        if self.kind in WHOLE_DOSES and self.dose != int(self.dose):
            raise ValueError(f"fault {self.kind}: dose {self.dose} is no whole number")
        if self.kind == "experts-swapped" and self.dose % 2:
            raise ValueError(f"fault {self.kind}: dose {self.dose:g} is odd; experts go in pairs")
        if self.kind in ("random-routing", "no-renormalisation") and self.dose > 1:
            raise ValueError(f"fault {self.kind}: dose {self.dose:g} is more than 1")

    def __str__(self) -> str:
        where = "" if self.layer is None else f"@{self.layer}"
        return f"{self.kind}:{self.dose:g}{where}"

    def is_in(self, layer: int) -> bool:
        """Whether a layer has the fault at all."""
        return self.dose > 0 and self.layer in (None, layer)


def parse_fault(text: str) -> Fault:
    """Read `KIND:DOSE` or `KIND:DOSE@LAYER`.

    Raises:
        ValueError: another form, an unknown kind, a dose without meaning.
    """
    kind, colon, rest = text.strip().partition(":")
    dose, at, layer = rest.partition("@")
    try:
        return Fault(kind, float(dose), int(layer) if at else None)
    except ValueError as error:
        if (colon and kind not in KINDS) or "fault" in str(error):
            raise
        raise ValueError(
            f"fault {text!r} is not of the form KIND:DOSE or KIND:DOSE@LAYER"
        ) from None


@dataclass(frozen=True)
class LayerWeights(MoEWeights):
    """Weights that know their layer's number, counted over the layers that were prepared."""

    layer: int = 0


class FaultyExperts(Backend):
    """A real backend with a fault in it; `traits.name` is `NAME`, so no log can hide it."""

    def __init__(self, inner: Backend, fault: Fault) -> None:
        """Wrap `inner`, which has to take ids and weights in the checkpoint's layout.

        Raises:
            ValueError: it does not.
        """
        if inner.layout != CHECKPOINT or inner.traits.takes == "logits":
            raise ValueError(f"backend {inner.name}: a fault needs ids and the checkpoint's layout")
        self.inner, self.fault = inner, fault
        self.traits = replace(
            inner.traits,
            name=NAME,
            title=f"{inner.traits.title} with fault {fault}",
            takes="logits",
            has_expert_maps=False,
            is_deterministic=False,
            is_graph_safe=False,
        )
        self._layers: dict[int, int] = {}
        self._random = torch.Generator().manual_seed(SEED)

    def prepare(self, weights: MoEWeights) -> MoEWeights:
        """Return weights with the fault; the ones given stay as they are."""
        # A layer that is loaded again keeps its memory, and so its number.
        layer = self._layers.setdefault(weights.w13.data_ptr(), len(self._layers))
        ready = self.inner.prepare(weights)
        w13, w2 = ready.w13, ready.w2
        if self.fault.is_in(layer):
            w13, w2 = spoiled(w13, w2, self.fault, layer)
        return LayerWeights(w13, w2, ready.layout, layer)

    def apply(
        self,
        spec: MoESpec,
        x: Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.apply`; faults of the routing need the logits."""
        return self.inner.apply(spec, x, routed, weights, workspace)

    def apply_logits(
        self,
        spec: MoESpec,
        x: Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.apply_logits`."""
        layer = weights.layer if isinstance(weights, LayerWeights) else 0
        logits, bias = unrouted.logits, unrouted.bias
        topk = route(logits, spec.routing, bias, unrouted.nan_rows)
        ids, factors = topk.ids, topk.weights
        kind, dose = self.fault.kind, self.fault.dose
        if not self.fault.is_in(layer):
            pass
        elif kind == "random-routing":
            ids = self._random_ids(ids, logits.shape[1])
        elif kind == "no-renormalisation":
            raw = route(logits, replace(spec.routing, is_renormalized=False), bias).weights
            factors = factors + dose * (raw - factors)
        elif kind == "slots-dropped":
            ids = ids.clone()
            ids[:, max(0, ids.shape[1] - int(dose)) :] = -1
        elif kind == "row-lost":
            ids = without_rows(ids, int(dose))
        elif kind == "narrow-sums":
            return narrow_experts(spec, x, Routed(ids, factors), weights, int(dose))
        return self.inner.apply(spec, x, Routed(ids, factors), weights, workspace)

    def _random_ids(self, ids: Tensor, num_experts: int) -> Tensor:
        """Replace the ids of a random share of the tokens by K distinct random ones."""
        num_tokens, top_k = ids.shape
        drawn = torch.rand(num_tokens, num_experts, generator=self._random).topk(top_k).indices
        is_hit = torch.rand(num_tokens, 1, generator=self._random) < self.fault.dose
        return torch.where(is_hit.to(ids.device), drawn.to(ids), ids)


def wrong_experts(layer: int, num_experts: int, count: int) -> list[int]:
    """Return the experts that a dose hits; those of a smaller dose are among them."""
    generator = torch.Generator().manual_seed(SEED + layer)
    if count > num_experts:
        raise ValueError(f"{count} experts cannot be wrong of {num_experts}")
    order: list[int] = torch.randperm(num_experts, generator=generator).tolist()
    return order[:count]


def spoiled(w13: Tensor, w2: Tensor, fault: Fault, layer: int) -> tuple[Tensor, Tensor]:
    """Return copies of a layer's weights with a fault; the same tensors if it is of another sort.

    Args:
        w13: [E, 2I, H], gate rows, then up rows.
        w2: [E, H, I].
        fault: what to do.
        layer: its number, which draws the experts and the noise.
    """
    kind, dose = fault.kind, fault.dose
    count = int(dose) if kind in WHOLE_DOSES else 1
    if kind == "noise":
        generator = torch.Generator().manual_seed(SEED + layer)
        return noisy(w13, dose, generator), noisy(w2, dose, generator)
    if kind == "layer-scale":
        return w13, w2 * (1 + dose)
    if kind not in ("halves-swapped", "experts-zeroed", "experts-swapped", "expert-scale"):
        return w13, w2
    w13, w2 = w13.clone(), w2.clone()
    wrong = wrong_experts(layer, w13.shape[0], count)
    if kind == "halves-swapped":
        w13[wrong] = w13[wrong].roll(w13.shape[1] // 2, dims=1)
    elif kind == "experts-zeroed":
        w2[wrong] = 0.0
    elif kind == "expert-scale":
        w2[wrong] *= 1 + dose
    else:
        others = [expert for pair in zip(wrong[1::2], wrong[::2], strict=True) for expert in pair]
        w13[wrong], w2[wrong] = w13[others], w2[others]
    return w13, w2


def noisy(weight: Tensor, dose: float, generator: torch.Generator) -> Tensor:
    """Add normal noise of `dose` times the root mean square of the whole tensor."""
    # Drawn on the CPU, so that every device has the same fault.
    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
    scale = dose * float(weight.float().pow(2).mean().sqrt())
    return (weight.float() + scale * noise).to(weight.dtype)


def without_rows(ids: Tensor, tile_rows: int) -> Tensor:
    """Take out the last row of every full tile of the first GEMM: its slot becomes nobody's.

    Args:
        ids: [T, K]; rows of a tile are one expert's slots in the order of the tokens.
        tile_rows: rows of a tile; one that is not full has no last row.
    """
    flat = ids.reshape(-1).clone()
    groups, order = flat.sort(stable=True)
    counts = torch.bincount(groups.clamp_min(0))
    starts = counts.cumsum(0) - counts
    row = torch.arange(len(flat), device=flat.device) - starts[groups.clamp_min(0).long()]
    flat[order[row % tile_rows == tile_rows - 1]] = -1
    return flat.view_as(ids)


def narrow_experts(
    spec: MoESpec, x: Tensor, routed: Routed, weights: MoEWeights, block: int
) -> Tensor:
    """Experts whose products keep their running sum in bf16.

    Args:
        spec: the layer.
        x: [T, H].
        routed: ids and weights [T, K].
        weights: in the checkpoint's layout.
        block: terms that are summed exactly between two roundings.
    """
    slots = routed.topk_ids.reshape(-1)
    groups, order = slots.sort(stable=True)
    tokens = order // routed.topk_ids.shape[1]
    y = x.new_zeros(len(order), x.shape[1])
    for expert in sorted(set(groups.tolist())):
        rows = groups == expert
        h = activate(narrow_product(x[tokens[rows]], weights.w13[expert], block), spec.activation)
        y[rows] = narrow_product(h, weights.w2[expert], block)
    return combine(y, order, routed.topk_weights)


def narrow_product(x: Tensor, weight: Tensor, block: int) -> Tensor:
    """X [n, m] times weight [k, m] transposed, the sum rounded to bf16 after every block."""
    shape = (x.shape[0], weight.shape[0])
    total = torch.zeros(shape, dtype=torch.bfloat16, device=x.device)
    for at in range(0, x.shape[1], block):
        part = x[:, at : at + block].float() @ weight[:, at : at + block].float().T
        total = (total.float() + part).to(torch.bfloat16)
    return total.to(x.dtype)
