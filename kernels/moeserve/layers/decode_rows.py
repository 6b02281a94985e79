"""Keys and values of decoding sequences as dense rows beside the paged cache, for CPUs.

The paged cache stays the truth. Gathering every page of every sequence in every step costs three
times the memory traffic of reading it, so a decoding sequence keeps a row here: filled from its
pages once, then extended by one token a step. Rows are always 0 to B - 1; a sequence that ends
costs one refill, of the row that moves into its place. Pages that the whole batch shares are left
out. Used by `attention_torch.py`; which sequence is where is decided once a step, by `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeserve.layers.attention import Array, AttentionShape, HostBatch

# Columns added beyond what is needed, so that a growing batch is refilled once in so many steps.
_HEADROOM_TOKENS = 128
# The batch may come to share this many more pages before rows are refilled without them.
_SLACK_PAGES = 8


@dataclass(frozen=True)
class RowPlan:
    """Where a step's decoding sequences are.

    Attributes:
        order: [B] int64, batch index of the sequence in each row; None where they are equal.
        rows: [B] int64, row of each sequence, in batch order.
        columns: [B] int64, column of each sequence's new token.
        num_columns: Columns in use, over all rows.
        num_rows: Allocated rows.
        width: Allocated columns.
        fill_rows: [F] int64, rows to be copied from pages first; None if none.
        fill_pages: [F * n] int64, their pages.
    """

    order: Tensor | None
    rows: Tensor
    columns: Tensor
    num_columns: int
    num_rows: int
    width: int
    fill_rows: Tensor | None
    fill_pages: Tensor | None


class DecodeRows:
    """Row assignment for all layers, and each layer's storage."""

    def __init__(self, shape: AttentionShape, page_size: int) -> None:
        self.shape = shape
        self.page_size = page_size
        self.max_bytes = 0
        self.num_layers = 0
        self.num_shared_pages = 0
        self._ids: list[int] = []
        self._row_of: dict[int, int] = {}
        self._row_list: list[int] = []
        self._num_rows = 0
        self._width = 0
        self._storage: dict[int, Tensor] = {}

    def forget(self) -> None:
        """The rows no longer follow the sequences; the next plan fills all of them."""
        self._ids = []
        self._row_of = {}

    def clear(self) -> None:
        """Drop all content, because some of it may be NaN."""
        self.forget()
        self._storage = {}

    def shared_pages(self, num_shared: int) -> int:
        """Leading pages left out of the rows, given that the batch has `num_shared` in common."""
        current = self.num_shared_pages
        if not self._ids or num_shared < current or num_shared > current + _SLACK_PAGES:
            self.num_shared_pages = num_shared
            if num_shared != current:
                self.forget()
        return self.num_shared_pages

    def plan(self, host: HostBatch, num_shared: int) -> RowPlan | None:
        """Assign rows; None where they would take more memory than allowed.

        Args:
            host: The step; its first `num_decodes` sequences decode.
            num_shared: What `shared_pages` returned for it.
        """
        B = host.num_decodes
        columns = host.seq_lens[:B] - 1 - num_shared * self.page_size
        num_columns = int(columns.max()) + 1
        if not self._reserve(B, num_columns):
            self.forget()
            return None
        ids = host.seq_ids[:B].tolist()
        fills: list[int] = [] if ids == self._ids else self._assign(ids)
        rows = np.array(self._row_list, dtype=np.int64)
        order = None
        if self._row_list != list(range(B)):
            order = torch.from_numpy(rows.argsort())
        fill_rows = fill_pages = None
        if fills:
            num_pages = -(-int(host.seq_lens[fills].max()) // self.page_size)
            pages = host.block_table[fills, num_shared:num_pages].astype(np.int64)
            fill_rows = torch.from_numpy(rows[fills])
            fill_pages = torch.from_numpy(pages.reshape(-1))
        return RowPlan(
            order=order,
            rows=torch.from_numpy(rows),
            columns=torch.from_numpy(columns),
            num_columns=num_columns,
            num_rows=self._num_rows,
            width=self._width,
            fill_rows=fill_rows,
            fill_pages=fill_pages,
        )

    def _reserve(self, num_rows: int, num_columns: int) -> bool:
        """Make room; growing means that everything is filled again."""
        if num_rows <= self._num_rows and num_columns <= self._width:
            return True
        rows = max(self._num_rows, -(-num_rows // 8) * 8)
        width = self._width
        if num_columns > width:
            tokens = num_columns + _HEADROOM_TOKENS
            width = -(-tokens // self.page_size) * self.page_size
        if rows * width * self._token_bytes() * self.num_layers > self.max_bytes:
            return False
        self._num_rows, self._width = rows, width
        self.clear()
        return True

    def _token_bytes(self) -> int:
        shape = self.shape
        return 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize

    def _assign(self, ids: list[int]) -> list[int]:
        """Give every sequence a row below B; returns batch indices of rows to be filled."""
        B = len(ids)
        old = self._row_of
        rows = [old.get(i, B) for i in ids]
        taken = {row for row in rows if row < B}
        free = iter([row for row in range(B) if row not in taken])
        fills = []
        for index, row in enumerate(rows):
            if row >= B:
                rows[index] = next(free)
                fills.append(index)
        self._ids = ids
        self._row_list = rows
        self._row_of = dict(zip(ids, rows, strict=True))
        return fills

    def update(self, kv: Tensor, cache: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """Bring one layer's rows up to date and return them.

        Args:
            kv: [B, 2 * num_kv_heads, D] of the new tokens.
            cache: The layer's paged cache, the new tokens included.
            plan: Of the step.

        Returns:
            Keys and values, each [B * num_kv_heads, num_columns, D], views of the storage.
        """
        B, heads, D = kv.shape
        kv_heads = heads // 2
        storage = self._layer(cache, plan)
        if plan.fill_rows is not None and plan.fill_pages is not None:
            by_page = cache.view(heads, -1, self.page_size * D)
            pages = by_page.index_select(1, plan.fill_pages)
            filled = pages.view(2, kv_heads, len(plan.fill_rows), -1, D).transpose(1, 2)
            storage[:, :, :, : filled.shape[3]].index_copy_(1, plan.fill_rows, filled)
        by_token = storage.permute(1, 3, 0, 2, 4)
        by_token.index_put_((plan.rows, plan.columns), kv.view(B, 2, kv_heads, D))
        dense = storage.view(2, plan.num_rows * kv_heads, plan.width, D)
        dense = dense[:, : B * kv_heads, : plan.num_columns]
        return dense[0], dense[1]

    def _layer(self, cache: Tensor, plan: RowPlan) -> Tensor:
        """Storage [2, rows, num_kv_heads, width, D] of the layer with this cache."""
        key = cache.data_ptr()
        storage = self._storage.get(key)
        if storage is None:
            shape = self.shape
            size = (2, plan.num_rows, shape.num_kv_heads, plan.width, shape.head_dim)
            storage = self._storage[key] = lazy_zeros(size, shape.dtype)
        return storage


def lazy_zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory before they are used, which torch's own do not offer."""
    count = int(np.prod(size))
    raw: Array = np.zeros(count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)
