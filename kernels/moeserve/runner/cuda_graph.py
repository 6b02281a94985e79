"""Decode steps as captured CUDA graphs over a ladder of batch sizes.

Receives a function that makes a step on static inputs; captures it once for each size (and once
more with a prefix taken apart, at first need) and replays it. A batch between two sizes is padded
with rows that write nothing and read nothing of their own, so real rows keep their bits. All
graphs share one memory pool: they run one after another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)
# Largest batch with a graph of its own; beyond it a step takes longer on the card than its
# launches on the host.
MAX_GRAPH_ROWS = 2048


class Captured(Protocol):
    """A step that can be run again on whatever its inputs hold then."""

    def replay(self) -> None:
        """Enqueue it."""
        ...


@dataclass(frozen=True)
class Capturable:
    """A step on static inputs.

    Attributes:
        run: All of it.
        sample: As little of it as meets every kernel, to load them before they are captured.
    """

    run: Callable[[], None]
    sample: Callable[[], None]


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes of the ladder up to `max_rows`, ascending; at most an eighth is padding."""
    sizes: list[int] = []
    size = 1
    while size < min(max_rows, MAX_GRAPH_ROWS):
        sizes.append(size)
        # Steps of an eighth of the size, rounded to a power of two: 1 up to 16, 2 up to 32, ...
        step = 1 << max(0, (size // 8).bit_length() - 1)
        size += step if size >= 8 else 1
    sizes.append(min(max_rows, MAX_GRAPH_ROWS))
    return sizes


class CudaCapture:
    """Captures on one side stream into one pool."""

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, step: Capturable) -> Captured:
        """Run a sample to load every kernel and make the library's scratch, then capture."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            step.sample()
            self._stream.synchronize()
            # torch.cuda.graph() collects garbage before each capture, which takes longer than this.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step.run()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        return graph


class GraphLadder:
    """Captured decode steps by size."""

    def __init__(
        self,
        sizes: list[int],
        make_step: Callable[[int, bool], Capturable],
        capture: Callable[[Capturable], Captured],
    ) -> None:
        self.sizes = sizes
        self._make_step = make_step
        self._capture = capture
        self._graphs: dict[tuple[int, bool], Captured] = {}

    def size_for(self, num_rows: int) -> int | None:
        """Smallest size that holds `num_rows`; None beyond the ladder."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def has(self, size: int, has_shared: bool) -> bool:
        """Whether that graph is captured."""
        return (size, has_shared) in self._graphs

    def get(self, size: int, has_shared: bool) -> Captured:
        """The graph of a size, captured now where it is asked for the first time."""
        key = (size, has_shared)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(self._make_step(size, has_shared))
        return graph

    def capture_all(self) -> None:
        """Capture every size without a shared prefix, largest first, so that memory is reused.

        One whole step runs before: what a layer makes at its first use must not be made inside a
        capture, where nothing is written until a replay.
        """
        start = time.perf_counter()
        self._make_step(self.sizes[-1], False).run()
        for size in reversed(self.sizes):
            self.get(size, False)
        seconds = time.perf_counter() - start
        logger.info("captured %d decode graphs in %.2f s", len(self.sizes), seconds)
