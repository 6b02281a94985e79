"""What is asked of an MoE layer (`MoESpec`), what it holds (`MoEWeights`), what is chosen (`Plan`).

Frozen values only. `oracle.py` turns a spec into a plan, `backends/` answers `Support`, layers
carry both. Letters: T tokens, H hidden, I expert width per rank, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Platform = Literal["cuda-sm90", "cuda-sm100", "cuda-sm120", "rocm", "xpu", "cpu", "tpu", "oot"]
PLATFORMS: tuple[str, ...] = (
    "cuda-sm90",
    "cuda-sm100",
    "cuda-sm120",
    "rocm",
    "xpu",
    "cpu",
    "tpu",
    "oot",
)
Activation = Literal["silu", "swiglu_oai", "relu2"]


@dataclass(frozen=True)
class RoutingSpec:
    """How logits [T, E] become ids and weights [T, K]; part of the model, never of the backend.

    Attributes:
        top_k: K.
        scoring: "softmax" or "sigmoid" over all E logits.
        is_renormalized: Divide the K weights by their sum.
        has_bias: A correction bias [E] is added to the scores for selection only.
        num_groups: Expert groups (DeepSeek); 1 = none.
        top_k_groups: Groups kept.
        scaling_factor: Multiplies the weights, once, after renormalisation.
        weight_on_input: Llama-4: the weight multiplies the token before the expert (K = 1 only);
            scores are then sigmoid of the selected raw logits.
        has_float32_gate: The gate's matrix product is taken in float32 (DeepSeek), not in the
            model's dtype.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_renormalized: bool = True
    has_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    scaling_factor: float = 1.0
    weight_on_input: bool = False
    has_float32_gate: bool = False

    def __post_init__(self) -> None:
        """Refuses combinations that no model can mean.

        Raises:
            ValueError: Names the field and its value.
        """
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: every token needs at least one expert")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring={self.scoring!r}: expected 'softmax' or 'sigmoid'")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(
                f"top_k_groups={self.top_k_groups}: expected 1 to num_groups={self.num_groups}"
            )
        if self.weight_on_input and self.top_k != 1:
            raise ValueError(
                f"weight_on_input with top_k={self.top_k}: the weight can multiply the token only "
                "where a token has one expert (top_k=1)"
            )


@dataclass(frozen=True)
class MoESpec:
    """Everything a backend needs to know to say whether it can serve a layer.

    Attributes:
        num_experts: E, global.
        hidden_size: H.
        intermediate_size: I, on this rank (after TP sharding).
        routing: Routing of the model.
        dtype: Of weights and activations.
        activation: Of the first GEMM's halves; "relu2" has no gate.
        ep_size: Ranks the experts are spread over.
        ep_rank: This rank.
        tp_size: Ranks the expert width is cut over.
        dp_size: Data-parallel ranks.
        platform: One of `PLATFORMS`.
        is_deterministic: A token's result must not depend on the batch around it.
        needs_graph: Must be capturable in a CUDA graph.
        max_num_tokens: Largest T of a forward.
        shared_intermediate_size: Width of the shared expert on this rank (after TP); 0 = none.
        has_shared_gate: The shared expert's output is multiplied by sigmoid(x · gate).
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    routing: RoutingSpec
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = "silu"
    ep_size: int = 1
    ep_rank: int = 0
    tp_size: int = 1
    dp_size: int = 1
    platform: Platform = "cpu"
    is_deterministic: bool = False
    needs_graph: bool = False
    max_num_tokens: int = 8192
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False

    def __post_init__(self) -> None:
        """Refuses sizes that contradict each other.

        Raises:
            ValueError: Names the fields and their values.
        """
        routing = self.routing
        if min(self.num_experts, self.hidden_size, self.intermediate_size) < 1:
            raise ValueError(
                f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
                f"intermediate_size={self.intermediate_size}: all must be at least 1"
            )
        if self.num_experts % routing.num_groups:
            raise ValueError(
                f"num_groups={routing.num_groups} does not divide num_experts={self.num_experts}"
            )
        selectable = routing.top_k_groups * (self.num_experts // routing.num_groups)
        if routing.top_k > selectable:
            raise ValueError(
                f"top_k={routing.top_k} exceeds the {selectable} experts that can be selected "
                f"(num_experts={self.num_experts}, num_groups={routing.num_groups}, "
                f"top_k_groups={routing.top_k_groups})"
            )
        if not 0 <= self.ep_rank < self.ep_size:
            raise ValueError(f"ep_rank={self.ep_rank}: expected 0 to ep_size-1={self.ep_size - 1}")

    @property
    def is_gated(self) -> bool:
        """Whether the first GEMM has gate and up halves (2I rows) or one (I rows)."""
        return self.activation != "relu2"

    @property
    def num_local_experts(self) -> int:
        """E_loc: E // ep, the remainder on the lowest ranks."""
        base, rest = divmod(self.num_experts, self.ep_size)
        return base + (1 if self.ep_rank < rest else 0)

    @property
    def first_local_expert(self) -> int:
        """Global id of the first expert on this rank (linear placement)."""
        base, rest = divmod(self.num_experts, self.ep_size)
        return self.ep_rank * base + min(self.ep_rank, rest)


@dataclass(frozen=True)
class MoEWeights:
    """Weights of one layer on one rank, in the layout named by `layout`.

    Attributes:
        w13: Checkpoint layout: [E_loc, 2I, H], gate rows then up rows ([E_loc, I, H] ungated).
        w2: Checkpoint layout: [E_loc, H, I].
        layout: "checkpoint" or the layout name of a backend.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    layout: str = "checkpoint"


@dataclass(frozen=True)
class Support:
    """A backend's answer to a spec; `reason` says why not, or is "" where it is ok."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Rejection:
    """A backend that was considered and not taken."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The oracle's answer: which backend serves which number of tokens.

    Attributes:
        ranges: (largest T, backend name), ascending; the last one's largest T is `max_num_tokens`.
            All of them share one weight layout.
        layout: That weight layout.
        reason: Why this choice, for logs and `/v1/backends`.
        requested: What was asked for by name, "auto" if nothing was.
        considered: Backend names in the order in which they were asked.
        rejected: Every refusal with its reason.
    """

    ranges: tuple[tuple[int, str], ...]
    layout: str
    reason: str
    requested: str = "auto"
    considered: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = field(default=())

    def backend_for(self, num_tokens: int) -> str:
        """Name of the backend that serves a forward of `num_tokens` tokens."""
        for largest, name in self.ranges:
            if num_tokens <= largest:
                return name
        return self.ranges[-1][1]

    @property
    def primary(self) -> str:
        """The backend of the largest batches; what a config's `expect_backend` names."""
        return self.ranges[-1][1]
