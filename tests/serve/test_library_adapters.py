"""What the adapters hand to their libraries, seen by stand-ins that compute what these document.

A stand-in reads the weights in the layout of its library's documentation and checks the arguments
that were got wrong elsewhere: `quant_scales` an empty list and never None, int32 ids, weights as
views, logits without NaN. So a conversion and a call that agree with each other and not with the
library would show.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from moe_helpers import make_spec, random_weights, relative_error, tokens

from moeserve.moe.backends.base import Routed, Unrouted
from moeserve.moe.backends.registry import registry
from moeserve.moe.reference import reference_experts
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec

E, H, I, K, T = 8, 128, 128, 2, 13


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """Gate rows first, then up rows; SiLU; weighted sum."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            h = gate_up[int(ids[t, k])] @ x[t]
            width = h.shape[0] // 2
            a = torch.nn.functional.silu(h[:width]) * h[width:]
            out[t] += w[t, k] * (w2[int(ids[t, k])] @ a)
    return out


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, object]) -> None:
    for name, contents in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def converted(name: str, spec: MoESpec) -> tuple[MoEWeights, MoEWeights]:
    plain = random_weights(spec)
    copy = MoEWeights(plain.w13.clone(), plain.w2.clone())
    return plain, registry().get(name).prepare(copy)


def layer() -> tuple[MoESpec, torch.Tensor, torch.Tensor, Routed]:
    spec = make_spec(E, H, I, routing=RoutingSpec(K), dtype=torch.float32)
    x = tokens(spec, T)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(3))
    topk = route(logits, spec.routing)
    return spec, x, logits, Routed(topk.ids, topk.weights)


def truth(spec: MoESpec, x: torch.Tensor, routed: Routed, w: MoEWeights) -> torch.Tensor:
    return reference_experts(spec, x, routed.topk_weights, routed.topk_ids, w.w13, w.w2)


def test_flashinfer_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    def cutlass_fused_moe(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, fc1: torch.Tensor,
        fc2: torch.Tensor, dtype: torch.dtype, *, quant_scales: object, output: torch.Tensor,
        ep_size: int, ep_rank: int, tune_max_num_tokens: int, activation_type: object,
    ) -> None:  # fmt: skip
        assert quant_scales == []
        assert isinstance(quant_scales, list)
        assert ids.dtype == torch.int32
        assert dtype == x.dtype
        assert (ep_size, ep_rank) == (1, 0)
        assert tune_max_num_tokens >= 8192  # a prefill, whatever was captured
        assert activation_type == 3
        width = fc1.shape[1] // 2
        gate_up = torch.cat([fc1[:, width:], fc1[:, :width]], dim=1)  # up rows come first
        output.copy_(experts(x, gate_up, fc2, ids, weights))

    install(
        monkeypatch,
        flashinfer={},
        flashinfer__fused_moe={"cutlass_fused_moe": cutlass_fused_moe},
        flashinfer__fused_moe__core={"ActivationType": int},
    )
    spec, x, _, routed = layer()
    plain, ready = converted("flashinfer_cutlass", spec)
    out = registry().get("flashinfer_cutlass").apply(spec, x, routed, ready)
    assert relative_error(out, truth(spec, x, routed, plain)) < 1e-5


