"""Shapes of public models, so that dummy weights need no hub and no files.

Receives a name (short name or hub id, any case); returns a mapping with the keys of that model's
`config.json`. `models/config.py` reads both the same way. No torch here: the command line lists
these names. Values are those of the published `config.json` files of each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from moeserve.errors import UsageError

_QWEN3_30B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}

_MIXTRAL_8X7B: dict[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

_LLAMA4_SCOUT: dict[str, object] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": [200001, 200007, 200008],
        "torch_dtype": "bfloat16",
    },
}

_QWEN35_35B: dict[str, object] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 248044,
        "torch_dtype": "bfloat16",
    },
}

_MINIGSM_TINY: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}

_ALIASES: dict[str, dict[str, object]] = {
    "qwen3-30b-a3b": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "mistralai/Mixtral-8x7B-v0.1": _MIXTRAL_8X7B,
    "llama-4-scout": _LLAMA4_SCOUT,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _LLAMA4_SCOUT,
    "qwen3.5-35b-a3b": _QWEN35_35B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN35_35B,
    "minigsm-tiny": _MINIGSM_TINY,
    "moeserve/minigsm-tiny": _MINIGSM_TINY,
}
_BY_NAME = {name.lower(): shape for name, shape in _ALIASES.items()}


def preset_names() -> tuple[str, ...]:
    """Every known name, short names and hub ids."""
    return tuple(_ALIASES)


def is_preset(name: str) -> bool:
    """Whether `name` is a preset, in any case."""
    return name.lower() in _BY_NAME


def preset_config(name: str) -> Mapping[str, object]:
    """Return the `config.json` keys of a preset.

    Args:
        name: Short name or hub id, in any case.

    Raises:
        UsageError: Nothing of that name; lists the known ones and the closest.
    """
    try:
        return _BY_NAME[name.lower()]
    except KeyError:
        close = get_close_matches(name.lower(), _BY_NAME, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(
            f"model {name!r} is neither a folder nor a preset{hint} Presets: "
            + ", ".join(preset_names())
        ) from None
