"""Paged attention in plain torch, for CPUs.

The cache of a layer is [2 * num_kv_heads, slots, head_dim]: all keys and values of a head lie
together, so that gathered pages are ready for a batched product without another copy. Decoding
sequences are one padded batch; the pages that all of them share, as the examples of an evaluation
are, are read once. Each prompt chunk is a call of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.layers.attention import Array, Attention, AttentionShape, HostBatch
from moeserve.layers.decode_rows import DecodeRows, RowPlan, lazy_zeros

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch

DEFAULT_PAGE_SIZE = 16
# Below this many saved token reads a shared prefix is not worth its own product.
_MIN_SHARED_READS = 64


@dataclass(frozen=True)
class PageRun:
    """Pages in reading order: consecutive ones are a slice, others are gathered.

    Attributes:
        first_slot: First KV slot where the pages are consecutive.
        num_slots: Slots in all.
        pages: [n] int64 where they are not, else None.
    """

    first_slot: int
    num_slots: int
    pages: Tensor | None


@dataclass(frozen=True)
class DecodePlan:
    """Sequences with one query token.

    Attributes:
        shared: Leading pages that all of them have in common; no slots if none.
        rows: Where the rest of each lies as a dense row; None where it is read from pages.
        rest: The other pages of each, B times the same number, padded with page 0.
        mask: [B, 1, 1, L_rest], 0 or -inf; None where nothing is padding.
    """

    shared: PageRun
    rows: RowPlan | None
    rest: PageRun
    mask: Tensor | None


@dataclass(frozen=True)
class PrefillPlan:
    """One prompt chunk.

    Attributes:
        start: First row.
        stop: Row after the last.
        pages: Everything up to the chunk's end.
        length: Tokens up to the chunk's end.
        mask: [rows, length] bool, None where the chunk is the whole sequence so far.
    """

    start: int
    stop: int
    pages: PageRun
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class TorchPlan:
    """What `TorchPagedAttention` needs of a step."""

    decode: DecodePlan | None
    prefills: tuple[PrefillPlan, ...]


def _page_run(pages: Array, page_size: int) -> PageRun:
    num_slots = len(pages) * page_size
    if len(pages) == 0 or bool((pages[1:] == pages[:-1] + 1).all()):
        first = int(pages[0]) * page_size if len(pages) else 0
        return PageRun(first, num_slots, None)
    return PageRun(0, num_slots, torch.from_numpy(pages.astype(np.int64)))


def num_shared_pages(table: Array, max_full_pages: int) -> int:
    """Leading columns [B, P] that are the same in every row."""
    if len(table) < 2 or max_full_pages == 0:
        return 0
    is_same = (table[:, :max_full_pages] == table[0, :max_full_pages]).all(axis=0)
    return max_full_pages if is_same.all() else int(is_same.argmin())


class TorchPagedAttention:
    """The attention backend for CPUs; see `AttentionBackend`."""

    name = "torch"
    is_fused = False
    takes_qkv = False

    def __init__(
        self, shape: AttentionShape, page_size: int = DEFAULT_PAGE_SIZE, reason: str = ""
    ) -> None:
        self.shape = shape
        self.page_size = page_size
        self.reason = reason
        self.scale = shape.head_dim**-0.5
        self.rows = DecodeRows(shape, page_size)
        self._workspace = torch.empty(0, dtype=shape.dtype)

    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        shape = self.shape
        return 2 * shape.num_kv_heads * shape.head_dim * self.page_size * shape.dtype.itemsize

    def allocate(self, num_pages: int) -> Tensor:
        """A zeroed cache [2 * num_kv_heads, num_pages * page_size, head_dim]."""
        shape = self.shape
        slots = num_pages * self.page_size
        self.rows.num_layers += 1
        self.rows.max_bytes += num_pages * self.page_bytes()
        return lazy_zeros((2 * shape.num_kv_heads, slots, shape.head_dim), shape.dtype)

    def clear(self, cache: Tensor, pages: list[int]) -> None:
        """Zero pages that hold bad values."""
        by_page = cache.view(cache.shape[0], -1, self.page_size, self.shape.head_dim)
        by_page.index_fill_(1, torch.tensor(pages, dtype=torch.int64), 0.0)
        self.rows.clear()

    def plan(self, host: HostBatch) -> TorchPlan:
        """Arrange a step's pages."""
        decode = self._plan_decode(host) if host.num_decodes else None
        prefills = tuple(
            self._plan_prefill(host, i) for i in range(host.num_decodes, len(host.seq_lens))
        )
        return TorchPlan(decode, prefills)

    def _plan_decode(self, host: HostBatch) -> DecodePlan:
        page_size, num_seqs = self.page_size, host.num_decodes
        lengths = host.seq_lens[:num_seqs]
        num_pages = -(-int(lengths.max()) // page_size)
        table = host.block_table[:num_seqs, :num_pages]
        num_shared = num_shared_pages(table, int(lengths.min() - 1) // page_size)
        if num_shared * page_size * (num_seqs - 1) < _MIN_SHARED_READS:
            num_shared = 0
        rows = None
        if num_seqs == 1:
            # Its pages are mostly consecutive and then read in place.
            self.rows.forget()
        else:
            num_shared = self.rows.shared_pages(num_shared)
            rows = self.rows.plan(host, num_shared)
        rest = _page_run(table[:, num_shared:].reshape(-1), page_size)
        width = rows.num_columns if rows else (num_pages - num_shared) * page_size
        rest_lengths = lengths - num_shared * page_size
        mask = None
        if int(rest_lengths.min()) < width:
            if rows is not None and rows.order is not None:
                rest_lengths = rest_lengths[rows.order.numpy()]
            is_padding = np.arange(width) >= rest_lengths[:, None]
            numbers = np.where(is_padding, np.float32("-inf"), np.float32(0))
            mask = torch.from_numpy(numbers).to(self.shape.dtype).view(num_seqs, 1, 1, width)
        return DecodePlan(_page_run(table[0, :num_shared], page_size), rows, rest, mask)

    def _plan_prefill(self, host: HostBatch, index: int) -> PrefillPlan:
        start, stop = int(host.cu_seqlens_q[index]), int(host.cu_seqlens_q[index + 1])
        length = int(host.seq_lens[index])
        num_pages = -(-length // self.page_size)
        mask = None
        if length > stop - start:
            mask = torch.ones(stop - start, length, dtype=torch.bool).tril(length - (stop - start))
        pages = _page_run(host.block_table[index, :num_pages], self.page_size)
        return PrefillPlan(start, stop, pages, length, mask)

    def forward(self, q: Tensor, kv: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Write the step's keys and values, then attend; see `AttentionBackend.forward`."""
        plan = batch.attention
        assert isinstance(plan, TorchPlan)
        cache.index_copy_(1, batch.slot_mapping, kv.transpose(0, 1))
        count = batch.num_decodes
        if plan.decode is not None and not plan.prefills:
            return self._decode(q, kv, cache, plan.decode)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if plan.decode is not None:
            out[:count] = self._decode(q[:count], kv[:count], cache, plan.decode)
        for chunk in plan.prefills:
            rows = slice(chunk.start, chunk.stop)
            out[rows] = self._prefill(q[rows], cache, chunk)
        return out

    def forward_fused(
        self,
        qkv: Tensor,
        layer: Attention,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Not this backend's form."""
        raise NotImplementedError("attention backend 'torch' takes queries and keys apart")

    def _read(self, cache: Tensor, run: PageRun) -> Tensor:
        """Keys and values [2 * num_kv_heads, slots, head_dim] of a run; valid to the next call."""
        if run.pages is None:
            return cache[:, run.first_slot : run.first_slot + run.num_slots]
        heads, _, head_dim = cache.shape
        wanted = heads * run.num_slots * head_dim
        if self._workspace.numel() < wanted:
            # Grown, never shrunk: fresh memory for each gather costs more than the gather.
            self._workspace = torch.empty(wanted * 5 // 4, dtype=cache.dtype)
        out = self._workspace[:wanted].view(heads, len(run.pages), self.page_size * head_dim)
        torch.index_select(cache.view(heads, -1, self.page_size * head_dim), 1, run.pages, out=out)
        return out.view(heads, run.num_slots, head_dim)

    def _decode(self, q: Tensor, kv: Tensor, cache: Tensor, plan: DecodePlan) -> Tensor:
        """One token of each of B sequences: q [B, num_heads, D] -> [B, num_heads * D]."""
        B, num_heads, D = q.shape
        kv_heads = self.shape.num_kv_heads
        order = None
        if plan.rows is not None:
            keys, values = self.rows.update(kv, cache, plan.rows)
            order = plan.rows.order
        else:
            rest = self._read(cache, plan.rest).view(2, kv_heads, B, -1, D).transpose(1, 2)
            keys, values = rest.reshape(2, B * kv_heads, -1, D).unbind(0)
        queries = q * self.scale
        if order is not None:
            queries = queries.index_select(0, order)
        # [B * kv_heads, group, D]: the query heads that share a key head are one product.
        queries = queries.view(B * kv_heads, -1, D)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        if plan.mask is not None:
            scores.view(B, kv_heads, -1, scores.shape[2]).add_(plan.mask)
        if plan.shared.num_slots:
            out = self._with_shared(scores, values, queries, self._read(cache, plan.shared))
        else:
            out = torch.bmm(scores.softmax(-1), values)
        out = out.view(B, num_heads * D)
        if order is not None and plan.rows is not None:
            out = out.index_select(0, plan.rows.rows)
        return out

    def _with_shared(
        self, scores: Tensor, values: Tensor, queries: Tensor, shared: Tensor
    ) -> Tensor:
        """Attention over the shared prefix and over each sequence's own part, merged exactly.

        The two softmaxes are joined by their log-sum-exp, so the prefix's scores, most of them
        all, are never written out.
        """
        kv_heads, D = self.shape.num_kv_heads, queries.shape[2]
        group = queries.shape[1]
        by_head = queries.view(-1, kv_heads, group, D).transpose(0, 1).reshape(kv_heads, -1, D)
        # The one torch operator for CPUs that returns the log-sum-exp beside the output.
        prefix, prefix_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            by_head.unsqueeze(0), shared[None, :kv_heads], shared[None, kv_heads:], scale=1.0
        )
        own = torch.bmm(scores.softmax(-1), values)
        own_lse = scores.float().logsumexp(-1).view(-1, kv_heads, group)
        share = (prefix_lse.view(kv_heads, -1, group).transpose(0, 1) - own_lse).sigmoid()
        prefix = prefix.view(kv_heads, -1, group, D).transpose(0, 1)
        merged = torch.lerp(own.view(prefix.shape), prefix, share.to(own.dtype).unsqueeze(-1))
        return merged.reshape(queries.shape)

    def _prefill(self, q: Tensor, cache: Tensor, chunk: PrefillPlan) -> Tensor:
        """A prompt chunk: q [rows, num_heads, D] -> [rows, num_heads * D]."""
        kv_heads = self.shape.num_kv_heads
        kv = self._read(cache, chunk.pages)[:, : chunk.length].unsqueeze(0)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            kv[:, :kv_heads],
            kv[:, kv_heads:],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None and q.shape[0] > 1,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1)
