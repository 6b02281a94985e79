"""Where a decode step's time goes, and how many experts it touches.

Receives an `Engine` without open requests and a batch; returns the kernels of a step under torch's
profiler, with the host's share, or the experts that each MoE layer's tokens chose. Loads are
`engine_load.py`; evidence of which backend ran is `engine/profiling.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from moeserve.bench.engine_load import greedy_request
from moeserve.bench.serve_shape import random_ids
from moeserve.moe.routing import route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moeserve.engine.engine import Engine
    from moeserve.engine.host_steps import Step, Steps
    from moeserve.layers.moe import MoELayer
    from moeserve.moe.dispatch import MoEKernel

TIMED_STEPS = 10
PROFILED_STEPS = 3


@dataclass(frozen=True)
class Batch:
    """Sequences of a decode step.

    Attributes:
        size: B.
        own_len: Prompt tokens of each alone.
        shared_len: Prompt tokens that all begin with.
        num_warm: Steps before the one that counts, prompts included.
    """

    size: int
    own_len: int
    shared_len: int = 0
    num_warm: int = 24

    @property
    def label(self) -> str:
        """In tables."""
        shared = f", {self.shared_len} in common" if self.shared_len else ""
        return f"B = {self.size}{shared}"


PROFILES = (Batch(128, 200), Batch(1, 200), Batch(256, 80, 650))
TOUCHED = (*(Batch(size, 20, num_warm=4) for size in (1, 8, 32, 128)), PROFILES[-1])


@dataclass(frozen=True)
class Kernel:
    """One kernel's part of a step; on a CPU, one operator's own time.

    Attributes:
        name: As the profiler says.
        calls: A step.
        us: Microseconds a step from the end of the kernel before it, or from its own beginning
            where that is later: kernels overlap where a launch does not wait for the one ahead.
    """

    name: str
    calls: float
    us: float


@dataclass(frozen=True)
class Profile:
    """One decode step.

    Attributes:
        batch: Whose.
        step_ms: Median time of a step.
        wait_ms: Of it, the host waiting for tokens.
        kernels_ms: Sum over `kernels`.
        kernels: Longest first.
    """

    batch: Batch
    step_ms: float
    wait_ms: float
    kernels_ms: float
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Touched:
    """Experts with a token, over the MoE layers of one step."""

    batch: Batch
    mean: float
    least: int
    most: int


class _TimedSteps:
    """Passes steps on and notes how long the host waits for each."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.waits: list[float] = []

    def __getattr__(self, name: str) -> Any:  # whatever else a runner's steps have
        return getattr(self.steps, name)

    def launch(self, *args: Any) -> Step:
        return cast("Step", _TimedStep(self.steps.launch(*args), self.waits))


class _TimedStep:
    def __init__(self, step: Step, waits: list[float]) -> None:
        self.step = step
        self.waits = waits

    def __getattr__(self, name: str) -> Any:  # the rest of `Step`
        return getattr(self.step, name)

    def sampled(self) -> object:
        begin = time.perf_counter()
        found = self.step.sampled()
        self.waits.append(time.perf_counter() - begin)
        return found


class _Watched:
    """A layer's kernel that notes the experts its rows choose."""

    def __init__(self, layer: MoELayer, counts: list[int]) -> None:
        self.kernel = layer.kernel
        self.routing = layer.spec.routing
        self.counts = counts

    def __getattr__(self, name: str) -> Any:  # the rest of `MoEKernel`
        return getattr(self.kernel, name)

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        *rest: Any,
        **how: Any,
    ) -> object:
        self.counts.append(torch.unique(route(logits, self.routing, bias).ids).numel())
        return self.kernel(x, logits, bias, *rest, **how)


