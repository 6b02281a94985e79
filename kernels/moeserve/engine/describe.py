"""What a loaded engine says of itself: limits for the front, choices for `/v1/backends`.

Receives the runner and the scheduler's limits; returns `EngineInfo`.
"""

from __future__ import annotations

import torch

from moeserve.engine.client import EngineInfo
from moeserve.engine.scheduler import SchedulerLimits
from moeserve.moe.spec import Plan
from moeserve.runner.model_runner import ModelRunner


def describe(runner: ModelRunner, limits: SchedulerLimits, load_s: float) -> EngineInfo:
    """Limits, page counts and every choice with its reason."""
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
            "tensor_parallel_size": moe_spec.tp_size if moe_spec else 1,
            "data_parallel_size": moe_spec.dp_size if moe_spec else 1,
            "expert_parallel_size": moe_spec.ep_size if moe_spec else 1,
        },
        "num_threads": torch.get_num_threads(),
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
