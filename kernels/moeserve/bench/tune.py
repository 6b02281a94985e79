"""`moeserve bench moe --tune`: measure tile sizes of the Triton experts and write the table.

Receives a layer shape; compiles every candidate in parallel processes, times each GEMM alone on
fresh random routing, and returns the best pair for each token count. The table it writes is read
by `moe/tuning.py`; which tiles are candidates is `tune_candidates.py`.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch
import triton
from triton.runtime.errors import TritonError

from moeserve.bench.timing import event_time_us, turn_times_us
from moeserve.bench.tune_candidates import down_candidates, gate_up_candidates, gemv_candidates
from moeserve.moe.tuning import LayerShape, LayerTiles
from moeserve.triton_kernels import gemv, grouped_gemm
from moeserve.triton_kernels.gemv import GemvTile
from moeserve.triton_kernels.grouped_gemm import Tile
from moeserve.triton_kernels.moe_arrange import arrange
from moeserve.triton_kernels.moe_buckets import fill_buckets

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_FINALISTS = 6


@dataclass
class Inputs:
    """Tensors of one layer at one token count, with several routings to rotate over."""

    x: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    buckets: list[tuple[torch.Tensor, torch.Tensor]]
    act: torch.Tensor
    out_slots: torch.Tensor
    out: torch.Tensor
    arranged: torch.Tensor


def make_weights(shape: LayerShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random w13 [E, 2I, H] and w2 [E, H, I] with unit-variance outputs."""
    w13 = torch.empty(shape.E, 2 * shape.I, shape.H, device="cuda", dtype=dtype)
    w2 = torch.empty(shape.E, shape.H, shape.I, device="cuda", dtype=dtype)
    return w13.normal_(std=shape.H**-0.5), w2.normal_(std=shape.I**-0.5)


def make_inputs(
    shape: LayerShape, weights: tuple[torch.Tensor, torch.Tensor], T: int, sets: int
) -> Inputs:
    """Fresh tokens and uniform random routing, `sets` of them."""
    w13, w2 = weights
    ids, router_weights, buckets = [], [], []
    for _ in range(sets):
        logits = torch.randn(T, shape.E, device="cuda")
        top = torch.topk(torch.softmax(logits, -1), shape.K, dim=-1)
        ids.append(top.indices.to(torch.int32))
        router_weights.append(top.values / top.values.sum(-1, keepdim=True))
        counts = torch.zeros(shape.E, dtype=torch.int32, device="cuda")
        slots = torch.empty(shape.E, T * shape.K, dtype=torch.int32, device="cuda")
        fill_buckets(ids[-1], counts, slots, num_experts=shape.E)
        buckets.append((counts, slots))
    return Inputs(
        x=[torch.randn(T, shape.H, device="cuda", dtype=w13.dtype) for _ in range(sets)],
        w13=w13,
        w2=w2,
        ids=ids,
        weights=router_weights,
        buckets=buckets,
        act=torch.randn(T * shape.K, shape.I, device="cuda", dtype=w13.dtype),
        out_slots=torch.empty(T * shape.K, shape.H, device="cuda", dtype=w13.dtype),
        out=torch.empty(T, shape.H, device="cuda", dtype=w13.dtype),
        arranged=torch.empty(T * shape.K, shape.H, device="cuda", dtype=w13.dtype),
    )


def num_sets(shape: LayerShape, T: int) -> int:
    """Routings to rotate over, so that the touched weights together pass the L2's 60 MB."""
    touched = min(T * shape.K, shape.E) * 3 * shape.H * shape.I * 2
    return max(2, min(24, math.ceil(400e6 / touched)))


def run_candidate(
    which: str, tile: Tile | GemvTile, shape: LayerShape, data: Inputs, i: int
) -> None:
    """Launch one GEMM once on routing set `i`."""
    if isinstance(tile, GemvTile):
        if which == "gate_up":
            gemv.gate_up_gemv(
                data.x[i], data.w13, data.act, data.ids[i], tile,
                num_experts=shape.E, activation="silu",
            )  # fmt: skip
        else:
            gemv.down_gemv(
                data.act, data.w2, data.out, data.ids[i], tile,
                num_experts=shape.E, weights=data.weights[i],
            )  # fmt: skip
    elif which == "gate_up":
        x = data.x[i]
        if tile.is_arranged:  # the copy is part of what this tile costs
            x = data.arranged
            arrange(data.x[i], x, data.buckets[i], top_k=shape.K)
        grouped_gemm.gate_up(
            x, data.w13, data.act, data.buckets[i], tile,
            top_k=shape.K, activation="silu",
        )  # fmt: skip
    else:
        grouped_gemm.down(
            data.act, data.w2, data.out_slots, data.buckets[i], tile, weights=data.weights[i]
        )


_worker_data: dict[LayerShape, Inputs] = {}


