"""The embedded model with the MoE layers of the server in place of the trainer's.

Receives a loaded `TinyMoE` and a backend; replaces its experts by `MoEKernel`, the router and
dispatch that `moeserve` serves with. So a fault of a backend is measured with batches of hundreds
of questions and without a server. Serving is `moeserve.models.qwen3_moe`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.moe.backends.base import Backend
from moeserve.moe.dispatch import MoEKernel, Workspace
from moeserve.moe.platforms import detect_platform
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights, Plan, Platform, RoutingSpec
from moeserve.parallel import Parallel
from moeserve.tiny.model import Layer, MoE, Routing, TinyConfig, TinyMoE


def layer_spec(config: TinyConfig, dtype: torch.dtype, platform: Platform = "cpu") -> MoESpec:
    """Return one MoE layer of the model as the server's runner would describe it."""
    return MoESpec(
        config.num_experts,
        config.hidden_size,
        config.expert_width,
        RoutingSpec(config.experts_per_token),
        dtype=dtype,
        platform=platform,
    )


class ServedMoE(nn.Module):
    """The server's routing, dispatch and experts behind the interface of the trainer's layer."""

    def __init__(self, moe: MoE, spec: MoESpec, backend: Backend) -> None:
        """Take over the weights of a layer.

        Raises:
            ValueError: the backend cannot serve it; gives its reason.
        """
        super().__init__()
        answer = backend.supports(spec)
        if not answer.ok:
            raise ValueError(f"backend {backend.name}: {answer.reason}")
        plan = Plan(((spec.max_num_tokens, backend.name),), backend.layout, "given")
        experts = {backend.name: backend}
        self.spec, self.router = spec, moe.router.weight
        device = self.router.device
        self.kernel = MoEKernel(spec, plan, experts, device, Parallel(), Workspace())
        E, H, I = spec.num_experts, spec.hidden_size, spec.intermediate_size
        gate, up = (part.weight.data.view(E, I, H) for part in (moe.gate, moe.up))
        w2 = moe.down.weight.data.view(H, E, I).transpose(0, 1).contiguous()
        # The raw tensors are kept: a backend may know a layer by their address.
        self._raw = MoEWeights(torch.cat((gate, up), dim=1), w2)
        self.weights = backend.prepare(self._raw)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Return the layer's output for x [T, H]; note the right routing where asked to."""
        logits = functional.linear(x, self.router)
        if routing is not None:
            routing.topk_ids.append(route(logits, self.spec.routing).ids.long())
        out = self.kernel(x, logits, None, self.weights)
        assert isinstance(out, Tensor)  # a sum is left open only where the caller says so
        return out


def with_backend(model: TinyMoE, backend: Backend) -> TinyMoE:
    """Put a backend into every layer of a model, in place, on its device; return the model."""
    weight = model.embedding.weight
    platform = detect_platform() if weight.is_cuda else "cpu"
    spec = layer_spec(model.config, weight.dtype, platform)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        assert isinstance(layer.moe, MoE)
        layer.moe = ServedMoE(layer.moe, spec, backend)
    return model
