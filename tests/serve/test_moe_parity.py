"""Every public model's MoE form at layer level, against transformers' own layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_helpers import TOLERANCE, relative_error
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Llama4TextConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from moeserve.layers.moe import MoELayer
from moeserve.moe.oracle import select_unquantized_moe_backend
from moeserve.moe.spec import MoESpec, RoutingSpec

H, I, E, S = 32, 48, 16, 40


def randomised(block: nn.Module, config: object) -> nn.Module:
    """The reference with weights of the right scale, computed expert by expert."""
    config._experts_implementation = "eager"  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        fan_in = parameter.shape[-1]
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
    return block.eval()


def mlp_w13(mlp: nn.Module) -> torch.Tensor:
    return torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])  # type: ignore[union-attr,list-item]


def build(spec: MoESpec, backend: str) -> MoELayer:
    return MoELayer(spec, select_unquantized_moe_backend(spec, backend))


def qwen3_moe(backend: str) -> tuple[nn.Module, MoELayer]:
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=4,
        norm_topk_prob=True,
    )  # fmt: skip
    block = randomised(Qwen3MoeSparseMoeBlock(config), config)
    layer = build(MoESpec(E, H, I, RoutingSpec(4), dtype=torch.float32), backend)
    copy_plain(layer, block)
    return block, layer


def qwen3_moe_without_renormalisation(backend: str) -> tuple[nn.Module, MoELayer]:
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=4,
        norm_topk_prob=False,
    )  # fmt: skip
    block = randomised(Qwen3MoeSparseMoeBlock(config), config)
    routing = RoutingSpec(4, is_renormalized=False)
    layer = build(MoESpec(E, H, I, routing, dtype=torch.float32), backend)
    copy_plain(layer, block)
    return block, layer


def mixtral(backend: str) -> tuple[nn.Module, MoELayer]:
    config = MixtralConfig(
        hidden_size=H, intermediate_size=I, num_local_experts=8, num_experts_per_tok=2
    )
    block = randomised(MixtralSparseMoeBlock(config), config)
    layer = build(MoESpec(8, H, I, RoutingSpec(2), dtype=torch.float32), backend)
    copy_plain(layer, block)
    return block, layer


def llama4(backend: str) -> tuple[nn.Module, MoELayer]:
    config = Llama4TextConfig(
        hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=1
    )
    block = randomised(Llama4TextMoe(config), config)
    routing = RoutingSpec(1, scoring="sigmoid", is_renormalized=False, weight_on_input=True)
    spec = MoESpec(E, H, I, routing, dtype=torch.float32, shared_intermediate_size=I)
    layer = build(spec, backend)
    layer.gate_weight.copy_(block.router.weight)  # type: ignore[union-attr,arg-type]
    # This family stores [E, in, out].
    layer.w13_weight.copy_(block.experts.gate_up_proj.mT)  # type: ignore[union-attr,arg-type]
    layer.w2_weight.copy_(block.experts.down_proj.mT)  # type: ignore[union-attr,arg-type]
    copy_shared(layer, block.shared_expert)  # type: ignore[arg-type]
    return block, layer


def gated_shared(
    config: Qwen3NextConfig | Qwen3_5MoeTextConfig, kind: type[nn.Module], backend: str
) -> tuple[nn.Module, MoELayer]:
    """The forms whose shared expert has a gate of its own."""
    block = randomised(kind(config), config)
    spec = MoESpec(
        E, H, I, RoutingSpec(4), dtype=torch.float32, shared_intermediate_size=S,
        has_shared_gate=True,
    )  # fmt: skip
    layer = build(spec, backend)
    copy_plain(layer, block)
    copy_shared(layer, block.shared_expert)  # type: ignore[arg-type]
    assert layer.shared_gate_weight is not None
    layer.shared_gate_weight.copy_(block.shared_expert_gate.weight)  # type: ignore[union-attr,arg-type]
    return block, layer


GATED_SHARED_SIZES = {
    "hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": S,
}  # fmt: skip


def qwen3_next(backend: str) -> tuple[nn.Module, MoELayer]:
    return gated_shared(Qwen3NextConfig(**GATED_SHARED_SIZES), Qwen3NextSparseMoeBlock, backend)


def qwen3_5(backend: str) -> tuple[nn.Module, MoELayer]:
    """Its config has no norm_topk_prob; weights are renormalised all the same."""
    config = Qwen3_5MoeTextConfig(**GATED_SHARED_SIZES)
    return gated_shared(config, Qwen3_5MoeSparseMoeBlock, backend)


def deepseek_v2(backend: str) -> tuple[nn.Module, MoELayer]:
    """Softmax, groups by their largest score, no renormalisation, scaled."""
    config = DeepseekV2Config(
        hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, num_experts_per_tok=4,
        n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5,
        topk_method="group_limited_greedy", norm_topk_prob=False,
    )  # fmt: skip
    block = randomised(DeepseekV2Moe(config), config)
    routing = RoutingSpec(
        4, is_renormalized=False, num_groups=4, top_k_groups=2, scaling_factor=2.5,
        has_float32_gate=True,
    )  # fmt: skip
    spec = MoESpec(E, H, I, routing, dtype=torch.float32, shared_intermediate_size=2 * I)
    layer = build(spec, backend)
    copy_plain(layer, block)
    copy_shared(layer, block.shared_experts)  # type: ignore[arg-type]
    return block, layer


def deepseek_v3(backend: str) -> tuple[nn.Module, MoELayer]:
    config = DeepseekV3Config(
        hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, num_experts_per_tok=4,
        n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )  # fmt: skip
    block = randomised(DeepseekV3MoE(config), config)
    bias = torch.randn(E, generator=torch.Generator().manual_seed(4)) * 0.2
    block.gate.e_score_correction_bias.copy_(bias)  # type: ignore[union-attr,operator]
    routing = RoutingSpec(
        4, scoring="sigmoid", has_bias=True, num_groups=4, top_k_groups=2, scaling_factor=2.5,
        has_float32_gate=True,
    )  # fmt: skip
    spec = MoESpec(E, H, I, routing, dtype=torch.float32, shared_intermediate_size=2 * I)
    layer = build(spec, backend)
    copy_plain(layer, block)
    copy_shared(layer, block.shared_experts)  # type: ignore[arg-type]
    assert layer.gate_bias is not None
    layer.gate_bias.copy_(bias)
    return block, layer


def copy_plain(layer: MoELayer, block: nn.Module) -> None:
    layer.gate_weight.copy_(block.gate.weight)  # type: ignore[union-attr,arg-type]
    layer.w13_weight.copy_(block.experts.gate_up_proj)  # type: ignore[union-attr,arg-type]
    layer.w2_weight.copy_(block.experts.down_proj)  # type: ignore[union-attr,arg-type]


def copy_shared(layer: MoELayer, mlp: nn.Module) -> None:
    assert layer.shared_w13_weight is not None
    assert layer.shared_w2_weight is not None
    layer.shared_w13_weight.copy_(mlp_w13(mlp))
    layer.shared_w2_weight.copy_(mlp.down_proj.weight)  # type: ignore[union-attr,arg-type]


FORMS: list[Callable[[str], tuple[nn.Module, MoELayer]]] = [
    qwen3_moe,
    qwen3_moe_without_renormalisation,
    mixtral,
    llama4,
    qwen3_next,
    qwen3_5,
    deepseek_v2,
    deepseek_v3,
]


@pytest.mark.parametrize("backend", ["cpu", "cpu_native", "torch_grouped_mm"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_layer_equals_transformers(
    form: Callable[[str], tuple[nn.Module, MoELayer]], backend: str
) -> None:
    if backend == "cpu_native" and form is llama4:
        pytest.skip("cpu_native has no form with the weight on the input")
    block, layer = form(backend)
    layer.process_weights()
    with torch.inference_mode():
        for num_tokens in (1, 3, 40):
            generator = torch.Generator().manual_seed(num_tokens)
            x = torch.randn(num_tokens, H, generator=generator)
            expected = block(x.unsqueeze(0))
            expected = expected[0] if isinstance(expected, tuple) else expected
            error = relative_error(layer(x), expected.reshape(num_tokens, H))
            assert error < TOLERANCE[torch.float32]


def test_the_forms_differ() -> None:
    """The comparison above can tell them apart: a wrong form is far outside its tolerance."""
    block, _ = qwen3_moe("cpu")
    _, other = qwen3_moe_without_renormalisation("cpu")
    other.process_weights()
    x = torch.randn(8, H)
    with torch.inference_mode():
        assert relative_error(other(x), block(x.unsqueeze(0))[0]) > 0.1
