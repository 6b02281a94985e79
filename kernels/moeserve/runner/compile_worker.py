"""The compiling process: `python -m moeserve.runner.compile_worker`.

Reads questions from stdin, a JSON object a line: its number, the GPU to compile for, module and
name of a kernel, and Triton's own description of a specialisation. Writes "NUMBER ok" or "NUMBER
why not" and ends with stdin. Each question is a fork of this process, which has imported everything
and never touches a GPU; `compile_process.py` is the other end.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from moeserve.runner.compile_process import num_cores

logger = logging.getLogger(__name__)


class NoGpu:
    """Stands where Triton looks for a driver: it answers what compiling asks, for a given GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        """Any number: nothing is loaded."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The GPU that the engine has."""
        return self._target


def main() -> None:
    """Serve until stdin ends."""
    # Imported before the first fork, so that every fork has it.
    importlib.import_module("moeserve.triton_kernels.grouped_gemm_kernels")
    running: dict[int, int] = {}
    for line in sys.stdin:
        while len(running) >= max(1, num_cores() - 1):
            _reap(running, os.wait())
        question = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _answer_and_end(question)
        running[pid] = question["number"]
    while running:
        _reap(running, os.wait())


def _reap(running: dict[int, int], ended: tuple[int, int]) -> None:
    pid, status = ended
    number = running.pop(pid)
    if status:
        _write(number, f"ended with status {status}")


def _answer_and_end(question: dict[str, Any]) -> None:
    """In the fork: compile, say so, leave without running the parent's exit handlers."""
    outcome = "ok"
    try:
        compile_kernel(question)
    except Exception as error:
        # The process boundary: the engine compiles it again and meets the error where it can act.
        logger.exception("%s", question["name"])
        outcome = f"{type(error).__name__}: {error}".replace("\n", " ")
    _write(question["number"], outcome)
    os._exit(0)


def compile_kernel(question: dict[str, Any]) -> None:
    """Compile one specialisation into Triton's cache on disk."""
    triton.runtime.driver.set_active(NoGpu(GPUTarget(*question["target"])))
    kernel = getattr(importlib.import_module(question["module"]), question["name"])
    kernel.preload(question["specialization"])


def _write(number: int, outcome: str) -> None:
    # One write of less than a pipe's atomic size: forks answer at the same time.
    os.write(sys.stdout.fileno(), f"{number} {outcome[:400]}\n".encode())


if __name__ == "__main__":
    main()
