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

from moeserve.layers.attention import Array, AttentionShape, HostBatch

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
        rest: The other pages of each, B times the same number, padded with page 0.
        mask: [B, 1, L_rest], 0 or -inf; None where nothing is padding.
    """

    shared: PageRun
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


def _num_shared_pages(table: Array, max_full_pages: int) -> int:
    """Leading columns [B, P] that are the same in every row."""
    if len(table) < 2 or max_full_pages == 0:
        return 0
    is_same = (table[:, :max_full_pages] == table[0, :max_full_pages]).all(axis=0)
    return max_full_pages if is_same.all() else int(is_same.argmin())


class TorchPagedAttention:
    """The attention backend for CPUs; see `AttentionBackend`."""

    name = "torch"

    def __init__(self, shape: AttentionShape, page_size: int = DEFAULT_PAGE_SIZE) -> None:
        self.shape = shape
        self.page_size = page_size
        self.scale = shape.head_dim**-0.5
        self._workspace = torch.empty(0, dtype=shape.dtype)

    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        shape = self.shape
        return 2 * shape.num_kv_heads * shape.head_dim * self.page_size * shape.dtype.itemsize

    def allocate(self, num_pages: int) -> Tensor:
        """A zeroed cache [2 * num_kv_heads, num_pages * page_size, head_dim]."""
        shape = self.shape
        slots = num_pages * self.page_size
        size = 2 * shape.num_kv_heads * slots * shape.head_dim
        # numpy's zeros are not touched until they are used, so a large cache costs no start-up.
        raw = torch.from_numpy(np.zeros(size * shape.dtype.itemsize, dtype=np.uint8))
        return raw.view(shape.dtype).view(2 * shape.num_kv_heads, slots, shape.head_dim)

    def clear(self, cache: Tensor, pages: list[int]) -> None:
        """Zero pages that hold bad values."""
        by_page = cache.view(cache.shape[0], -1, self.page_size, self.shape.head_dim)
        by_page.index_fill_(1, torch.tensor(pages), 0.0)

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
        num_shared = _num_shared_pages(table, int(lengths.min() - 1) // page_size)
        if num_shared * page_size * (num_seqs - 1) < _MIN_SHARED_READS:
            num_shared = 0
        rest_lengths = lengths - num_shared * page_size
        width = (num_pages - num_shared) * page_size
        mask = None
        if int(rest_lengths.min()) < width:
            is_padding = np.arange(width) >= rest_lengths[:, None]
            numbers = np.where(is_padding, np.float32("-inf"), np.float32(0))
            mask = torch.from_numpy(numbers).to(self.shape.dtype).unsqueeze(1)
        return DecodePlan(
            shared=_page_run(table[0, :num_shared], page_size),
            rest=_page_run(table[:, num_shared:].reshape(-1), page_size),
            mask=mask,
        )

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
        num_decodes = batch.num_decodes
        if plan.decode is not None and not plan.prefills:
            return self._decode(q, cache, plan.decode)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if plan.decode is not None:
            out[:num_decodes] = self._decode(q[:num_decodes], cache, plan.decode)
        for chunk in plan.prefills:
            rows = slice(chunk.start, chunk.stop)
            out[rows] = self._prefill(q[rows], cache, chunk)
        return out

    def _read(self, cache: Tensor, run: PageRun) -> Tensor:
        """Keys and values [2 * num_kv_heads, slots, head_dim] of the pages of a run."""
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

    def _decode(self, q: Tensor, cache: Tensor, plan: DecodePlan) -> Tensor:
        """One token of each of B sequences: q [B, num_heads, D] -> [B, num_heads * D]."""
        B, num_heads, D = q.shape
        kv_heads = self.shape.num_kv_heads
        group = num_heads // kv_heads
        # [kv_heads, B, group, D]: queries of the same key head side by side.
        grouped = (q * self.scale).view(B, kv_heads, group, D).transpose(0, 1)
        rest = self._read(cache, plan.rest)
        keys = rest[:kv_heads].reshape(kv_heads * B, -1, D)
        values = rest[kv_heads:].reshape(kv_heads * B, -1, D)
        queries = grouped.reshape(kv_heads * B, group, D)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        if plan.mask is not None:
            scores.view(kv_heads, B, group, -1).add_(plan.mask)
        if not plan.shared.num_slots:
            out = torch.bmm(scores.softmax(-1), values)
        else:
            out = self._with_shared(scores, values, queries, self._read_shared(cache, plan))
        return out.view(kv_heads, B, group * D).transpose(0, 1).reshape(B, num_heads * D)

    def _read_shared(self, cache: Tensor, plan: DecodePlan) -> Tensor:
        run = plan.shared
        if run.pages is None:
            return self._read(cache, run)
        heads, _, head_dim = cache.shape
        by_page = cache.view(heads, -1, self.page_size * head_dim)
        return by_page.index_select(1, run.pages).view(heads, run.num_slots, head_dim)

    def _with_shared(
        self, scores: Tensor, values: Tensor, queries: Tensor, shared: Tensor
    ) -> Tensor:
        """One softmax over the shared prefix and each sequence's own part."""
        kv_heads, num_slots, D = self.shape.num_kv_heads, shared.shape[1], shared.shape[2]
        by_head = queries.view(kv_heads, -1, D)
        prefix_scores = torch.bmm(by_head, shared[:kv_heads].transpose(1, 2))
        both = torch.cat((prefix_scores.view(scores.shape[0], -1, num_slots), scores), dim=-1)
        weights = both.softmax(-1)
        own = torch.bmm(weights[..., num_slots:], values)
        prefix_weights = weights[..., :num_slots].reshape(kv_heads, -1, num_slots)
        return own + torch.bmm(prefix_weights, shared[kv_heads:]).view(own.shape)

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