def _compile_in_worker(work: tuple[str, Tile | GemvTile, LayerShape]) -> str:
    """Compile and launch one candidate, which leaves it in the on-disk cache; "" or the error."""
    which, tile, shape = work
    if shape not in _worker_data:
        _worker_data.clear()
        weights = make_weights(shape, torch.bfloat16)
        _worker_data[shape] = make_inputs(shape, weights, 32, 1)
    try:
        run_candidate(which, tile, shape, _worker_data[shape], 0)
        torch.cuda.synchronize()
    except (RuntimeError, triton.CompilationError, TritonError) as error:  # does not fit
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def compile_all(
    work: list[tuple[str, Tile | GemvTile, LayerShape]], num_workers: int
) -> set[tuple[str, Tile | GemvTile]]:
    """Compile in parallel processes; returns the candidates that run."""
    usable: set[tuple[str, Tile | GemvTile]] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        futures = {pool.submit(_compile_in_worker, item): item for item in work}
        for future in as_completed(futures):
            which, tile, _ = futures[future]
            if not future.result():
                usable.add((which, tile))
    return usable


def _calls(
    which: str, tile: Tile | GemvTile, shape: LayerShape, data: Inputs
) -> list[Callable[[], object]]:
    return [
        lambda i=i: run_candidate(which, tile, shape, data, i)  # type: ignore[misc]
        for i in range(len(data.x))
    ]


def _best(
    which: str, tiles: Sequence[Tile | GemvTile], shape: LayerShape, data: Inputs
) -> tuple[Tile | GemvTile, float]:
    """Time all quickly, then the best six in turns."""
    quick = sorted(
        ((event_time_us(_calls(which, tile, shape, data)), i) for i, tile in enumerate(tiles))
    )
    final = [tiles[i] for _, i in quick[:NUM_FINALISTS]]
    times = turn_times_us([_calls(which, tile, shape, data) for tile in final])
    best_us, index = min(zip(times, range(len(final)), strict=True))
    return final[index], best_us


def tune(
    shape: LayerShape,
    tokens: tuple[int, ...] = TOKENS,
    *,
    num_workers: int = 14,
    report: Callable[[str], None] = print,
    keep: Callable[[dict[int, LayerTiles]], None] = lambda entries: None,
) -> dict[int, LayerTiles]:
    """Measure one shape on the current device.

    Args:
        shape: Experts on the rank, H, I, K.
        tokens: Token counts of the table.
        num_workers: Compiling processes; each holds a copy of the weights.
        report: Receives a line for each token count.
        keep: Receives the table so far after each token count, so that a run cut short is not lost.

    Returns:
        Token count -> the fastest tiles.
    """
    rows = {T: T * shape.K / shape.E for T in tokens}
    is_tiny = {T: T * shape.K <= shape.E // 4 or T == 1 for T in tokens}
    work: list[tuple[str, Tile | GemvTile, LayerShape]] = []
    for T in tokens:
        work += [("gate_up", tile, shape) for tile in gate_up_candidates(rows[T])]
        work += [("down", tile, shape) for tile in down_candidates(rows[T])]
        if is_tiny[T]:
            work += [(which, tile, shape) for which in ("gate_up", "down")
                     for tile in gemv_candidates()]  # fmt: skip
    start = time.monotonic()
    usable = compile_all(list(dict.fromkeys(work)), num_workers)
    report(f"{shape.key}: {len(usable)} of {len(set(work))} candidates compiled in "
           f"{time.monotonic() - start:.0f} s")  # fmt: skip
    weights = make_weights(shape, torch.bfloat16)
    entries: dict[int, LayerTiles] = {}
    for T in tokens:
        entries[T] = _tune_one(shape, T, rows[T], is_tiny[T], usable, weights, report)
        keep(entries)
    return entries


def _tune_one(
    shape: LayerShape,
    T: int,
    rows: float,
    is_tiny: bool,
    usable: set[tuple[str, Tile | GemvTile]],
    weights: tuple[torch.Tensor, torch.Tensor],
    report: Callable[[str], None],
) -> LayerTiles:
    data = make_inputs(shape, weights, T, num_sets(shape, T))
    found: dict[str, tuple[Tile | GemvTile, float]] = {}
    for which, candidates in (
        ("gate_up", gate_up_candidates(rows)), ("down", down_candidates(rows)),
    ):  # fmt: skip
        tiles = [tile for tile in candidates if (which, tile) in usable]
        found[which] = _best(which, tiles, shape, data)
    if is_tiny:
        streams = [tile for tile in gemv_candidates() if ("down", tile) in usable]
        pair = {which: _best(which, streams, shape, data) for which in ("gate_up", "down")}
        # The gemv path also saves the bucket launch and the sum, 2 us each at the least.
        if sum(us for _, us in pair.values()) < sum(us for _, us in found.values()) + 4.0:
            found = pair
    report(f"  T={T:6d}  gate_up {found['gate_up'][1]:8.1f} us {found['gate_up'][0]}\n"
           f"            down    {found['down'][1]:8.1f} us {found['down'][0]}")  # fmt: skip
    del data
    return LayerTiles(found["gate_up"][0], found["down"][0])
