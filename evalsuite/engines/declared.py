"""The MoE backend that a config declares: by flag, by the field's environment switches, by key.

Receives a job, returns the backend's name as the config spells it, "" where the choice is left
to the server. What the server made of it is each engine's `evidence`.
"""

from __future__ import annotations

from evalsuite.jobs import EvalJob
from evalsuite.server_args import flag_values

MOE_BACKEND_FLAGS = ("--moe-backend", "--moe-runner-backend")
_TRUE = frozenset({"1", "true", "yes", "on"})
# One switch per weight format; each of them hands the choice to VLLM_FLASHINFER_MOE_BACKEND.
_FLASHINFER_SWITCHES = tuple(
    f"VLLM_USE_FLASHINFER_MOE_{kind}"
    for kind in ("FP16", "FP8", "FP4", "MXFP4_MXFP8", "MXFP4_BF16")
)
_AITER_SWITCHES = ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE")


def _is_on(env: dict[str, str], name: str) -> bool:
    return env.get(name, "").strip().lower() in _TRUE


def declared_backend(job: EvalJob) -> str:
    """Name the declared backend; flags beat switches, switches beat `expect_backend`."""
    config = job.config
    flags = [value for value in flag_values(config.server_args, MOE_BACKEND_FLAGS) if value]
    if flags and flags[-1] != "auto":
        return flags[-1]
    if any(_is_on(config.env, name) for name in _FLASHINFER_SWITCHES):
        wanted = config.env.get("VLLM_FLASHINFER_MOE_BACKEND", "")
        if wanted == "throughput":
            return "flashinfer_cutlass"
        if wanted == "latency":
            # TRTLLM kernels exist for Blackwell only; elsewhere the field's oracle takes CUTLASS.
            is_blackwell = job.pool is None or job.pool.arch.startswith("sm10")
            return "flashinfer_trtllm" if is_blackwell else "flashinfer_cutlass"
    if all(_is_on(config.env, name) for name in _AITER_SWITCHES):
        return "aiter"
    return config.expect_backend.name if config.expect_backend else ""


def served_model(job: EvalJob) -> str:
    """The name requests must use: `--served-model-name`, else the model's own."""
    names = flag_values(job.config.server_args, ("--served-model-name",))
    return next((name for name in reversed(names) if name), job.config.model_name)
