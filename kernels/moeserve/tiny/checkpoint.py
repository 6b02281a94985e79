"""Model folders in Hugging Face form: `config.json`, bf16 safetensors, tokenizer.

Receives a `TinyMoE` and a tokenizer; writes a folder that `Qwen3MoeForCausalLM` and any server of
that architecture load, and reads it back. Nothing here trains.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from moeserve.tiny.model import TinyConfig, TinyMoE
from moeserve.tiny.tokenizer import END_OF_TEXT_ID, save_tokenizer

_LAYER_NAMES = {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    "moe.router.weight": "mlp.gate.weight",
}
_EXPERT_NAMES = {"moe.gate": "gate_proj", "moe.up": "up_proj", "moe.down": "down_proj"}


def hf_config(config: TinyConfig) -> dict[str, object]:
    """Return the contents of `config.json` for `Qwen3MoeForCausalLM`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": END_OF_TEXT_ID,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        # The width of a dense layer, of which this model has none; readers ask for the key.
        "intermediate_size": config.expert_width * config.experts_per_token,
        "max_position_embeddings": config.max_positions,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": config.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "output_router_logits": False,
        "pad_token_id": END_OF_TEXT_ID,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def hf_tensors(model: TinyMoE) -> dict[str, Tensor]:
    """Return the weights under Hugging Face's names, one tensor an expert, bf16 on the CPU."""
    width = model.config.expert_width
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        weight = weight.detach().to("cpu", torch.bfloat16)
        if not name.startswith("layers."):
            short = "embed_tokens.weight" if name.startswith("embedding") else name
            tensors[f"model.{short}"] = weight.contiguous()
            continue
        _, layer, rest = name.split(".", 2)
        stem = rest.removesuffix(".weight")
        if stem in _EXPERT_NAMES:
            for expert in range(model.config.num_experts):
                part = slice(expert * width, (expert + 1) * width)
                mine = weight[:, part] if stem == "moe.down" else weight[part]
                key = f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERT_NAMES[stem]}.weight"
                tensors[key] = mine.clone().contiguous()
            continue
        rest = _LAYER_NAMES.get(rest, rest.replace("attention.", "self_attn."))
        tensors[f"model.layers.{layer}.{rest}"] = weight.contiguous()
    return tensors


def save_model(model: TinyMoE, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a complete model folder; files of an earlier one are overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", hf_config(model.config))
    generation: dict[str, object] = {
        "do_sample": False,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, model.config.max_positions)


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[TinyMoE, Tokenizer]:
    """Read a folder that `save_model` wrote.

    Args:
        folder: the model folder.
        dtype: the dtype to compute in; the stored weights are bf16.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = TinyConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        rope_theta=raw["rope_theta"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
    )
    model = TinyMoE(config)
    stored = load_file(folder / "model.safetensors")
    state = {name: _find(name, stored, config.num_experts) for name in model.state_dict()}
    model.load_state_dict(state)
    return model.to(dtype), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _find(name: str, stored: dict[str, Tensor], num_experts: int) -> Tensor:
    if not name.startswith("layers."):
        short = "embed_tokens.weight" if name.startswith("embedding") else name
        return stored[f"model.{short}"]
    _, layer, rest = name.split(".", 2)
    stem = rest.removesuffix(".weight")
    if stem in _EXPERT_NAMES:
        keys = [
            f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERT_NAMES[stem]}.weight"
            for expert in range(num_experts)
        ]
        return torch.cat([stored[key] for key in keys], dim=1 if stem == "moe.down" else 0)
    rest = _LAYER_NAMES.get(rest, rest.replace("attention.", "self_attn."))
    return stored[f"model.layers.{layer}.{rest}"]


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
