"""The contract of the experts: what a backend says of itself, and the one call that runs it.

Receives tokens with their routing (`Routed`) or the router's logits, and weights in the backend's
own layout; returns the experts' sum for each token. Who moves tokens between ranks is
`dispatch.py`; who chooses among backends is `oracle.py`; the routing itself is `routing.py`.

A file of this folder ends with `BACKEND = ItsClass()`, which is how it is found. A backend from
outside the tree subclasses `Backend` and registers under the entry point group
`moeserve.moe_backends`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from moeserve.moe.spec import MoESpec, MoEWeights, Support

if TYPE_CHECKING:
    from moeserve.triton_kernels.combine import SlotSum

CHECKPOINT = "checkpoint"
# Platforms that this project has hardware of; on any other a backend was never executed.
PLATFORMS_AT_HAND = frozenset({"cpu", "cuda-sm90"})


@dataclass(frozen=True)
class Routed:
    """Tokens' choices, as the router made them.

    Attributes:
        topk_ids: int32 [T, K], global ids, K distinct in every row. -1 = a slot of nobody
            (padding): it adds exactly zero.
        topk_weights: float32 [T, K].
        expert_map: int32 [E]: global id to index into this rank's weights, -1 for an expert that
            lives elsewhere. None where every expert is here.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    expert_map: torch.Tensor | None = None

    def local_ids(self) -> torch.Tensor:
        """Ids as indices into this rank's weights, int32 [T, K]; -1 where there is none."""
        if self.expert_map is None:
            return self.topk_ids
        # -1 must not index the last entry, so it is clamped for the look-up and put back after.
        mapped = self.expert_map[self.topk_ids.clamp_min(0).long()]
        return torch.where(self.topk_ids < 0, self.topk_ids, mapped)


@dataclass(frozen=True)
class Unrouted:
    """What a backend that routes by itself goes by.

    Attributes:
        logits: [T, E].
        bias: Correction bias [E], float32, where the routing has one.
        nan_rows: int64 [1]; rows of logits that hold a NaN are added, where it can count them.
    """

    logits: torch.Tensor
    bias: torch.Tensor | None = None
    nan_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Traits:
    """What is always true of a backend, whatever the layer.

    Attributes:
        name: As accepted by `--moe-backend`.
        title: As printed in tables and logs.
        platforms: Where it can run at all.
        layout: Weight layout; backends of one plan share it.
        dtypes: Of weights and activations.
        activations: Activations it computes.
        activation_format: "flat" takes [T, H]; "batched" takes [E_loc, capacity, H].
        takes: "ids" (a `Routed`), "logits" (it routes by itself, by the rules of `routing.py`), or
            "both": logits where tokens stay on their rank, ids where they were moved.
        has_weighting: It multiplies by the router's weights; else `dispatch.py` does.
        has_reduction: It returns [T, H], summed over slots; else [T, K, H].
        has_expert_maps: It can hold a part of the experts.
        has_input_weighting: It can apply the router's weight to the token (Llama-4).
        is_graph_safe: It can be captured in a CUDA graph: no host sync, fixed addresses.
        is_deterministic: A token's result does not depend on the batch around it, bit for bit.
        was_executed: This project has run it where it has the hardware. Elsewhere, and where this
            is False, "never executed" is printed wherever it is listed.
        kernel_patterns: Regular expressions; a kernel name that matches one is evidence that
            this backend ran.
    """

    name: str
    title: str
    platforms: frozenset[str]
    layout: str = CHECKPOINT
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16})
    activations: frozenset[str] = frozenset({"silu"})
    activation_format: Literal["flat", "batched"] = "flat"
    takes: Literal["ids", "logits", "both"] = "ids"
    has_weighting: bool = True
    has_reduction: bool = True
    has_expert_maps: bool = True
    has_input_weighting: bool = False
    is_graph_safe: bool = False
    is_deterministic: bool = False
    was_executed: bool = True
    kernel_patterns: tuple[str, ...] = ()

    @property
    def executed_on(self) -> frozenset[str]:
        """Platforms on which this project has run it."""
        return self.platforms & PLATFORMS_AT_HAND if self.was_executed else frozenset()


