"""`moeserve backends`: every family's folder on every platform, named backends, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Llama4Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

from moeserve import backends_command
from moeserve.errors import UsageError
from moeserve.models.config import load_model_spec
from moeserve.moe.spec import PLATFORMS, RoutingSpec

FAMILIES: dict[str, tuple[PreTrainedConfig, RoutingSpec]] = {
    "Qwen3MoeForCausalLM": (
        Qwen3MoeConfig(num_experts=16, num_experts_per_tok=8, norm_topk_prob=True), RoutingSpec(8)
    ),
    "MixtralForCausalLM": (MixtralConfig(), RoutingSpec(2)),
    "Qwen3_5MoeForConditionalGeneration": (Qwen3_5MoeConfig(), RoutingSpec(8)),
    "Llama4ForConditionalGeneration": (
        Llama4Config(), RoutingSpec(1, "sigmoid", False, weight_on_input=True)
    ),
    "DeepseekV3ForCausalLM": (
        DeepseekV3Config(topk_method="noaux_tc"),
        RoutingSpec(8, "sigmoid", True, True, 8, 4, 2.5, has_float32_gate=True),
    ),
    "DeepseekV2ForCausalLM": (
        DeepseekV2Config(
            n_routed_experts=64, num_experts_per_tok=6, topk_method="group_limited_greedy",
            n_group=8, topk_group=3, routed_scaling_factor=16.0, norm_topk_prob=False,
        ),
        RoutingSpec(6, "softmax", False, False, 8, 3, 16.0, has_float32_gate=True),
    ),
}  # fmt: skip


def folder_of(tmp_path: Path, name: str, config: PreTrainedConfig) -> str:
    config.architectures = [name]
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_every_platform(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    config, routing = FAMILIES[family]
    folder = folder_of(tmp_path, family, config)
    spec = load_model_spec(folder)
    assert spec.routing == routing
    assert spec.num_moe_layers > 0
    for platform in PLATFORMS:
        status = backends_command.main(["--platform", platform, "--json", folder], {})
        report = json.loads(capsys.readouterr().out)
        # Nothing in the tree runs on these two; their backends come from outside.
        is_served = platform not in ("tpu", "oot")
        assert status == (0 if is_served else 1)
        assert (report["chosen"] is not None) == is_served
        for row in report["backends"]:
            assert row["is_supported"] != bool(row["reason"]), row


def test_a_dense_folder_has_nothing_to_choose(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Qwen3ForCausalLM", Qwen3Config())
    with pytest.raises(UsageError, match="a dense model"):
        backends_command.main(["--platform", "cpu", folder], {})


def test_a_name_that_is_none_names_the_closest() -> None:
    words = ["--platform", "cuda-sm90", "--moe-backend", "flashinfer_cutlas", "qwen3-30b-a3b"]
    with pytest.raises(UsageError, match="Did you mean 'flashinfer_cutlass'"):
        backends_command.main(words, {})
    # Platforms that look at no backend refuse a wrong name all the same.
    with pytest.raises(UsageError, match="moe_backend='bogus'"):
        backends_command.main(["--platform", "oot", "--moe-backend", "bogus", "qwen3-30b-a3b"], {})


def test_backends_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert backends_command.main(["--platform", "cpu", "--json", "mixtral-8x7b"], {}) == 0
    report = json.loads(capsys.readouterr().out)
    # Mixtral is in bfloat16, which the native experts do not compute.
    assert report["chosen"] == "cpu"
    assert report["ranges"] == [[8192, "cpu"]]
    by_name = {row["name"]: row for row in report["backends"]}
    assert (by_name["cpu_native"]["order"], by_name["cpu"]["order"]) == (1, 2)
    assert by_name["cpu"]["tokens"] == "1-8192"
    assert by_name["aiter"]["note"] == "never executed"
    words = ["--platform", "cuda-sm90", "--moe-backend", "flashinfer_trtllm", "qwen3-30b-a3b"]
    assert backends_command.main(words, {}) == 1
    text = capsys.readouterr().out
    assert "no plan: Unquantized MoE backend flashinfer_trtllm does not support" in text
    assert "kernel does not support current device cuda-sm90 [never executed]" in text


def test_backends_command_reads_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": False, "eos_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert backends_command.main(["--platform", "cpu", "-tp", "2", str(tmp_path)], {}) == 0
    assert "plan: {'cpu': '1-8192'}" in capsys.readouterr().out
    with pytest.raises(UsageError, match="does not divide the experts' width 16"):
        backends_command.main(["--platform", "cpu", "-tp", "3", str(tmp_path)], {})
    with pytest.raises(UsageError, match="Did you mean 'cpu'"):
        backends_command.main(["--platform", "cpuu", str(tmp_path)], {})
    for count in ("0", "-5"):
        with pytest.raises(UsageError, match=f"--max-num-batched-tokens {count}: at least 1"):
            backends_command.main(["--max-num-batched-tokens", count, str(tmp_path)], {})
    with pytest.raises(UsageError, match="MODEL is missing"):
        backends_command.main([], {})
