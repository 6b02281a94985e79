"""An engine of two layers of the embedded model with random weights, and requests for it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch

from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.engine.request import Request, SamplingParams, TokenEvent

CONFIG = EngineConfig(
    model="minigsm-tiny",
    load_format="dummy",
    hf_overrides={"num_hidden_layers": 2, "eos_token_id": 0},
    max_model_len=256,
    max_num_seqs=16,
    num_pages=400,
    num_threads=1,
)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{**CONFIG.__dict__, **changes})


def request(name: str, prompt: Items[int], **fields: Any) -> Request:
    fields.setdefault("temperature", 0.0)
    fields.setdefault("ignore_eos", True)
    return Request(name, tuple(prompt), SamplingParams(**fields))


def prompts(count: int, shared: int = 64) -> list[list[int]]:
    """Prompts of 70 to 120 tokens that begin alike."""
    random = torch.Generator().manual_seed(5)
    prefix = torch.randint(1, 1024, (shared,), generator=random).tolist()
    return [
        prefix + torch.randint(1, 1024, (6 + 7 * i % 50,), generator=random).tolist()
        for i in range(count)
    ]


def drain(engine: Engine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step().all_events():
            events.setdefault(event.request_id, []).append(event)
    for name, own in events.items():
        assert [e.finish_reason is not None for e in own] == [False] * (len(own) - 1) + [True], name
    return events


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def continuations(engine: Engine, batch: list[list[int]], **fields: Any) -> list[list[int]]:
    for i, prompt in enumerate(batch):
        engine.add(request(str(i), prompt, max_tokens=40, **fields))
    events = drain(engine)
    return [tokens(events[str(i)]) for i in range(len(batch))]
