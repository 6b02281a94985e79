"""On which device an engine runs, and in which dtype, where its options leave it open.

Receives the options and the model; the rest of them is resolved in `startup.py`, platforms of MoE
backends are `moe/platforms.py`.
"""

from __future__ import annotations

import logging

import torch

from moeserve.engine.config import DTYPES, EngineConfig
from moeserve.errors import UsageError
from moeserve.models.config import ModelSpec
from moeserve.moe.backends.registry import registry
from moeserve.moe.oracle import AUTO, canonical_name

logger = logging.getLogger(__name__)


def choose_device(config: EngineConfig) -> torch.device:
    """The device that was asked for; "auto" is a GPU where torch sees one.

    A MoE backend asked for by name that serves CPUs alone takes "auto" to a CPU, so that a file
    written for one means the same on a machine with GPUs.

    Raises:
        UsageError: "cuda" without a GPU, or a MoE backend that nobody knows.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, and torch sees none")
    if config.device != "auto":
        return torch.device(config.device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if _is_for_cpus(config.moe_backend):
        logger.info("device cpu: MoE backend %s runs nowhere else", config.moe_backend)
        return torch.device("cpu")
    return torch.device("cuda")


def _is_for_cpus(moe_backend: str) -> bool:
    name, backends = canonical_name(moe_backend), registry()
    if name == AUTO or name in backends.broken:
        return False
    return backends.get(name).traits.platforms == {"cpu"}


def choose_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The dtype that was asked for; "auto" is the checkpoint's, and float32 on a CPU.

    Raises:
        UsageError: It is none of `DTYPES`.
    """
    if config.dtype not in DTYPES:
        raise UsageError(f"dtype {config.dtype!r} is not one of {', '.join(DTYPES)}")
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else spec.dtype
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]
