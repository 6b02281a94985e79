"""Timing on a GPU: medians over graph replays, and the two ceilings every table is read against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moeserve.errors import UsageError


def check_parent(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before minutes of measuring and not after.

    Raises:
        UsageError: Its folder does not exist.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: no folder {path.absolute().parent}")


def graph_time_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median time of one call, from replays of a graph that holds every call once.

    Args:
        calls: The same work on different inputs, so that no replay finds its data in L2.
        replays: Timed replays; two more warm up.

    Returns:
        Microseconds a call, launch gaps between graph nodes included.
    """
    return statistics.median(replay_times_us(calls, replays)) / len(calls)


def replay_times_us(calls: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """Microseconds of each replay of a graph that holds every call once."""
    graph = _captured(calls)
    for _ in range(2):
        graph.replay()
    spans = [_timed_replay(graph) for _ in range(replays)]
    torch.cuda.synchronize()
    return [_span_us(span) for span in spans]


def turn_times_us(rivals: Sequence[Sequence[Callable[[], object]]], rounds: int = 9) -> list[float]:
    """Median time of one call of each rival, replayed in turns, there and back.

    A card that is kept busy grows warm and slow: measured one after another, the first rival of
    several that differ by 5 % wins.

    Args:
        rivals: For each, the same work on different inputs.
        rounds: Timed rounds; one more warms up.

    Returns:
        Microseconds a call, in the order of `rivals`.
    """
    graphs = [_captured(calls) for calls in rivals]
    spans: list[list[tuple[Any, Any]]] = [[] for _ in rivals]
    order = list(range(len(rivals)))
    for number in range(rounds + 1):
        for i in order if number % 2 else reversed(order):
            span = _timed_replay(graphs[i])
            if number:
                spans[i].append(span)
    torch.cuda.synchronize()
    return [
        statistics.median(map(_span_us, mine)) / len(calls)
        for mine, calls in zip(spans, rivals, strict=True)
    ]


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _timed_replay(graph: torch.cuda.CUDAGraph) -> tuple[Any, Any]:
    start, end = _event(), _event()
    start.record()
    graph.replay()
    end.record()
    return start, end


def _span_us(span: tuple[Any, Any]) -> float:
    return float(span[0].elapsed_time(span[1])) * 1000.0


def _event() -> Any:  # torch's events carry no types
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def event_time_us(calls: Sequence[Callable[[], object]], rounds: int = 3) -> float:
    """Quick median over rounds of launching every call once, without a graph."""
    for call in calls[:1]:
        call()
    times = []
    for _ in range(rounds):
        start, end = _event(), _event()
        start.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1000.0 / len(calls))
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Copy and read rates in TB/s, and the bf16 matmul rate in TFLOP/s, of this card now."""
    n = 1 << 30
    src = torch.randint(0, 255, (2 * n,), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    copy_us = graph_time_us([lambda: dst.copy_(src)])
    floats = src.view(torch.float32)
    read_us = graph_time_us([lambda: torch.sum(floats, dtype=torch.float32)])
    size = 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    matmul_us = graph_time_us([lambda: torch.mm(a, b, out=out)] * 3)
    return {
        "copy_tb_s": 2 * 2 * n / copy_us / 1e6,
        "read_tb_s": 2 * n / read_us / 1e6,
        "matmul_tflop_s": 2 * size**3 / matmul_us / 1e6,
    }
