from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.engine.batch import ForwardBatch
from moeserve.layers.attention import AttentionShape, HostBatch
from moeserve.layers.attention_torch import TorchPagedAttention

PAGE = 4
NUM_PAGES = 200


class Sequences:
    """Sequences with known keys and values, and the pages that hold them."""

    def __init__(self, shape: AttentionShape, seed: int = 0) -> None:
        self.shape = shape
        self.random = torch.Generator().manual_seed(seed)
        order = torch.randperm(NUM_PAGES - 1, generator=self.random) + 1
        self.free = order.tolist()
        self.kv: dict[int, torch.Tensor] = {}
        self.pages: dict[int, list[int]] = {}

    def tensor(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random).to(self.shape.dtype)

    def add(self, name: int, like: int | None = None, shared_pages: int = 0) -> None:
        self.kv[name] = self.tensor(0, 2 * self.shape.num_kv_heads, self.shape.head_dim)
        self.pages[name] = []
        if like is not None:
            self.kv[name] = self.kv[like][: shared_pages * PAGE]
            self.pages[name] = self.pages[like][:shared_pages]

    def step(
        self, backend: TorchPagedAttention, cache: torch.Tensor, counts: dict[int, int]
    ) -> float:
        """Run one step of so many new tokens each (decodes first); returns the relative error."""
        starts = {name: len(self.kv[name]) for name in counts}
        for name, count in counts.items():
            new = self.tensor(count, 2 * self.shape.num_kv_heads, self.shape.head_dim)
            self.kv[name] = torch.cat((self.kv[name], new))
            while len(self.pages[name]) * PAGE < len(self.kv[name]):
                self.pages[name].append(self.free.pop())
        table = np.zeros((len(counts), 60), dtype=np.int32)
        slots, positions = [], []
        for row, (name, count) in enumerate(counts.items()):
            table[row, : len(self.pages[name])] = self.pages[name]
            for position in range(starts[name], starts[name] + count):
                positions.append(position)
                slots.append(self.pages[name][position // PAGE] * PAGE + position % PAGE)
        host = HostBatch(
            token_ids=np.zeros(len(slots), dtype=np.int64),
            positions=np.array(positions),
            slot_mapping=np.array(slots),
            cu_seqlens_q=np.cumsum([0, *counts.values()]),
            seq_lens=np.array([len(self.kv[name]) for name in counts]),
            block_table=table,
            seq_ids=np.array(list(counts), dtype=np.int64),
            num_decodes=sum(count == 1 for count in counts.values()),
            page_size=PAGE,
        )
        kv = torch.cat([self.kv[name][starts[name] :] for name in counts])
        q = self.tensor(len(slots), self.shape.num_heads, self.shape.head_dim)
        empty = torch.empty(0)
        batch = ForwardBatch(
            token_ids=empty,
            positions=empty,
            slot_mapping=torch.from_numpy(host.slot_mapping),
            logits_rows=empty,
            num_decodes=host.num_decodes,
            num_padding_tokens=0,
            attention=backend.plan(host),
        )
        got = backend.forward(q, kv, cache, batch).double()
        expected = self._reference(q.double(), counts, starts)
        return float((got - expected).norm() / expected.norm())

    def _reference(
        self, q: torch.Tensor, counts: dict[int, int], starts: dict[int, int]
    ) -> torch.Tensor:
        kv_heads = self.shape.num_kv_heads
        group = self.shape.num_heads // kv_heads
        out, row = [], 0
        for name, count in counts.items():
            for position in range(starts[name], starts[name] + count):
                past = self.kv[name][: position + 1].double()
                keys = past[:, :kv_heads].repeat_interleave(group, 1)
                values = past[:, kv_heads:].repeat_interleave(group, 1)
                scores = torch.einsum("hd,lhd->hl", q[row], keys) * self.shape.head_dim**-0.5
                out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values).flatten())
                row += 1
        return torch.stack(out)


@pytest.mark.parametrize("has_rows", [True, False], ids=["dense rows", "gathered pages"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dtype", "tolerance"),
    [(4, 2, torch.float32, 2e-6), (3, 3, torch.float32, 2e-6), (8, 1, torch.bfloat16, 2e-2)],
)
def test_every_step_equals_attention_written_out(
    has_rows: bool, num_heads: int, num_kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    shape = AttentionShape(num_heads, num_kv_heads, 16, dtype)
    backend = TorchPagedAttention(shape, PAGE)
    cache = backend.allocate(NUM_PAGES)
    if not has_rows:
        backend.rows.max_bytes = 0
    seqs = Sequences(shape)
    errors = []

    def step(**counts: int) -> None:
        errors.append(seqs.step(backend, cache, {int(k[1:]): c for k, c in counts.items()}))

    seqs.add(0)
    step(s0=41)
    for name in range(1, 6):
        # All but one share ten full pages.
        seqs.add(name, *((0, 10) if name < 5 else ()))
    step(s0=1, s1=7, s2=12, s3=3, s4=2)
    step(s0=1, s1=1, s2=1, s3=1, s4=1)
    for _ in range(6):
        step(s0=1, s1=1, s2=1, s3=1, s4=1)
    # One leaves, the order changes, one without the prefix comes, the batch shrinks and grows.
    step(s4=1, s1=1, s3=1, s2=1)
    step(s4=1, s1=1, s3=1, s2=1, s5=17)
    step(s4=1, s1=1, s3=1, s2=1, s5=1)
    step(s2=1, s5=1)
    step(s2=1)
    step(s2=1, s5=1, s0=1)
    for _ in range(70):
        step(s2=1, s0=1, s1=1)
    assert max(errors) < tolerance


def test_clearing_silences_what_a_weight_of_zero_would_not() -> None:
    shape = AttentionShape(2, 1, 16, torch.float32)
    backend = TorchPagedAttention(shape, PAGE)
    cache = backend.allocate(NUM_PAGES)
    seqs = Sequences(shape)
    seqs.add(0)
    seqs.add(1)
    seqs.step(backend, cache, {0: 5, 1: 9})
    seqs.step(backend, cache, {0: 1, 1: 1})
    # Slots behind the end of a sequence, in pages and in rows.
    cache[:, seqs.pages[0][1] * PAGE + 3] = float("nan")
    for storage in backend.rows._storage.values():
        storage[:, :, :, 9] = float("nan")
    backend.clear(cache, [seqs.pages[0][1]])
    tail = seqs.kv[0][PAGE:]
    cache[:, seqs.pages[0][1] * PAGE :][:, : len(tail)] = tail.transpose(0, 1)
    assert seqs.step(backend, cache, {0: 1, 1: 1}) < 2e-6
