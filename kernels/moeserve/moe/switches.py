"""The field's environment switches for MoE backends, as one value.

Receives the environment as a mapping and the platform; returns what it demands and what it takes
out. The rules are upstream's (0.23, which deprecates the switches in favour of `--moe-backend`);
the oracle applies the value, and only under "auto".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from moeserve.errors import UsageError
from moeserve.moe.spec import Platform

USE_FLASHINFER = "VLLM_USE_FLASHINFER_MOE_FP16"
FLASHINFER_BACKEND = "VLLM_FLASHINFER_MOE_BACKEND"
USE_AITER = "VLLM_ROCM_USE_AITER"
USE_AITER_MOE = "VLLM_ROCM_USE_AITER_MOE"
NAMES = (USE_FLASHINFER, FLASHINFER_BACKEND, USE_AITER, USE_AITER_MOE)

TRTLLM, CUTLASS, AITER = "flashinfer_trtllm", "flashinfer_cutlass", "aiter"


@dataclass(frozen=True)
class Switches:
    """What the environment asks for.

    Attributes:
        demanded: Names of which the first that is supported must be taken; empty = no demand.
        source: The switches behind the demand, as "NAME=value".
        failure: Upstream's message if none of several is supported; "" has the usual one.
        removed: Names that "auto" must not take, to the switch that says so.
        note: Something the user should know, for the log.
    """

    demanded: tuple[str, ...] = ()
    source: str = ""
    failure: str = ""
    removed: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def read_switches(env: Mapping[str, str], platform: Platform) -> Switches:
    """Reads the four switches.

    Args:
        env: The environment; unset and empty mean the same.
        platform: "latency" is TRTLLM on SM100, CUTLASS elsewhere.

    Raises:
        UsageError: A value that no switch has, or a FlashInfer variant without an unquantized form.
    """
    removed: dict[str, str] = {}
    use_flashinfer = _flag(env, USE_FLASHINFER)
    if use_flashinfer:
        return _flashinfer_demand(env, platform)
    if use_flashinfer is False:
        removed |= dict.fromkeys((TRTLLM, CUTLASS), f"{USE_FLASHINFER}={env[USE_FLASHINFER]}")
    use_aiter, use_aiter_moe = _flag(env, USE_AITER), _flag(env, USE_AITER_MOE)
    if use_aiter is None and use_aiter_moe is None:
        return Switches(removed=removed)
    # Upstream's defaults: AITER as a whole is off, its MoE part is on.
    source = ", ".join(
        f"{name}={env[name]}" for name in (USE_AITER, USE_AITER_MOE) if env.get(name)
    )
    if use_aiter and use_aiter_moe is not False:
        return Switches(demanded=(AITER,), source=source, removed=removed)
    return Switches(removed={**removed, AITER: source})


def _flashinfer_demand(env: Mapping[str, str], platform: Platform) -> Switches:
    source = f"{USE_FLASHINFER}={env[USE_FLASHINFER]}"
    variant = env.get(FLASHINFER_BACKEND, "").strip().lower()
    if not variant:
        failure = (
            f"Found {source}, but no FlashInfer unquantized MoE backend supports the configuration."
        )
        return Switches((TRTLLM, CUTLASS), source, failure)
    source = f"{source}, {FLASHINFER_BACKEND}={variant}"
    if variant == "throughput":
        return Switches((CUTLASS,), source)
    if variant == "latency":
        if platform == "cuda-sm100":
            return Switches((TRTLLM,), source)
        note = f"{FLASHINFER_BACKEND}=latency means TRTLLM on SM100 only; CUTLASS on {platform}"
        return Switches((CUTLASS,), source, note=note)
    if variant == "masked_gemm":
        raise UsageError(f"FlashInfer MOE backend {variant} does not support unquantized MoE.")
    known = ("throughput", "latency", "masked_gemm")
    close = get_close_matches(variant, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(
        f"{FLASHINFER_BACKEND}={variant!r} is unknown. Expected one of {list(known)}.{hint}"
    )


def _flag(env: Mapping[str, str], name: str) -> bool | None:
    value = env.get(name, "").strip().lower()
    if not value:
        return None
    if value in ("1", "true"):
        return True
    if value in ("0", "false"):
        return False
    raise UsageError(f"{name}={env[name]!r}: expected 0 or 1")