def test_flashinfer_trtllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(blocks: torch.Tensor) -> torch.Tensor:
        """[K/block, M, block] of an expert, rows shuffled by 32, back to [M, K]."""
        flat = torch.cat(list(blocks), dim=1)
        order = [r // 32 * 32 + 8 * (r % 4) + r % 32 // 4 for r in range(flat.shape[0])]
        return flat[order]

    def trtllm_bf16_moe(**args: object) -> torch.Tensor:
        logits = args["routing_logits"]
        assert isinstance(logits, torch.Tensor)
        assert logits.dtype == torch.float32
        assert not logits.isnan().any()
        assert args["routing_bias"] is None
        assert args["n_group"] is None
        assert (args["num_experts"], args["top_k"], args["intermediate_size"]) == (E, K, I)
        assert (args["local_expert_offset"], args["local_num_experts"]) == (0, E)
        assert args["routing_method_type"] == 4  # softmax, top-k, renormalise
        assert args["use_shuffled_weight"] is True
        assert args["weight_layout"] == 2
        w13 = torch.stack([rows(one) for one in args["gemm1_weights"]])  # type: ignore[attr-defined]
        w2 = torch.stack([rows(one) for one in args["gemm2_weights"]])  # type: ignore[attr-defined]
        gate_up = torch.cat([w13[:, 1::2], w13[:, 0::2]], dim=1)  # row pairs are (up, gate)
        values, ids = torch.topk(logits.softmax(-1), K)
        weights = values / values.sum(-1, keepdim=True)
        return experts(args["hidden_states"], gate_up, w2, ids, weights)  # type: ignore[arg-type]

    install(monkeypatch, flashinfer={}, flashinfer__fused_moe={"trtllm_bf16_moe": trtllm_bf16_moe})
    spec, x, logits, routed = layer()
    plain, ready = converted("flashinfer_trtllm", spec)
    logits[4] = float("nan")
    backend = registry().get("flashinfer_trtllm")
    out = backend.apply_logits(spec, x, Unrouted(logits), ready)
    keep = [t for t in range(T) if t != 4]  # torch.topk leaves the ties of that row open
    assert torch.isfinite(out).all()
    assert relative_error(out[keep], truth(spec, x, routed, plain)[keep]) < 1e-5


def test_sonicmoe(monkeypatch: pytest.MonkeyPatch) -> None:
    def moe_general_routing_inputs(
        x: torch.Tensor, scores: torch.Tensor, token_indices: torch.Tensor,
        expert_ids: torch.Tensor,
        w1: torch.Tensor, b1: object, w2: torch.Tensor, b2: object, num_experts: int,
        stream: int, activation: object, is_inference: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert b1 is None
        assert b2 is None
        assert is_inference
        assert (w1.shape, w2.shape, num_experts) == ((2 * I, H, E), (H, I, E), E)
        assert token_indices.dtype == expert_ids.dtype == torch.int32
        assert activation == "swiglu"
        assert token_indices.tolist() == sorted(token_indices.tolist())
        pairs = w1.permute(2, 0, 1)
        gate_up = torch.cat([pairs[:, 0::2], pairs[:, 1::2]], dim=1)
        ids, weights = expert_ids.view(T, K), scores.view(T, K)
        out = experts(x, gate_up, w2.permute(2, 0, 1), ids, weights)
        return out, torch.bincount(expert_ids, minlength=num_experts)

    install(
        monkeypatch,
        sonicmoe={},
        sonicmoe__enums={"ActivationType": SimpleNamespace(SWIGLU="swiglu")},
        sonicmoe__functional={"moe_general_routing_inputs": moe_general_routing_inputs},
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    spec, x, _, routed = layer()
    plain, ready = converted("sonicmoe", spec)
    out = registry().get("sonicmoe").apply(spec, x, routed, ready)
    assert relative_error(out, truth(spec, x, routed, plain)) < 1e-5


def test_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain_rows(weight: torch.Tensor) -> torch.Tensor:
        """One expert's [N, K] in tiles of 16 × 32 of vectors of 8, back to rows."""
        assert getattr(weight, "is_shuffled", True)
        rows, columns = weight.shape
        flat = weight.flatten()
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        tile = (row // 16) * (columns // 32) + column // 32
        return flat[tile * 512 + (column % 32 // 8) * 128 + (row % 16) * 8 + column % 8]

    def fused_moe(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor,
        ids: torch.Tensor, *, expert_mask: object, activation: object, quant_type: object,
        doweight_stage1: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert w1.is_shuffled
        assert w2.is_shuffled
        assert expert_mask is None
        assert not doweight_stage1
        assert (activation, quant_type) == ("silu", "no")
        first = torch.stack([plain_rows(one) for one in w1])
        second = torch.stack([plain_rows(one) for one in w2])
        return experts(x, first, second, ids, weights)

    install(
        monkeypatch,
        aiter={
            "ActivationType": SimpleNamespace(Silu="silu"), "QuantType": SimpleNamespace(No="no")
        },
        aiter__fused_moe={"fused_moe": fused_moe},
    )  # fmt: skip
    spec, x, _, routed = layer()
    plain, ready = converted("aiter", spec)
    out = registry().get("aiter").apply(spec, x, routed, ready)
    assert relative_error(out, truth(spec, x, routed, plain)) < 1e-5
