from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve import presets
from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.engine.request import Request, SamplingParams, TokenEvent
from moeserve.errors import Unsupported, UsageError
from moeserve.models import known_architectures
from moeserve.models.config import load_model_spec, parse_model_spec

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "max_position_embeddings": 256,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense layer": {"mlp_only_layers": [1], "num_hidden_layers": 3},
    "sparse step": {"decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "not renormalised": {"norm_topk_prob": False},
    "one key head": {"num_key_value_heads": 1, "head_dim": 16},
}


def make(folder: Path, **changes: Any) -> Any:
    """A random Qwen3-MoE, saved; returns the transformers model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def run(engine: Engine, prompt: list[int], **fields: Any) -> list[TokenEvent]:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, **fields)
    engine.add(Request("r", tuple(prompt), sampling))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step().all_events()
    return events


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(
    ("variant", "kernels"), [*((v, "auto") for v in VARIANTS), ("plain", "torch")]
)
def test_scores_and_continuations_equal_those_of_transformers(
    variant: str, kernels: str, tmp_path: Path
) -> None:
    model = make(tmp_path, **VARIANTS[variant])
    prompt = prompt_of(50)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        reference = model(ids).logits[0].log_softmax(-1)
        continued = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    # A budget of 32 cuts the prompt in two.
    config = EngineConfig(model=str(tmp_path), max_num_batched_tokens=32, max_num_seqs=4)
    if kernels == "torch":
        config = replace(config, attention_backend="torch", moe_backend="cpu")
    events = run(Engine(config), prompt, max_tokens=24, num_prompt_logprobs=256)
    scored = events[0].prompt_logprobs
    assert scored[0] is None
    rows = torch.full((49, 256), torch.nan)
    for position, entry in enumerate(scored[1:]):
        assert entry is not None
        for token, value in entry.top:
            rows[position, token] = value
        assert entry.logprob == pytest.approx(rows[position, prompt[position + 1]].item())
    error = (rows - reference[:-1]).norm() / reference[:-1].norm()
    assert error <= 1e-4
    assert [t for event in events for t in event.token_ids] == continued[0, 50:].tolist()


def test_a_sharded_checkpoint_is_read_by_its_index(tmp_path: Path) -> None:
    make(tmp_path)
    whole = run(Engine(EngineConfig(model=str(tmp_path))), prompt_of(20), max_tokens=8)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part in range(3):
        file = f"model-{part}.safetensors"
        save_file({n: tensors[n] for n in names[part::3]}, tmp_path / file)
        weight_map.update(dict.fromkeys(names[part::3], file))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert run(Engine(EngineConfig(model=str(tmp_path))), prompt_of(20), max_tokens=8) == whole
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(UsageError, match=r"missing: model-1\.safetensors"):
        Engine(EngineConfig(model=str(tmp_path)))


def test_weights_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for wrong, message in (
        ({**tensors, name: tensors[name][:-1].clone()}, r"shape \[47, 64\], expected \[48, 64\]"),
        ({k: v for k, v in tensors.items() if k != name}, f"1 tensors missing, among them {name}"),
        ({**tensors, name + "x": tensors[name].clone()}, "unknown tensor"),
    ):
        save_file(wrong, path)
        with pytest.raises(UsageError, match=message):
            Engine(EngineConfig(model=str(tmp_path)))
    path.unlink()
    with pytest.raises(UsageError, match=r"no \*\.safetensors file"):
        Engine(EngineConfig(model=str(tmp_path)))


def test_bfloat16_runs_close_to_float32(tmp_path: Path) -> None:
    make(tmp_path)
    scores = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine(EngineConfig(model=str(tmp_path), dtype=dtype))
        events = run(engine, prompt_of(40), max_tokens=1, num_prompt_logprobs=0)
        scores.append(torch.tensor([e.logprob for e in events[0].prompt_logprobs if e]))
    error = (scores[0] - scores[1]).norm() / scores[0].norm()
    assert 1e-6 < error < 0.03


def test_dummy_weights_keep_activations_and_repeat_with_their_seed() -> None:
    config = EngineConfig(
        model="minigsm-tiny", load_format="dummy", hf_overrides={"num_hidden_layers": 2}
    )
    engine = Engine(config)
    first = run(engine, prompt_of(30), max_tokens=20)
    assert run(Engine(config), prompt_of(30), max_tokens=20) == first
    assert run(Engine(replace(config, seed=1)), prompt_of(30), max_tokens=20) != first
    layer = engine.runner.model.moe_layers()[0]
    assert layer.gate_weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert layer.w2_weight.std().item() == pytest.approx(128**-0.5, rel=0.05)


def test_every_preset_has_the_published_shape() -> None:
    specs = {name: load_model_spec(name) for name in presets.preset_names()}
    qwen = specs["qwen3-30b-a3b"]
    assert qwen == specs["Qwen/Qwen3-30B-A3B"] == load_model_spec("QWEN/qwen3-30b-a3b")
    assert (qwen.num_experts, qwen.routing.top_k, qwen.moe_intermediate_size) == (128, 8, 768)
    assert (qwen.hidden_size, qwen.head_dim, qwen.num_moe_layers) == (2048, 128, 48)
    mixtral = specs["mixtral-8x7b"]
    assert (mixtral.num_experts, mixtral.moe_intermediate_size, mixtral.head_dim) == (8, 14336, 128)
    assert mixtral.routing.is_renormalized
    scout = specs["llama-4-scout"]
    assert scout.routing.weight_on_input
    assert (scout.moe_intermediate_size, scout.shared_expert_size) == (8192, 8192)
    qwen35 = specs["qwen3.5-35b-a3b"]
    assert qwen35.routing.is_renormalized
    assert (qwen35.num_experts, qwen35.shared_expert_size) == (256, 512)


def test_config_keys_are_read_in_both_spellings_and_with_their_defaults() -> None:
    keys = {**SHAPE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    assert parse_model_spec(keys, "x").rope_theta == 5000.0
    old = {k: v for k, v in keys.items() if k not in ("rope_parameters", "norm_topk_prob")}
    spec = parse_model_spec({**old, "rope_theta": 7e5, "torch_dtype": "bfloat16"}, "x")
    assert (spec.rope_theta, spec.dtype) == (7e5, "bfloat16")
    assert spec.routing.is_renormalized
    assert spec.head_dim == 32
    del old["head_dim"]
    assert parse_model_spec(old, "x").head_dim == 16
    assert parse_model_spec({**old, "eos_token_id": [4, 5]}, "x").eos_token_ids == (4, 5)
    # No logit stands for these: `min_tokens` would hide them, and fail the whole step.
    many = [4, SHAPE["vocab_size"], -1, SHAPE["vocab_size"] - 1]
    kept = parse_model_spec({**old, "eos_token_id": many}, "x").eos_token_ids
    assert kept == (4, SHAPE["vocab_size"] - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "c.json: key 'hidden_size' must be a positive integer, got None"),
        ({"num_hidden_layers": "4"}, "key 'num_hidden_layers' .* got '4'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds 8 experts"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is not one of"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary scaling 'yarn' is not implemented"),
        ({"architectures": []}, "key 'architectures' is missing"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .fp8.: weights"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be one or more ids, got '</s>'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(change: dict[str, Any], message: str) -> None:
    keys = {**SHAPE, "architectures": ["Qwen3MoeForCausalLM"], **change}
    with pytest.raises((UsageError, Unsupported), match=message):
        parse_model_spec(keys, "c.json")


def test_unknown_models_and_architectures_name_the_closest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'qwen3-30b-a3b'"):
        load_model_spec("qwen3-30b-a3")
    with pytest.raises(UsageError, match="only its shape is known"):
        Engine(EngineConfig(model="qwen3-30b-a3b"))
    assert "Qwen3MoeForCausalLM" in known_architectures()
    with pytest.raises(Unsupported, match="'Qwen3MoeForCausalML' cannot be served; the closest"):
        Engine(
            EngineConfig(
                model="minigsm-tiny",
                load_format="dummy",
                hf_overrides={"architectures": ["Qwen3MoeForCausalML"]},
            )
        )
