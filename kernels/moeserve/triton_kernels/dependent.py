"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs.

On Hopper and newer a launch may ask for this. The kernel then has to call `wait_for_inputs` in
every program before it reads what an earlier kernel wrote and before it writes anything: the wait
ends when the kernel ahead has finished and its writes can be seen, and because that one waited in
turn, everything before it has finished too. A program that left without waiting would break this
for all that follow. Only weights, which no kernel writes, may be read before the wait. Elsewhere
(older GPUs, other vendors, the interpreter) launches stay one after another.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

MIN_CAPABILITY = 9
# Every program pays for its wait: with 8,192 programs of one warp a router took 10.3 us with this
# and 6.6 without, with 2,048 programs 7.2 and 7.6 (H200).
MAX_PROGRAMS = 2048


@triton.jit
def wait_for_inputs(PDL):
    """Wait for the kernel ahead, then let the kernel behind start; nothing without PDL."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def only_wait_for_inputs(PDL):
    """The same, but the kernel behind starts when this one's programs end.

    For a kernel with a program on every multiprocessor before one of few programs: started early,
    those few would crowd on the multiprocessors that come free first (H200, T = 128: a gate of 64
    programs 11.1 us in place of 5.7).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


def dependent(x: torch.Tensor, num_programs: int = 0) -> dict[str, bool]:
    """Launch options for a kernel on the device of `x`: the constexpr `PDL` and what it implies.

    Args:
        x: A tensor of the launch.
        num_programs: Its grid, where programs are short; past `MAX_PROGRAMS` it is not asked for.
    """
    if x.is_cuda and num_programs <= MAX_PROGRAMS and _is_capable(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@lru_cache(maxsize=16)
def _is_capable(device: torch.device) -> bool:
    # ROCm builds of torch say "cuda" too.
    if torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= MIN_CAPABILITY
