"""Tile sizes for the Triton experts: tables measured on a device, or a sane default.

Receives a layer's shape and a token count, returns `LayerTiles`. Tables are JSON files in
`tuned/`, one for each (device, shape), written by `moeserve bench moe --tune`; kernels are in
`triton_kernels/`, and nothing there chooses.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeserve.triton_kernels.gemv import GemvTile
from moeserve.triton_kernels.grouped_gemm import Tile

TABLES = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class LayerTiles:
    """What one forward launches: tiles of both GEMMs, or the gemv path for very few tokens."""

    gate_up: Tile | GemvTile
    down: Tile | GemvTile


@dataclass(frozen=True)
class LayerShape:
    """What a table is measured for: E_loc experts on the rank, H, I, K."""

    E: int
    H: int
    I: int
    K: int

    @property
    def key(self) -> str:
        """Part of a table's file name."""
        return f"E{self.E}-H{self.H}-I{self.I}-K{self.K}"


# Deterministic mode, by the average number of rows an expert gets. In all of them the weights
# fill the M side of the warpgroup instruction and its K side is 16, so an element is the same chain
# of sums whatever the tile: only how many tokens share an instruction changes. Tested bit for bit
# on a GPU (`tests/gpu/test_moe_gpu.py`); the gemv path and split sums stay out.
DETERMINISTIC: tuple[tuple[float, LayerTiles], ...] = (
    (
        12.0,
        LayerTiles(
            Tile(16, 64, 128, 4, 3, is_swapped=True), Tile(16, 128, 64, 8, 3, is_swapped=True)
        ),
    ),
    (
        90.0,
        LayerTiles(
            Tile(64, 128, 64, 8, 4, group_m=2, is_swapped=True, tail_m=32),
            Tile(64, 128, 64, 8, 4, group_m=2, is_swapped=True, tail_m=32),
        ),
    ),
    (
        math.inf,
        LayerTiles(
            Tile(128, 128, 64, 8, 3, group_m=4, is_swapped=True, tail_m=32),
            Tile(128, 128, 64, 8, 4, group_m=4, is_swapped=True, tail_m=32),
        ),
    ),
)


def deterministic_tiles(shape: LayerShape, num_tokens: int) -> LayerTiles:
    """Tiles of deterministic mode: fast for the token count, the same bits for every one."""
    rows = num_tokens * shape.K / shape.E
    return next(tiles for most, tiles in DETERMINISTIC if rows <= most)


def table_path(device_name: str, shape: LayerShape) -> Path:
    """File of a device's table for a shape, e.g. `tuned/NVIDIA_H200-E128-H2048-I768-K8.json`."""
    device = re.sub(r"[^A-Za-z0-9]+", "_", device_name).strip("_")
    return TABLES / f"{device}-{shape.key}.json"


def load_table(device_name: str, shape: LayerShape) -> dict[int, LayerTiles]:
    """Token count -> tiles, empty where the device or the shape was never measured."""
    path = table_path(device_name, shape)
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    return {int(tokens): _tiles_from(entry) for tokens, entry in entries.items()}


def save_table(path: Path, entries: dict[int, LayerTiles], meta: dict[str, object]) -> None:
    """Write a table with what it was measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {**meta, "entries": {str(t): _tiles_to(entries[t]) for t in sorted(entries)}}
    path.write_text(json.dumps(body, indent=1) + "\n")


def choose(table: dict[int, LayerTiles], shape: LayerShape, num_tokens: int) -> LayerTiles:
    """Tiles for a forward of `num_tokens` tokens: the nearest measured count, else the default."""
    if table:
        # Between two counts the larger one's tiles: too large a tile costs less than too small.
        wanted = math.log2(max(num_tokens, 1))
        nearest = min(table, key=lambda t: (round(abs(math.log2(t) - wanted), 6), -t))
        # The gemv path reads an expert once for each of its slots, so it never serves more
        # tokens than it was measured for.
        if isinstance(table[nearest].gate_up, GemvTile) and num_tokens > nearest:
            larger = [t for t in sorted(table) if isinstance(table[t].gate_up, Tile)]
            return table[larger[0]] if larger else default_tiles(shape, num_tokens)
        return table[nearest]
    return default_tiles(shape, num_tokens)


def default_tiles(shape: LayerShape, num_tokens: int) -> LayerTiles:
    """Tiles from the average number of rows an expert gets, where nothing was measured."""
    if num_tokens * shape.K * 4 <= shape.E or num_tokens == 1:
        return LayerTiles(GemvTile(8, 256, 4), GemvTile(8, 256, 4))
    rows = num_tokens * shape.K / shape.E
    if rows <= 16:
        return LayerTiles(Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 4))
    if rows <= 48:
        return LayerTiles(Tile(32, 64, 128, 4, 3), Tile(32, 128, 64, 4, 4))
    if rows <= 96:
        return LayerTiles(Tile(64, 64, 64, 4, 4, group_m=2), Tile(64, 128, 64, 4, 4, group_m=2))
    return LayerTiles(Tile(128, 128, 64, 8, 3, group_m=4), Tile(128, 256, 64, 8, 3, group_m=4))


def _tiles_to(tiles: LayerTiles) -> dict[str, object]:
    return {"gate_up": asdict(tiles.gate_up), "down": asdict(tiles.down)}


def _tiles_from(entry: dict[str, dict[str, Any]]) -> LayerTiles:
    return LayerTiles(_tile_from(entry["gate_up"]), _tile_from(entry["down"]))


def _tile_from(fields: dict[str, Any]) -> Tile | GemvTile:
    return Tile(**fields) if "block_m" in fields else GemvTile(**fields)
