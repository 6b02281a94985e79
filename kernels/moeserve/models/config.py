"""A model's `config.json` as one frozen value, `ModelSpec`.

Receives the keys of a Hugging Face `config.json` (from a folder or from `presets.py`); returns
shapes, routing and rotary settings under one set of names. Every family's spelling is read here
and nowhere else. `models/__init__.py` finds the class that runs an architecture.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from moeserve import presets
from moeserve.errors import Unsupported, UsageError
from moeserve.json_file import json_object
from moeserve.moe.spec import RoutingSpec

logger = logging.getLogger(__name__)
Keys = Mapping[str, object]


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and rules of one model, before any cut over ranks.

    Attributes:
        architecture: First entry of `architectures`.
        vocab_size: V.
        hidden_size: H.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head; not always H / num_heads.
        intermediate_size: Width of dense MLP layers.
        moe_intermediate_size: I before any cut; 0 without experts.
        num_experts: E; 0 for a dense model.
        routing: How tokens choose experts.
        shared_expert_size: Width of the shared expert; 0 for none.
        is_moe_layer: One flag a layer.
        max_position_embeddings: The model's own context length.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Added under the root of each norm.
        has_tied_embeddings: The output projection is the embedding.
        has_attention_bias: q, k, v and o projections have a bias.
        dtype: Of the checkpoint: "float32", "bfloat16" or "float16".
        eos_token_ids: End-of-text ids.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    routing: RoutingSpec
    shared_expert_size: int
    is_moe_layer: tuple[bool, ...]
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    has_tied_embeddings: bool
    has_attention_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(self.is_moe_layer)

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: query, key and value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def load_model_spec(model: str, overrides: Keys | None = None) -> ModelSpec:
    """Read the spec of a model folder or preset.

    Args:
        model: Folder with a `config.json`, or a preset name.
        overrides: Keys laid over the file's, as `--hf-overrides` gives them.

    Raises:
        UsageError: No such folder or preset, or a key that is missing or of the wrong type.
        Unsupported: An architecture that this build does not know.
    """
    keys, source = _raw_config(model)
    merged: dict[str, object] = {**keys, **(overrides or {})}
    text = merged.get("text_config")
    if isinstance(text, dict):
        merged = {**merged, **text, **(overrides or {})}
    return parse_model_spec(merged, source)


def _raw_config(model: str) -> tuple[Keys, str]:
    folder = Path(model)
    if not folder.is_dir():
        return presets.preset_config(model), model
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder}: no config.json; is this a Hugging Face model folder?")
    keys = json_object(path)
    extra = folder / "generation_config.json"
    if extra.is_file():
        # The generation file's end-of-text ids are the ones that really end a reply.
        eos = json_object(extra).get("eos_token_id")
        if eos is not None:
            keys["eos_token_id"] = eos
    return keys, str(path)


def parse_model_spec(keys: Keys, source: str) -> ModelSpec:
    """Turn the (flattened) keys of a `config.json` into a spec.

    Args:
        keys: As read, text part laid over the rest.
        source: Named in errors.

    Raises:
        UsageError: A key is missing or of the wrong type.
        Unsupported: What it asks for would be computed otherwise here: quantised weights, sliding
            windows, another activation, another rotary scaling.
    """
    names = keys.get("architectures")
    if not isinstance(names, list) or not names:
        raise UsageError(f"{source}: key 'architectures' is missing or empty")
    if keys.get("use_sliding_window"):
        raise Unsupported(f"{source}: sliding-window attention is not implemented")
    quantization = keys.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise Unsupported(
            f"{source}: quantization_config ({method or quantization}): weights are served "
            "unquantized; give a bf16, fp16 or fp32 checkpoint"
        )
    activation = keys.get("hidden_act")
    if activation not in (None, "silu"):
        raise Unsupported(f"{source}: hidden_act {activation!r} is not implemented; known: silu")
    num_layers = _int(keys, "num_hidden_layers", source)
    num_heads = _int(keys, "num_attention_heads", source)
    hidden_size = _int(keys, "hidden_size", source)
    expert_names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = _first_int(keys, expert_names, 0, source)
    model_type = str(keys.get("model_type", ""))
    # Mixtral and Llama-4 spell the experts' width `intermediate_size`.
    expert_width = _first_int(keys, ("moe_intermediate_size", "intermediate_size"), 0, source)
    dense_width = _first_int(keys, ("intermediate_size_mlp", "intermediate_size"), 0, source)
    return ModelSpec(
        architecture=str(names[0]),
        vocab_size=_int(keys, "vocab_size", source),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_first_int(keys, ("num_key_value_heads",), num_heads, source),
        head_dim=_first_int(keys, ("head_dim",), hidden_size // num_heads, source),
        intermediate_size=dense_width,
        moe_intermediate_size=expert_width if num_experts else 0,
        num_experts=num_experts,
        routing=_routing(keys, model_type, num_experts, source),
        shared_expert_size=_shared_width(keys, model_type, expert_width, source),
        is_moe_layer=_moe_layers(keys, num_layers, num_experts, source),
        max_position_embeddings=_first_int(keys, ("max_position_embeddings",), 4096, source),
        rope_theta=_rope_theta(keys, source),
        rms_norm_eps=float(cast(float, keys.get("rms_norm_eps", 1e-6))),
        has_tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
        has_attention_bias=bool(keys.get("attention_bias", False)),
        dtype=_dtype(keys, source),
        eos_token_ids=_end_ids(keys, source),
    )


def _int(keys: Keys, name: str, source: str) -> int:
    value = keys.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UsageError(f"{source}: key {name!r} must be a positive integer, got {value!r}")
    return value


def _first_int(keys: Keys, names: tuple[str, ...], default: int, source: str) -> int:
    for name in names:
        if keys.get(name) is not None:
            return _int(keys, name, source)
    return default


def _routing(keys: Keys, model_type: str, num_experts: int, source: str) -> RoutingSpec:
    if not num_experts:
        return RoutingSpec(top_k=1)
    top_k = _int(keys, "num_experts_per_tok", source)
    if top_k > num_experts:
        raise UsageError(f"{source}: num_experts_per_tok {top_k} exceeds {num_experts} experts")
    if model_type.startswith("llama4"):
        return RoutingSpec(
            top_k=top_k, scoring="sigmoid", is_renormalized=False, weight_on_input=True
        )
    if model_type.startswith("deepseek"):
        return _deepseek_routing(keys, top_k, source)
    # Absent means renormalised: Mixtral and Qwen3.5 have no such key and always do it.
    return RoutingSpec(top_k=top_k, is_renormalized=bool(keys.get("norm_topk_prob", True)))


def _deepseek_routing(keys: Keys, top_k: int, source: str) -> RoutingSpec:
    """V3 scores by sigmoid, chooses with a correction bias and renormalises; V2 does none of it."""
    is_v3 = str(keys.get("topk_method") or "noaux_tc") == "noaux_tc"
    has_groups = keys.get("topk_method") != "greedy"
    return RoutingSpec(
        top_k=top_k,
        scoring="sigmoid" if is_v3 else "softmax",
        is_renormalized=bool(keys.get("norm_topk_prob", is_v3)),
        has_bias=is_v3,
        num_groups=_first_int(keys, ("n_group",), 1, source) if has_groups else 1,
        top_k_groups=_first_int(keys, ("topk_group",), 1, source) if has_groups else 1,
        scaling_factor=float(cast(float, keys.get("routed_scaling_factor", 1.0))),
        has_float32_gate=True,
    )


def _shared_width(keys: Keys, model_type: str, expert_width: int, source: str) -> int:
    if model_type.startswith("llama4"):
        return expert_width
    if model_type.startswith("deepseek"):
        return _first_int(keys, ("n_shared_experts",), 0, source) * expert_width
    return _first_int(keys, ("shared_expert_intermediate_size",), 0, source)


def _moe_layers(keys: Keys, num_layers: int, num_experts: int, source: str) -> tuple[bool, ...]:
    if not num_experts:
        return (False,) * num_layers
    if keys.get("first_k_dense_replace") is not None:  # DeepSeek
        first = cast(int, keys["first_k_dense_replace"])
        step = _first_int(keys, ("moe_layer_freq",), 1, source)
        return tuple(i >= first and i % step == 0 for i in range(num_layers))
    step = _first_int(keys, ("decoder_sparse_step", "interleave_moe_layer_step"), 1, source)
    dense = keys.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)):
        raise UsageError(f"{source}: key 'mlp_only_layers' must be a list, got {dense!r}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _rope_theta(keys: Keys, source: str) -> float:
    """Base of the rotary frequencies, from the old key or from the newer mapping."""
    nested = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise UsageError(f"{source}: key 'rope_parameters' must be a mapping, got {nested!r}")
    kind = nested.get("rope_type", nested.get("type", "default"))
    known = ("default", "llama3") if "llama4" in str(keys.get("model_type")) else ("default",)
    # Qwen3.5 marks its multimodal rotary form in the same mapping; text positions are plain.
    if kind not in known and not str(keys.get("model_type")).startswith("qwen3_5"):
        raise Unsupported(f"{source}: rotary scaling {kind!r} is not implemented")
    theta = nested.get("rope_theta", keys.get("rope_theta", 10000.0))
    return float(cast(float, theta))


def _dtype(keys: Keys, source: str) -> str:
    name = str(keys.get("dtype") or keys.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"{source}: dtype {name!r} is not one of float32, bfloat16, float16")
    return name


def _end_ids(keys: Keys, source: str) -> tuple[int, ...]:
    """End-of-text ids; those that no logit stands for can never be drawn and are left out."""
    value, vocab_size = keys.get("eos_token_id"), _int(keys, "vocab_size", source)
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = [i for i in given if type(i) is int]
    if len(ids) < len(given):
        raise UsageError(f"{source}: key 'eos_token_id' must be one or more ids, got {value!r}")
    beyond = [i for i in ids if not 0 <= i < vocab_size]
    if beyond:
        logger.warning(
            "%s: eos_token_id %s: outside the vocabulary of %d", source, beyond, vocab_size
        )
    return tuple(i for i in ids if 0 <= i < vocab_size)
