"""Compiles every Triton kernel that some calls would launch, side by side, without launching any.

Receives the calls; leaves the kernels in Triton's caches, in memory and on disk, and on the device.
Compiled one after another at their first launch they take most of a minute on a machine that has
never run them; the library's own kernels in the calls run as usual, on whatever their inputs hold.
Where `compile_process.py` has been started, the compilations are its own.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from moeserve.layers.step_inputs import StepSizes
from moeserve.runner.compile_process import CompileProcess

logger = logging.getLogger(__name__)
NUM_THREADS = 16


def compile_ahead(
    calls: Sequence[Callable[[], object]],
    process: CompileProcess | None = None,
    num_threads: int = NUM_THREADS,
) -> None:
    """Compile what `calls` launch.

    Args:
        calls: Each is run once, with Triton launches replaced by compilations.
        process: Asked for what is not on disk, where it leaves it. It gets no more questions.
        num_threads: Compilations side by side.
    """
    start = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        mode = _Compilation(pool, process)
        with _without_launches(mode), mode, torch.inference_mode():
            for call in calls:
                call()
            if process is not None:
                process.close()
        kernels = [future.result() for future in mode.future_kernels.values()]
        if torch.cuda.is_available():
            # Otherwise each is paid for at its first launch, in the middle of a request.
            list(pool.map(partial(_load, device=torch.cuda.current_device()), kernels))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    what = f"{len(kernels)} Triton kernels ready after {seconds:.2f} s"
    logger.info("%s, %d compiled by a process of their own", what, mode.num_asked)


def sample_steps(
    max_num_seqs: int, max_num_batched_tokens: int, graph_sizes: Sequence[int]
) -> list[tuple[StepSizes, bool]]:
    """Steps that between them meet every kernel variant, those that take long to compile first.

    Args:
        max_num_seqs: Most rows of a decode step.
        max_num_batched_tokens: Most tokens of a step with prompts.
        graph_sizes: Rows of the decode steps that are captured; all are among the samples.

    Returns:
        Sizes, and whether a common prefix is taken apart.
    """
    most = max_num_batched_tokens
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    decodes = {*graph_sizes, *(T for T in powers if max_num_seqs >= T)}
    prompts = [(StepSizes(T, 1, 0, 1), False) for T in reversed(powers)]
    # Large tiles first: the longest compilations should not be the last to begin.
    ordered = sorted(decodes, key=lambda T: (T not in powers, -T))
    return prompts + [(StepSizes(T, T, T), shared) for T in ordered for shared in (False, True)]


class _Compilation(triton.AsyncCompileMode):  # type: ignore[misc]  # triton carries no types
    """Compiles in threads; what is not on disk is asked of the process first.

    Attributes:
        num_asked: Kernels asked of the process.
    """

    def __init__(self, pool: ThreadPoolExecutor, process: CompileProcess | None) -> None:
        super().__init__(pool)
        self.num_asked = 0
        self._process = process
        self._seen: set[tuple[str, str, str]] = set()
        self._question: dict[str, Any] = {}

    def hook(self, *, key: object, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """What Triton calls before each compilation; True skips one that was asked for before."""
        name = (fn.module, fn.name, str(key))
        if name in self._seen:
            return True
        self._seen.add(name)
        target = triton.runtime.driver.active.get_current_target()
        self._question = {
            "target": [target.backend, target.arch, target.warp_size],
            "module": fn.module,
            "name": fn.name,
            "specialization": compile["specialization_data"],
        }
        return False

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Any) -> Any:
        """See `triton.AsyncCompileMode`; called right after the hook."""
        if self._process is not None and not _is_on_disk(key, self._question["name"]):
            self.num_asked += 1
            compile_fn = partial(_after, self._process.ask(self._question), compile_fn)
        return super().submit(key, compile_fn, finalize_fn)


def _after(answer: Future[bool], compilation: Callable[[], Any]) -> Any:
    """Read from disk what the process has left there, or compile what it has not."""
    answer.result()
    return compilation()


def _is_on_disk(key: str, name: str) -> bool:
    """Whether Triton's cache holds a kernel; a wrong answer only costs time."""
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(manager.get_group(f"{name[:150]}.json"))


def _load(kernel: Any, device: int) -> None:
    """Build a kernel's launcher, which takes a C compiler where it is new, and load its code."""
    with torch.cuda.device(device):
        _ = kernel.run


@contextmanager
def _without_launches(mode: _Compilation) -> Iterator[None]:
    """Launches of Triton kernels only ask for their compilation."""
    launch, hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook

    @functools.wraps(launch)
    def ask(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = ask
    triton.knobs.runtime.jit_cache_hook = mode.hook
    try:
        yield
    finally:
        JITFunction.run = launch
        triton.knobs.runtime.jit_cache_hook = hook
