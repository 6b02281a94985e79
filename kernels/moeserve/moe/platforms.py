"""What this machine is: exactly one of `spec.PLATFORMS`, or an error.

The only place that asks torch about devices. The facts are a value (`MachineFacts`), so that any
platform can be tested anywhere; the decision is a chain of exclusive branches with a final raise.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from moeserve.errors import Unsupported, UsageError
from moeserve.moe.spec import PLATFORMS, Platform


@dataclass(frozen=True)
class MachineFacts:
    """What torch says of this machine.

    Attributes:
        out_of_tree: Name of a registered privateuse1 device with hardware behind it, or "".
        has_tpu: torch_xla is installed and no GPU is there.
        hip: ROCm version that torch was built for, or "".
        has_gpu: `torch.cuda` has a device (ROCm included).
        capability: Compute capability of that device; (0, 0) without one.
        has_xpu: An Intel GPU is there.
    """

    out_of_tree: str = ""
    has_tpu: bool = False
    hip: str = ""
    has_gpu: bool = False
    capability: tuple[int, int] = (0, 0)
    has_xpu: bool = False


def probe() -> MachineFacts:
    """Facts of this process's machine."""
    has_gpu = torch.cuda.is_available()
    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None) if name != "privateuseone" else None
    return MachineFacts(
        out_of_tree=name if module is not None and module.is_available() else "",
        has_tpu=not has_gpu and importlib.util.find_spec("torch_xla") is not None,
        hip=torch.version.hip or "",
        has_gpu=has_gpu,
        capability=torch.cuda.get_device_capability() if has_gpu else (0, 0),
        has_xpu=torch.xpu.is_available(),
    )


def detect_platform(facts: MachineFacts | None = None) -> Platform:
    """Platform of this machine.

    Args:
        facts: Another machine's; None probes this one.

    Raises:
        Unsupported: A GPU that no branch knows.
    """
    facts = probe() if facts is None else facts
    # An out-of-tree device may look like CUDA as well; it knows best what it is, so it is first.
    if facts.out_of_tree:
        return "oot"
    if facts.has_gpu:
        return "rocm" if facts.hip else _cuda(facts.capability)
    if facts.has_xpu:
        return "xpu"
    return "tpu" if facts.has_tpu else "cpu"


def _cuda(capability: tuple[int, int]) -> Platform:
    major, minor = capability
    if major == 9:
        return "cuda-sm90"
    # SM110 counts as neither: FlashInfer excludes it (flashinfer#3134).
    if major == 10:
        return "cuda-sm100"
    if major == 12:
        return "cuda-sm120"
    raise Unsupported(
        f"a GPU of compute capability {major}.{minor} is no platform of this build; "
        "known are 9.x (cuda-sm90), 10.x (cuda-sm100) and 12.x (cuda-sm120)"
    )


def check_platform(name: str) -> Platform:
    """`name` as a platform.

    Raises:
        UsageError: It is none; says which there are and which is closest.
    """
    for known in PLATFORMS:
        if name == known:
            return known  # type: ignore[return-value]
    close = get_close_matches(name, PLATFORMS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"platform={name!r} is unknown. Expected one of {list(PLATFORMS)}.{hint}")
