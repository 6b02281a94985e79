"""Paged attention by this project's own Triton kernels: the backend for GPUs.

The cache of a layer is [pages, 2, num_kv_heads, page_size, head_dim], keys first. A step's numbers
travel as one int32 buffer (`layers/step_inputs.py`), so that a captured graph finds them at fixed
places; this file says which kernels run on them. Decode rows come first: few of them are cut over
their keys, many are a program each, and a prefix that most of them share is read once for all.
Which pages are common is found here, on the host. `attention_torch.py` is the one for CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moeserve.errors import Unsupported, UsageError
from moeserve.layers.attention import Array, Attention, AttentionShape, HostBatch
from moeserve.layers.step_inputs import StepSizes, StepViews, pack
from moeserve.triton_kernels import attention_decode, attention_rows
from moeserve.triton_kernels.attention_decode import NewTokens
from moeserve.triton_kernels.attention_rows import Pages, RowsTile, SharedState
from moeserve.triton_kernels.rope import Heads, RopeTables, rope_and_store

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch

DEFAULT_PAGE_SIZE = 64
# A prefix is taken apart from the rest only where it saves this many token reads a step.
MIN_SHARED_READS = 4096
MIN_SHARED_SEQS = 4


@dataclass(frozen=True)
class SharedPrefix:
    """A prefix that most decoding sequences have in common; no tokens where there is none.

    Attributes:
        num_tokens: A multiple of the page size.
        line: A sequence that has it.
        begins: [B] int32, `num_tokens` for sequences that have it, 0 for the others.
    """

    num_tokens: int
    line: int
    begins: Array


@dataclass(frozen=True)
class TritonPlan:
    """What the kernels of a step read.

    Attributes:
        views: The step's numbers on the device.
        num_decodes: Leading rows with one token each, padding included.
        num_items: Blocks of prompt tokens.
        has_shared: A prefix is taken apart.
    """

    views: StepViews
    num_decodes: int
    num_items: int
    has_shared: bool


class TritonPagedAttention:
    """See `AttentionBackend`."""

    name = "triton"
    is_fused = True
    takes_qkv = True

    def __init__(
        self,
        shape: AttentionShape,
        page_size: int,
        device: torch.device,
        *,
        is_deterministic: bool,
        reason: str = "",
    ) -> None:
        if shape.head_dim < 16 or shape.head_dim & (shape.head_dim - 1):
            raise Unsupported(
                f"attention backend 'triton': head_dim={shape.head_dim} is no power of two from 16"
            )
        page_size = page_size or DEFAULT_PAGE_SIZE
        if page_size < 16 or page_size & (page_size - 1):
            raise UsageError(
                f"page_size={page_size}: attention backend 'triton' wants a power of two from 16"
            )
        self.shape = shape
        self.page_size = page_size
        self.device = device
        self.reason = reason
        self.is_deterministic = is_deterministic
        self.heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, page_size)
        group = shape.num_heads // shape.num_kv_heads
        least_m = max(16, 1 << (group - 1).bit_length())
        # Half a page at a time and few warps: programs enough on each multiprocessor (H200).
        self.decode_tile = self._tile(least_m, 2, 4, most_n=32)
        self.split_tile = self._tile(least_m, 4, 2)
        self.prefill_tile = self._tile(max(128, least_m), 8, 3)
        self.shared_tile = self._tile(max(64, least_m), 4, 3)
        if is_deterministic:
            # One tile for everything, so that a row has the same bits whoever computes it.
            fixed = self._tile(max(64, least_m), 4, 3)
            self.decode_tile = self.prefill_tile = self.shared_tile = fixed
        self.block_tokens = self.prefill_tile.block_m // group
        self._tickets = torch.zeros(
            attention_decode.num_tickets(self.heads), dtype=torch.int32, device=device
        )

    def _tile(self, block_m: int, num_warps: int, num_stages: int, most_n: int = 64) -> RowsTile:
        """A tile whose keys are a part of one page; float32 takes twice the room."""
        if self.shape.dtype.itemsize > 2:
            block_m, most_n, num_stages = min(block_m, 64), min(most_n, 32), 3
        return RowsTile(block_m, min(most_n, self.page_size), num_warps, num_stages)

    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        shape = self.shape
        return 2 * shape.num_kv_heads * shape.head_dim * self.page_size * shape.dtype.itemsize

    def allocate(self, num_pages: int) -> Tensor:
        """A zeroed cache of one layer."""
        shape = self.shape
        size = (num_pages, 2, shape.num_kv_heads, self.page_size, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=self.device)

    def clear(self, cache: Tensor, pages: list[int]) -> None:
        """Zero pages that hold bad values."""
        if pages:
            cache.index_fill_(0, torch.tensor(pages, dtype=torch.int64, device=cache.device), 0.0)

    def sizes(self, host: HostBatch, num_sampled: int) -> StepSizes:
        """Room that a step's numbers take, without padding."""
        counts = np.diff(host.cu_seqlens_q[host.num_decodes :])
        return StepSizes(
            num_tokens=len(host.token_ids),
            num_sampled=num_sampled,
            num_decodes=host.num_decodes,
            num_items=int((-(-counts // self.block_tokens)).sum()) if len(counts) else 0,
        )

    def plan(self, host: HostBatch) -> TritonPlan:
        """Arrange a step that is run once; its numbers are copied to the device."""
        sizes = self.sizes(host, 0)
        shared = find_shared_prefix(host)
        numbers = np.zeros(sizes.capacity(host.block_table.shape), dtype=np.int32)
        used = pack(host, sizes, shared, self.block_tokens, numbers)
        views = StepViews(torch.from_numpy(numbers[:used]).to(self.device), sizes)
        return self.plan_of(views, sizes, shared.num_tokens > 0)

    def plan_of(self, views: StepViews, sizes: StepSizes, has_shared: bool) -> TritonPlan:
        """The plan over numbers that are on the device already."""
        return TritonPlan(views, sizes.num_decodes, sizes.num_items, has_shared)

    def prepare(
        self, host: HostBatch, sizes: StepSizes, *, has_shared: bool, in_graph: bool
    ) -> None:
        """Ready a step before it is launched: nothing here, the kernels read its numbers.

        Args:
            host: The step.
            sizes: With padding.
            has_shared: A prefix is taken apart.
            in_graph: It is run by the captured graph of `sizes.num_decodes` rows.
        """

    def prepare_capture(self, size: int, max_pages: int) -> None:
        """Ready the capture of a graph of `size` rows of at most `max_pages` pages: nothing."""

    def forward(self, q: Tensor, kv: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Not this backend's form."""
        raise NotImplementedError("attention backend 'triton' takes the fused projection")

    def forward_fused(
        self,
        qkv: Tensor,
        layer: Attention,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Norm, rotation, cache write, attention; see `AttentionBackend.forward_fused`."""
        plan = batch.attention
        assert isinstance(plan, TritonPlan)
        views = plan.views
        norm = None if layer.norm_eps is None else (layer.qk_norm_weight, layer.norm_eps)
        pages = Pages(layer.cache, views.table, views.positions, views.meta)
        width, T = self.heads.NQ * self.heads.D, qkv.shape[0]
        out = torch.empty(T, width, dtype=layer.cache.dtype, device=self.device)
        # Rows whose norm, rotation and cache write are a part of their attention.
        first = 0 if self.is_deterministic or plan.has_shared else plan.num_decodes
        if first:
            splits = attention_decode.num_splits(first, self.heads)
            attention_decode.attend_new_tokens(
                qkv, out, first, NewTokens(norm, RopeTables(*rope), views.slots), pages,
                self.heads, self.split_tile if splits > 1 else self.decode_tile, self._tickets,
            )  # fmt: skip
        if first == T:
            return out
        rope_and_store(
            qkv, norm, RopeTables(*rope), (views.positions, views.slots), layer.cache, self.heads,
            first,
        )  # fmt: skip
        if plan.num_decodes > first:
            self._decode(qkv, out, plan, pages)
        if plan.num_items:
            attention_rows.prefill_rows(
                qkv, out, views.items, plan.num_items, pages, self.heads, self.prefill_tile,
                is_fixed=self.is_deterministic,
            )  # fmt: skip
        return out

    def _decode(self, q: Tensor, out: Tensor, plan: TritonPlan, pages: Pages) -> None:
        heads, B, is_fixed = self.heads, plan.num_decodes, self.is_deterministic
        state = None
        if plan.has_shared:
            state = SharedState(
                plan.views.begins,
                torch.empty(B, heads.NQ, heads.D, dtype=torch.float32, device=q.device),
                torch.empty(B, heads.NQ, 2, dtype=torch.float32, device=q.device),
            )
            attention_rows.shared_prefix(
                q, state, B, pages, heads, self.shared_tile, is_fixed=is_fixed
            )
        attention_rows.decode_rows(
            q, out, B, pages, heads, self.decode_tile, state=state, is_fixed=is_fixed
        )


def no_shared_prefix(host: HostBatch) -> SharedPrefix:
    """Nothing is taken apart."""
    return SharedPrefix(0, 0, np.zeros(host.num_decodes, dtype=np.int32))


def find_shared_prefix(host: HostBatch) -> SharedPrefix:
    """The leading pages whose single reading saves most, over the decoding sequences.

    Sequences are compared with one of them, the one in the middle: with a prefix common to most,
    it has it most of the time.
    """
    B, page_size = host.num_decodes, host.page_size
    none = no_shared_prefix(host)
    if B < MIN_SHARED_SEQS:
        return none
    line = B // 2
    # The page of the new token is never taken apart: it is written in this step.
    own_pages = (host.seq_lens[:B] - 1) // page_size
    table = host.block_table[:B, : int(own_pages[line])]
    if table.shape[1] == 0:
        return none
    is_same = table == table[line]
    lengths = np.where(is_same.all(axis=1), table.shape[1], is_same.argmin(axis=1))
    lengths = np.minimum(lengths, own_pages)
    ordered = np.sort(lengths)[::-1]
    # With the i + 1 sequences of longest common prefix, ordered[i] pages are read once.
    saved = ordered * np.arange(B)
    best = int(saved.argmax())
    num_pages = int(ordered[best])
    if best + 1 < MIN_SHARED_SEQS or int(saved[best]) * page_size < MIN_SHARED_READS:
        return none
    tokens = num_pages * page_size
    return SharedPrefix(tokens, line, np.where(lengths >= num_pages, tokens, 0).astype(np.int32))
