"""One step as flat tensors: `ForwardBatch`, the only thing a forward pass is told.

Receives the scheduler's `StepPlan` and its block table; returns a frozen `ForwardBatch` that is
passed to every `forward`. How attention wants its inputs arranged is decided by the attention
backend's `plan`, called here once a step. The numbers are built with numpy, without a loop over
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moeserve.engine.scheduler import StepPlan
from moeserve.layers.attention import Array, AttentionBackend, HostBatch


@dataclass(frozen=True)
class SharedStep:
    """What DP ranks that share experts know of each other's step.

    Attributes:
        num_tokens: T of each.
        is_decode_only: No rank has a prompt: all may replay a graph, of one size.
    """

    num_tokens: tuple[int, ...]
    is_decode_only: bool


@dataclass(frozen=True)
class ForwardBatch:
    """Inputs of one forward pass over T tokens of B sequences; decoding sequences come first.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, place of each token in its sequence.
        slot_mapping: [T] int64, KV slot of each token: page * page_size + offset.
        logits_rows: [R] int64, rows whose logits are wanted.
        num_decodes: Leading rows that belong to sequences with one token each.
        num_padding_tokens: Rows at the end that belong to nobody.
        attention: What the attention backend's `plan` returned for this step.
        last_tokens: [max_num_seqs] int32 where a step may begin before the host knows the last
            one's tokens: a token id of -1 - r then stands for `last_tokens[r]`.
        dp_num_tokens: T of every DP rank, where experts are spread over them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_rows: torch.Tensor
    num_decodes: int
    num_padding_tokens: int
    attention: object
    last_tokens: torch.Tensor | None = None
    dp_num_tokens: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.token_ids.shape[0]


def host_batch(plan: StepPlan, block_table: Array, page_size: int) -> HostBatch:
    """Arrange a plan as numpy arrays.

    Args:
        plan: Who runs, how many tokens of each.
        block_table: [max_num_seqs, P] int32 of the scheduler.
        page_size: Tokens a page.
    """
    decodes, prefills = plan.decodes, plan.prefills
    rows = np.array([s.row for s in decodes] + [s.row for s, _ in prefills], dtype=np.int64)
    starts = [s.num_computed for s in decodes]
    token_ids = [s.tokens[-1] for s in decodes]
    counts = [1] * len(decodes)
    ids = [s.admission for s in decodes]
    for seq, count in prefills:
        starts.append(seq.num_computed)
        counts.append(count)
        ids.append(seq.admission)
        token_ids += seq.tokens[seq.num_computed : seq.num_computed + count]
    start = np.array(starts, dtype=np.int64)
    count_array = np.array(counts, dtype=np.int64)
    seq_lens = start + count_array
    cu_seqlens_q = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(count_array, out=cu_seqlens_q[1:])
    if prefills:
        first = np.repeat(start - cu_seqlens_q[:-1], count_array)
        positions = first + np.arange(cu_seqlens_q[-1])
        token_rows = np.repeat(rows, count_array)
    else:
        positions, token_rows = start, rows
    pages = block_table[token_rows, positions // page_size]
    return HostBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=pages * np.int64(page_size) + positions % page_size,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=block_table[:, : -(-int(seq_lens.max()) // page_size)][rows],
        seq_ids=np.array(ids, dtype=np.int64),
        num_decodes=len(decodes),
        page_size=page_size,
    )


def logits_rows(plan: StepPlan, cu_seqlens_q: Array) -> Array:
    """Last row [R] of every sequence of `plan.sampled`, in that order."""
    rows = list(range(len(plan.decodes)))
    for i, (seq, count) in enumerate(plan.prefills, start=len(plan.decodes)):
        if plan.yields_token(seq, count):
            rows.append(int(cu_seqlens_q[i + 1]) - 1)
    return np.array(rows, dtype=np.int64)


def forward_batch(
    plan: StepPlan,
    block_table: Array,
    backend: AttentionBackend,
    device: torch.device,
    dp_num_tokens: tuple[int, ...] | None = None,
) -> ForwardBatch:
    """Build the step's `ForwardBatch` on `device`."""
    host = host_batch(plan, block_table, backend.page_size)

    def to_device(array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=to_device(host.token_ids),
        positions=to_device(host.positions),
        slot_mapping=to_device(host.slot_mapping),
        logits_rows=to_device(logits_rows(plan, host.cu_seqlens_q)),
        num_decodes=host.num_decodes,
        num_padding_tokens=0,
        attention=backend.plan(host),
        dp_num_tokens=dp_num_tokens,
    )
