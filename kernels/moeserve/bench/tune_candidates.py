"""Which tiles of the Triton experts are worth compiling and timing, for `tune.py`.

Receives the average rows of an expert, returns tiles of each GEMM. What a tile means is
`triton_kernels/grouped_gemm.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from moeserve.triton_kernels.gemv import GemvTile
from moeserve.triton_kernels.grouped_gemm import Tile

# Shared memory a program may use on Hopper, 227 KiB, less what the kernel itself needs.
SHARED_BYTES = 220 * 1024
# Loads on their way that a memory-bound loop over tiles needs at least, of a multiprocessor.
LEAST_AHEAD_BYTES = 80 * 1024


def gate_up_candidates(rows: float) -> list[Tile]:
    """Tiles of the first GEMM worth trying where an expert gets `rows` rows on average."""
    tiles = _candidates(rows, num_weight_tiles=2, widths=(32, 64, 128))
    # Tokens in the experts' order cost a copy, which many rows of each weight tile pay for.
    tiles += [replace(t, is_arranged=True) for t in tiles if t.uses_tma and t.block_m == 128]
    return tiles


def down_candidates(rows: float) -> list[Tile]:
    """The same for the second GEMM, which holds one accumulator and may be wider."""
    tiles = _candidates(rows, num_weight_tiles=1, widths=(64, 128, 256))
    flat = [
        replace(t, uses_tma=True, is_persistent=True, programs_per_sm=programs)
        for t in tiles
        if t.block_m <= 64 and t.is_swapped and not t.tail_m and rows >= 3
        for programs in (1, 2, 3)
    ]
    flat += [replace(t, is_swapped=False) for t in flat if t.block_m == 64]
    return list(dict.fromkeys(tiles + [t for t in flat if _is_flat_worth_trying(t)]))


def _is_flat_worth_trying(tile: Tile) -> bool:
    ahead = _stage_bytes(tile, 1) * tile.num_stages * tile.programs_per_sm
    return ahead >= LEAST_AHEAD_BYTES and _fits(tile, 1)


def _candidates(rows: float, num_weight_tiles: int, widths: tuple[int, ...]) -> list[Tile]:
    """Row blocks near the average count, the widths and depths that pay there, their variants."""
    tiles: list[Tile] = []
    if rows <= 24:
        tiles += _grid_of(16, widths, (64, 128, 256), (4, 8), (2, 3, 4, 5))
    if 8 <= rows <= 64:
        tiles += _grid_of(32, widths[1:], (64, 128), (4, 8), (2, 3, 4, 5))
    if 20 <= rows <= 200:
        tiles += _grid_of(64, widths[1:], (64, 128), (4, 8), (3, 4, 5), group_m=2)
    if rows >= 60:
        # Large row blocks are bound by arithmetic: depth 64, as wide as the registers allow.
        tiles += _grid_of(128, widths[-2:], (64,), (4, 8), (3, 4), group_m=4)
    return [tile for tile in dict.fromkeys(tiles) if _fits(tile, num_weight_tiles)]


def _grid_of(
    m: int,
    widths: Sequence[int],
    depths: Sequence[int],
    warps: Sequence[int],
    stages: Sequence[int],
    group_m: int = 1,
) -> list[Tile]:
    grid = itertools.product(widths, depths, warps, stages)
    return [
        variant
        for n, k, w, s in grid
        for variant in _variants(Tile(m, n, k, w, s, group_m=group_m))
    ]


def _variants(tile: Tile) -> list[Tile]:
    """Swapped operands, short last blocks, descriptors and persistence, where they can pay."""
    out = [tile]
    if tile.block_m <= 64 and tile.block_n >= 64 and tile.num_stages >= 3:
        out.append(replace(tile, is_swapped=True))
    if tile.block_m == 128:
        tails = (0, 32, 64)
        out = [replace(tile, uses_tma=True, tail_m=t, group_m=g) for t in tails for g in (4, 8)]
        out += [replace(t, is_persistent=True) for t in list(out) if tile.num_warps == 8]
    elif tile.block_m >= 32 and tile.block_n >= 64 and tile.num_stages >= 3:
        tail = {32: 16, 64: 32}[tile.block_m]
        out += [replace(t, tail_m=tail) for t in list(out)]
        out += [replace(t, uses_tma=True) for t in list(out)]
    return out


def _stage_bytes(tile: Tile, num_weight_tiles: int) -> int:
    return tile.block_k * 2 * (tile.block_m + num_weight_tiles * tile.block_n)


def _fits(tile: Tile, num_weight_tiles: int) -> bool:
    accumulators = num_weight_tiles * tile.block_m * tile.block_n
    # 32-bit accumulators of a thread: past 128 the compiler spills.
    registers = accumulators / (32 * tile.num_warps)
    shared = _stage_bytes(tile, num_weight_tiles) * tile.num_stages * tile.programs_per_sm
    return shared <= SHARED_BYTES and registers <= 128


def gemv_candidates() -> list[GemvTile]:
    """Tiles of the gemv path."""
    grid = itertools.product((1, 2, 4, 8, 16), (128, 256, 512), (1, 2, 4, 8), (1, 2, 3, 4))
    return [GemvTile(n, k, w, s) for n, k, w, s in grid if 4 <= n * k / (32 * w) <= 64]
