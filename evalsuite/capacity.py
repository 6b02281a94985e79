"""Does a job fit its pool: accelerators per node, and weights against their memory.

Receives a config, its layout and a pool; returns `Problem`s. Sizes of models are
`model_sizes.py`; whether this machine is of that pool is `machine.py`.
"""

from __future__ import annotations

from evalsuite.config import EvalConfig
from evalsuite.errors import Problem
from evalsuite.hardware import Pool
from evalsuite.layout import Layout
from evalsuite.model_sizes import MODEL_SIZES
from evalsuite.server_args import flag_values

# Share of memory that vLLM and moeserve use unless told otherwise.
DEFAULT_UTILIZATION = 0.9
_UTILIZATION_FLAGS = ("--gpu-memory-utilization", "--mem-fraction-static")
_BACKEND_FLAGS = ("--moe-backend", "--moe-runner-backend")
# Backends whose kernels exist for one family of chips only: what its name must begin with.
_BACKEND_ARCH = {"flashinfer_trtllm": "sm10", "flashinfer_cutedsl": "sm10", "aiter": "gfx"}
# Less than this share of the memory left for KV cache and activations is too little to batch.
_THIN_SHARE = 0.05


def memory_share(config: EvalConfig) -> float:
    """Share of an accelerator's memory that the server may use."""
    for value in reversed(flag_values(config.server_args, _UTILIZATION_FLAGS)):
        try:
            share = float(value or "")
        except ValueError:
            continue
        if 0 < share <= 1:
            return share
    return DEFAULT_UTILIZATION


def weights_gib_per_gpu(config: EvalConfig, layout: Layout) -> float | None:
    """GiB of weights on each accelerator, None for a model of unknown size.

    Experts are spread over all ranks, by expert or by slices of each; everything else is
    split by TP and PP and repeated for each DP rank.
    """
    size = MODEL_SIZES.get(config.model_name)
    if size is None:
        return None
    experts = size.expert_weight_bytes / layout.num_gpus
    other = size.other_weight_bytes / (layout.tp * layout.pp)
    return (experts + other) / 2**30


def check_capacity(
    config: EvalConfig, layout: Layout, pool: Pool, file: str, line: int
) -> list[Problem]:
    """Faults of running a config on a pool, placed at its server arguments."""

    def problem(severity: str, message: str) -> list[Problem]:
        return [Problem(severity, message, file, line, "server_args")]

    if pool.vendor == "cpu":
        return []
    if layout.num_gpus > pool.num_gpus:
        return problem(
            "error",
            f"{layout} needs {layout.num_gpus} GPUs; a node of pool {pool.name} has "
            f"{pool.num_gpus}; lower a size or list it for another pool",
        )
    asked = [value for value in flag_values(config.server_args, _BACKEND_FLAGS) if value]
    arch = _BACKEND_ARCH.get(asked[-1], "") if asked else ""
    if not pool.arch.startswith(arch):
        return problem(
            "error",
            f"backend {asked[-1]} has kernels for {arch}* only; pool {pool.name} is {pool.arch}; "
            "list it for another pool",
        )
    weights = weights_gib_per_gpu(config, layout)
    if weights is None:
        return []
    budget = pool.memory_gib * memory_share(config)
    fact = (
        f"{config.model_name} puts {weights:.1f} GiB of weights on each of {layout.num_gpus} GPUs "
        f"({layout}); pool {pool.name} has {pool.memory_gib:g} GiB, of which the server uses "
        f"{budget:.1f}"
    )
    if weights >= budget:
        return problem("error", f"does not fit: {fact}; use more GPUs or another pool")
    if budget - weights < _THIN_SHARE * pool.memory_gib:
        return problem("warning", f"hardly fits: {fact}; little is left for the KV cache")
    return []
