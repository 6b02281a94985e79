"""What a loaded engine says of itself: limits for the front, choices for `/v1/backends`.

Receives the runner and the scheduler's limits; returns `EngineInfo`.
"""

from __future__ import annotations

import os

import torch

from moeserve.engine.client import EngineInfo
from moeserve.engine.scheduler import SchedulerLimits
from moeserve.moe.spec import Plan
from moeserve.parallel import Place
from moeserve.runner.model_runner import ModelRunner


def describe(
    runner: ModelRunner, limits: SchedulerLimits, load_s: float, place: Place
) -> EngineInfo:
    """Limits, page counts and every choice with its reason; what this rank chose, as `ranks`."""
    spec, moe_spec = runner.spec, runner.moe_spec
    moe: dict[str, object] = {}
    if runner.moe_plan is not None:
        moe = {**_plan(runner.moe_plan), "num_layers": spec.num_moe_layers}
    backends: dict[str, object] = {
        "platform": moe_spec.platform if moe_spec else runner.options.device.type,
        "device": str(runner.options.device),
        "dtype": str(runner.options.dtype).removeprefix("torch."),
        "architecture": spec.architecture,
        "moe": moe,
        "attention": {
            "backend": runner.attention.name,
            "reason": runner.attention.reason,
            "page_size": runner.attention.page_size,
        },
        "parallel": {
            "tensor_parallel_size": place.tp_size,
            "data_parallel_size": place.dp_size,
            "expert_parallel_size": moe_spec.ep_size if moe_spec else 1,
        },
        "num_threads": torch.get_num_threads(),
        "ranks": [_rank(runner, place)],
    }
    return EngineInfo(
        max_model_len=limits.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        num_pages=runner.num_pages,
        page_size=runner.attention.page_size,
        backends=backends,
        load_s=load_s,
    )


def _rank(runner: ModelRunner, place: Place) -> dict[str, object]:
    """One rank's place, its part of the model and its choices."""
    spec, moe_spec, device = runner.spec, runner.moe_spec, runner.options.device
    rank: dict[str, object] = {
        "rank": place.rank,
        "dp_rank": place.dp_rank,
        "tp_rank": place.tp_rank,
        "device": f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" else str(device),
        "pid": os.getpid(),
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "num_pages": runner.num_pages,
        "weight_bytes": runner.loaded_bytes,
        "attention": runner.attention.name,
    }
    if moe_spec is not None and runner.moe_plan is not None:
        rank["moe"] = runner.moe_plan.primary
        rank["expert_width"] = moe_spec.intermediate_size
        rank["experts"] = [
            moe_spec.first_local_expert,
            moe_spec.first_local_expert + moe_spec.num_local_experts,
        ]
    return rank


def _plan(plan: Plan) -> dict[str, object]:
    return {
        "backend": plan.primary,
        "ranges": [{"max_tokens": largest, "backend": name} for largest, name in plan.ranges],
        "layout": plan.layout,
        "reason": plan.reason,
        "requested": plan.requested,
        "considered": list(plan.considered),
        "rejected": {rejection.backend: rejection.reason for rejection in plan.rejected},
    }