def fits(engine: Engine, batch: Batch) -> bool:
    """Whether the engine can run all of a batch in one step."""
    longest = batch.shared_len + batch.own_len + _num_tokens(batch)
    limits = engine.limits
    pages = batch.size * (-(-longest // engine.pool.page_size) + 1)
    return (
        batch.size <= limits.max_num_seqs
        and longest <= limits.max_model_len
        and pages < engine.pool.num_pages
    )


def profile_step(engine: Engine, batch: Batch) -> Profile:
    """Time decode steps of a batch, then profile some.

    Args:
        engine: Without open requests.
        batch: For which `fits` holds.
    """
    with _decoding(engine, batch):
        step_ms, wait_ms = _time_steps(engine)
        kernels = _profile_steps(engine)
    return Profile(batch, step_ms, wait_ms, sum(one.us for one in kernels) / 1e3, tuple(kernels))


def experts_touched(engine: Engine, batch: Batch) -> Touched:
    """Count the experts that the layers of one decode step read.

    Args:
        engine: Without open requests.
        batch: For which `fits` holds.
    """
    counts: list[int] = []
    steps: Any = engine.steps  # only a GPU's have graphs, and replays pass no layer
    layers: Sequence[MoELayer] = engine.runner.model.moe_layers()
    kernels = [layer.kernel for layer in layers]
    graphs = getattr(steps, "graphs", None)
    with _decoding(engine, batch):
        if graphs is not None:
            steps.graphs = None
        for layer in layers:
            layer.kernel = cast("MoEKernel", _Watched(layer, counts))
        try:
            engine.step()
        finally:
            for layer, kernel in zip(layers, kernels, strict=True):
                layer.kernel = kernel
            if graphs is not None:
                steps.graphs = graphs
    return Touched(batch, statistics.mean(counts), min(counts), max(counts))


def _num_tokens(batch: Batch) -> int:
    # Some of the batch may be decoding while the prompts of others are still running.
    return 2 * batch.num_warm + TIMED_STEPS + PROFILED_STEPS + 1


@contextmanager
def _decoding(engine: Engine, batch: Batch) -> Iterator[None]:
    """A batch past its prompts; ended behind the block."""
    vocab_size = engine.runner.spec.vocab_size
    shared = random_ids(batch.shared_len, "pp", vocab_size)
    for i in range(batch.size):
        prompt = shared + random_ids(batch.own_len, ("p", i), vocab_size)
        engine.add(greedy_request(f"decode {i}", prompt, _num_tokens(batch)))
    for _ in range(batch.num_warm):
        engine.step()
    try:
        yield
    finally:
        engine.end_all("measured")


def _time_steps(engine: Engine) -> tuple[float, float]:
    """Median milliseconds of a step, and of the host's waiting in it."""
    steps = engine.steps
    timed = _TimedSteps(steps)
    engine.steps = cast("Steps", timed)
    times = []
    try:
        for _ in range(TIMED_STEPS):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
    finally:
        engine.steps = steps
    return 1e3 * statistics.median(times), 1e3 * statistics.median(timed.waits)


def own_times(spans: Sequence[tuple[str, float, float]]) -> list[float]:
    """Of kernels (name, begin, end) on one stream, the time of each that no earlier one covers."""
    times = [0.0] * len(spans)
    done = float("-inf")
    for i in sorted(range(len(spans)), key=lambda i: spans[i][1]):
        _, begin, end = spans[i]
        times[i] = max(0.0, end - max(begin, done))
        done = max(done, end)
    return times


def _profile_steps(engine: Engine) -> list[Kernel]:
    from torch.profiler import ProfilerActivity, profile

    is_cuda = engine.runner.options.device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    if is_cuda:
        torch.cuda.synchronize()
    with profile(activities=[activity]) as recorded:
        for _ in range(PROFILED_STEPS):
            engine.step()
        if is_cuda:
            torch.cuda.synchronize()
    events = [e for e in recorded.events() if is_cuda == (e.device_type.name == "CUDA")]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    times = own_times(spans) if is_cuda else [e.self_cpu_time_total for e in events]
    sums: dict[str, tuple[int, float]] = {}
    for event, us in zip(events, times, strict=True):
        calls, total = sums.get(event.name, (0, 0.0))
        sums[event.name] = (calls + 1, total + us)
    kernels = [
        Kernel(name, calls / PROFILED_STEPS, us / PROFILED_STEPS)
        for name, (calls, us) in sums.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.us)
