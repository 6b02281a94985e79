"""Compiles every Triton kernel that some calls would launch, side by side, without launching any.

Receives the calls; leaves the kernels in Triton's caches, in memory and on disk, and on the device.
Compiled one after another at their first launch they take most of a minute on a machine that has
never run them; the library's own kernels in the calls run as usual, on whatever their inputs hold.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)
NUM_THREADS = 16


def compile_ahead(calls: Sequence[Callable[[], object]], num_threads: int = NUM_THREADS) -> None:
    """Compile what `calls` launch.

    Args:
        calls: Each is run once, with Triton launches replaced by compilations.
        num_threads: Compilations side by side.
    """
    start = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        mode = triton.AsyncCompileMode(pool)
        with _without_launches(), mode, torch.inference_mode():
            for call in calls:
                call()
        kernels = [future.result() for future in mode.future_kernels.values()]
        if torch.cuda.is_available():
            # Otherwise each is paid for at its first launch, in the middle of a request.
            list(pool.map(partial(_load, device=torch.cuda.current_device()), kernels))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    logger.info("%d Triton kernels ready after %.2f s", len(kernels), seconds)


def _load(kernel: Any, device: int) -> None:
    """Build a kernel's launcher, which takes a C compiler where it is new, and load its code."""
    with torch.cuda.device(device):
        _ = kernel.run


@contextmanager
def _without_launches() -> Iterator[None]:
    """Launches of Triton kernels only ask for their compilation."""
    launch = JITFunction.run

    @functools.wraps(launch)
    def ask(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = ask
    try:
        yield
    finally:
        JITFunction.run = launch
