"""Compiles kernels for an H200 on a machine without one; run by `test_compile_ahead.py`.

Usage: compile_without_gpu.py alone|process|dying|faulty. Prints, as JSON, how many kernels were
found on disk by the compiler of this process, and how many it made itself.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from moeserve.runner.compile_ahead import compile_ahead
from moeserve.runner.compile_process import CompileProcess
from moeserve.runner.compile_worker import NoGpu
from moeserve.triton_kernels.combine import moe_combine_kernel
from moeserve.triton_kernels.grouped_gemm import Tile, gate_up

T, E, H, I, K = 8, 4, 64, 64, 2


class Launching(NoGpu):
    """What a launch asks beside; it is never made."""

    def get_current_stream(self, device: int) -> int:
        return 0


def sum_slots(block: int) -> None:
    slots, out = torch.zeros(T * K, H), torch.zeros(T, H)
    ids = torch.zeros(T, K, dtype=torch.int32)
    moe_combine_kernel[(T, 1)](
        slots, ids, ids, out, 0, E, E, out.stride(0), H,
        K=K, BLOCK_H=block, HAS_MAP=False, PDL=False, num_warps=2,
    )  # fmt: skip


def multiply(tile: Tile) -> None:
    counts = torch.zeros(E, dtype=torch.int32)
    slots = torch.zeros(E, T * K, dtype=torch.int32)
    gate_up(
        torch.zeros(T, H), torch.zeros(E, 2 * I, H), torch.zeros(T * K, I), (counts, slots), tile,
        top_k=K, activation="silu",
    )  # fmt: skip


def main(how: str) -> None:
    logging.basicConfig(level=logging.INFO)
    triton.runtime.driver.set_active(Launching(GPUTarget("cuda", 90, 32)))
    found = []
    triton.knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
    process = None if how == "alone" else CompileProcess.start()
    if process is not None and how == "dying":
        process._process.kill()
    calls: list[Any] = [lambda b=b: sum_slots(b) for b in (32, 64)]
    calls += [lambda: multiply(Tile(64, 64, 32, 4, 2, uses_tma=True, tail_m=32))]
    if how == "faulty":
        calls.append(lambda: sum_slots(48))  # no power of two
    try:
        compile_ahead(calls * 3, process)
        error = ""
    except triton.CompilationError as failed:
        error = str(failed)
    print(json.dumps({"found": sum(found), "made": len(found) - sum(found), "error": error}))


if __name__ == "__main__":
    main(sys.argv[1])