class Backend(ABC):
    """Experts of one layer on one rank. Stateless: all state is in `MoEWeights` and arguments."""

    traits: Traits

    @property
    def name(self) -> str:
        """Name of the backend, as accepted by `--moe-backend`."""
        return self.traits.name

    @property
    def layout(self) -> str:
        """Name of the weight layout that `prepare` makes."""
        return self.traits.layout

    def supports(self, spec: MoESpec) -> Support:
        """Whether this backend can serve the layer; the first obstacle is the reason.

        The order is upstream's: device, activation, dtype, parallel layout, routing, sizes,
        then determinism and graphs, and at last the library that has to be there.
        """
        reason = self._obstacle(spec)
        return Support(not reason, reason)

    def _obstacle(self, spec: MoESpec) -> str:
        traits = self.traits
        if spec.platform not in traits.platforms:
            return f"kernel does not support current device {spec.platform}"
        if spec.activation not in traits.activations:
            return f"kernel does not support {spec.activation} activation"
        if spec.dtype not in traits.dtypes:
            return f"kernel does not support {str(spec.dtype).removeprefix('torch.')} weights"
        if spec.ep_size > 1 and not traits.has_expert_maps:
            return f"kernel does not support parallel config with ep_size={spec.ep_size}"
        if spec.routing.weight_on_input and not traits.has_input_weighting:
            return "kernel does not support routing method with the weight on the input"
        if reason := self.limits(spec):
            return reason
        if spec.is_deterministic and not traits.is_deterministic:
            return "kernel does not support batch invariance (deterministic mode)"
        if spec.needs_graph and not traits.is_graph_safe:
            return "kernel does not support capture in a CUDA graph"
        return self.missing()

    def limits(self, spec: MoESpec) -> str:
        """Sizes or routing forms that this backend cannot serve, as a reason; "" if none."""
        return ""

    def missing(self) -> str:
        """Library that is absent or does not fit, as a reason; "" if nothing is missing."""
        return ""

    def workspace_bytes(self, spec: MoESpec, num_tokens: int) -> int:
        """Scratch bytes for a forward of `num_tokens`; one buffer is shared by all layers."""
        return 0

    def convert_expert(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert from the checkpoint layout into this backend's.

        Args:
            w13: [2I, H], gate rows then up rows; [I, H] ungated, which shows by `w2`.
            w2: [H, I].

        Returns:
            The same numbers in another order, and perhaps another shape of the same size.
        """
        return w13, w2

    def prepare(self, weights: MoEWeights) -> MoEWeights:
        """Converts a layer in place, one expert at a time.

        In place because captured graphs hold addresses, one at a time so that the peak of extra
        memory is one expert. Weights that are in this layout already come back unchanged.

        Raises:
            ValueError: The weights are in a third layout.
        """
        if weights.layout == self.layout:
            return weights
        if weights.layout != CHECKPOINT:
            raise ValueError(
                f"weights are in layout {weights.layout!r}; {self.name} converts from "
                f"{CHECKPOINT!r} only"
            )
        shapes: tuple[torch.Size, torch.Size] | None = None
        for expert in range(weights.w13.shape[0]):
            new13, new2 = self.convert_expert(weights.w13[expert], weights.w2[expert])
            weights.w13[expert].view(-1).copy_(new13.reshape(-1))
            weights.w2[expert].view(-1).copy_(new2.reshape(-1))
            shapes = new13.shape, new2.shape
            del new13, new2  # or they would live beside the next expert's
        if shapes is None:  # a rank without experts
            return replace(weights, layout=self.layout)
        count = weights.w13.shape[0]
        return MoEWeights(
            weights.w13.view(count, *shapes[0]), weights.w2.view(count, *shapes[1]), self.layout
        )

    @abstractmethod
    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the experts of this rank. Never writes to its inputs.

        Args:
            spec: The layer.
            x: [T, H]; T may be 0.
            routed: The tokens' choices.
            weights: In this backend's layout.
            workspace: uint8, at least `workspace_bytes(spec, T)`; None where that is 0.

        Returns:
            [T, H], or [T, K, H] without `has_reduction`; in `x.dtype`. A slot of another rank's
            expert adds exactly zero.
        """

    def apply_logits(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same for a backend that routes by itself (`takes` is "logits" or "both").

        Args:
            spec: The layer.
            x: [T, H]; T may be 0.
            unrouted: What it routes by.
            weights: In this backend's layout.
            workspace: As for `apply`.

        Raises:
            NotImplementedError: This backend takes ids.
        """
        raise NotImplementedError(f"{self.name} takes ids and weights, not router logits")

    def apply_logits_unsummed(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        unrouted: Unrouted,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
        *,
        has_clear_counts: bool = False,
    ) -> torch.Tensor | SlotSum:
        """`apply_logits`, where the sum over slots may be left to the norm that follows.

        `has_clear_counts` says that the layer before left its sum too, and that it has been taken:
        see `SlotSum.counts`.
        """
        return self.apply_logits(spec, x, unrouted, weights, workspace)
