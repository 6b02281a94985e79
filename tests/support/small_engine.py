"""An engine of one small layer that Triton's interpreter can run, and requests for it."""

from __future__ import annotations

from typing import Any

import torch

from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.engine.request import Request, SamplingParams, TokenEvent

HAS_GPU = torch.cuda.is_available()
CONFIG: dict[str, Any] = {
    "model": "minigsm-tiny",
    "load_format": "dummy",
    "dtype": "float32",
    "hf_overrides": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "eos_token_id": 0,
    },
    "max_model_len": 128,
    "max_num_seqs": 8,
    "page_size": 16,
    "num_pages": 80,
    "num_threads": 1,
}


def engine_of(backend: str = "triton", **changes: Any) -> Engine:
    if backend == "torch":
        changes["device"] = "cpu"
    engine = Engine(EngineConfig(**{**CONFIG, "attention_backend": backend, **changes}))
    if HAS_GPU and backend == "triton":
        # The same seed gives other weights on another device. The source has a backend that
        # leaves weights in the checkpoint's layout.
        source = engine_of("torch", moe_backend="torch_grouped_mm")
        weights = source.runner.model.destinations()
        for name, tensor in engine.runner.model.destinations().items():
            tensor.copy_(weights[name])
    return engine


def request(name: str, prompt: list[int], count: int, **fields: Any) -> Request:
    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": count, **fields}
    return Request(name, tuple(prompt), SamplingParams(**values))


def prompts(lengths: list[int], shared: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    prefix = torch.randint(1, 128, (shared,), generator=random).tolist()
    return [prefix + torch.randint(1, 128, (n,), generator=random).tolist() for n in lengths]


def run(engine: Engine, requests: list[Request]) -> dict[str, list[TokenEvent]]:
    for each in requests:
        engine.add(each)
    events: dict[str, list[TokenEvent]] = {}
    for _ in range(400):
        if not engine.has_work:
            return events
        for event in engine.step().all_events():
            events.setdefault(event.request_id, []).append(event)
    raise AssertionError("the engine does not come to an end")


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]
