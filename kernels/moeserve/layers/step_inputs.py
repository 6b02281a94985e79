"""A step's numbers as one int32 buffer: a single copy to the device, at places that do not move.

Receives a `HostBatch`; fills a numpy buffer, and gives views of the same places in a device
tensor. Places depend on `StepSizes` alone, so a captured graph of B rows finds its inputs where
every step of B rows puts them; the block table comes last because its width changes from step to
step, which the kernels read from `meta`. The kernels are chosen by `layers/attention_triton.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from moeserve.layers.attention import Array, HostBatch
from moeserve.triton_kernels.attention_rows import (
    META_SHARED_ROW,
    META_SHARED_TOKENS,
    META_SIZE,
    META_TABLE_STRIDE,
)

if TYPE_CHECKING:
    from moeserve.layers.attention_triton import SharedPrefix

# Parts begin at multiples of 16 bytes, so that kernels are compiled for one alignment.
_ALIGNMENT = 4
_ITEM_FIELDS = 3
_PARTS = ("meta", "token_ids", "positions", "slots", "places", "logits_rows", "begins", "items")


@dataclass(frozen=True)
class StepSizes:
    """Lengths of the parts.

    Attributes:
        num_tokens: T, padding included.
        num_sampled: R, rows that get a token.
        num_decodes: Leading rows with one token each.
        num_items: Blocks of prompt tokens.
    """

    num_tokens: int
    num_sampled: int
    num_decodes: int
    num_items: int = 0

    def spans(self) -> dict[str, tuple[int, int]]:
        """Part -> (first, last + 1); the table begins where the last part ends."""
        lengths = (
            META_SIZE,
            self.num_tokens,
            self.num_tokens,
            self.num_tokens,
            self.num_sampled,
            self.num_sampled,
            self.num_decodes,
            self.num_items * _ITEM_FIELDS,
        )
        spans, at = {}, 0
        for name, length in zip(_PARTS, lengths, strict=True):
            spans[name] = (at, at + length)
            at += -(-length // _ALIGNMENT) * _ALIGNMENT
        spans["table"] = (at, at)
        return spans

    def capacity(self, table_shape: tuple[int, ...]) -> int:
        """Numbers in all, with a table of that shape."""
        return self.spans()["table"][0] + table_shape[0] * table_shape[1]


class StepViews:
    """Views of the parts in a device buffer; names as in `HostBatch`.

    Attributes:
        meta: [META_SIZE].
        token_ids: [T]; negative ones stand for a token that only the device knows.
        positions: [T], -1 for padding.
        slots: [T], -1 for padding.
        places: [R], row of each sampled sequence in the table of last tokens, -1 for padding.
        logits_rows: [R], row of T of each.
        begins: [B], where each decode row's own keys begin.
        items: [num_items * 3], first row, tokens, line of the table.
        table: Block table, from its first number to the buffer's end.
    """

    def __init__(self, buffer: Tensor, sizes: StepSizes) -> None:
        spans = sizes.spans()

        def part(name: str) -> Tensor:
            first, last = spans[name]
            return buffer[first:last]

        self.meta = part("meta")
        self.token_ids = part("token_ids")
        self.positions = part("positions")
        self.slots = part("slots")
        self.places = part("places")
        self.logits_rows = part("logits_rows")
        self.begins = part("begins")
        self.items = part("items")
        self.table = buffer[spans["table"][0] :]


@dataclass(frozen=True)
class SampledRows:
    """Rows that get a token: their place among the last tokens, and their row of T; both [R]."""

    places: Array
    rows: Array


def pack(
    host: HostBatch,
    sizes: StepSizes,
    shared: SharedPrefix,
    block_tokens: int,
    out: Array,
    sampled: SampledRows | None = None,
) -> int:
    """Fill a buffer; parts longer than the batch are padded with rows that touch nothing.

    Args:
        host: The step.
        sizes: At least the batch's own.
        shared: The prefix that decode rows have in common.
        block_tokens: Prompt tokens of a block.
        out: int32, at least `sizes.capacity`.
        sampled: Rows that get a token; None where `sizes` has none.

    Returns:
        Numbers used.
    """
    spans = sizes.spans()

    def put(name: str, values: Array, padding: int) -> None:
        first, last = spans[name]
        out[first : first + len(values)] = values
        out[first + len(values) : last] = padding

    width = _used_width(host)
    meta = np.zeros(META_SIZE, dtype=np.int32)
    meta[META_SHARED_TOKENS], meta[META_SHARED_ROW] = shared.num_tokens, shared.line
    meta[META_TABLE_STRIDE] = width
    put("meta", meta, 0)
    put("token_ids", host.token_ids, 0)
    put("positions", host.positions, -1)
    put("slots", host.slot_mapping, -1)
    if sampled is not None:
        put("places", sampled.places, -1)
        put("logits_rows", sampled.rows, 0)
    put("begins", shared.begins, 0)
    if sizes.num_items:
        put("items", prompt_blocks(host, block_tokens).reshape(-1), 0)
    first = spans["table"][0]
    used = first + len(host.block_table) * width
    np.copyto(out[first:used].reshape(-1, width), host.block_table[:, :width])
    return used


def _used_width(host: HostBatch) -> int:
    """Pages of the longest sequence."""
    return -(-int(host.seq_lens.max()) // host.page_size)


def prompt_blocks(host: HostBatch, block_tokens: int) -> Array:
    """Chunks of the prefill sequences cut into blocks: [n, 3] int32, see `StepViews.items`."""
    starts = host.cu_seqlens_q[host.num_decodes : -1]
    counts = np.diff(host.cu_seqlens_q[host.num_decodes :])
    blocks = -(-counts // block_tokens)
    line = np.repeat(np.arange(len(counts)), blocks)
    # Number of each block within its chunk.
    within = np.arange(int(blocks.sum())) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    out = np.empty((len(line), _ITEM_FIELDS), dtype=np.int32)
    out[:, 0] = starts[line] + within * block_tokens
    out[:, 1] = np.minimum(counts[line] - within * block_tokens, block_tokens)
    out[:, 2] = line + host.num_decodes
    return out
