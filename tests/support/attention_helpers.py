"""Builders and float64 truth for paged attention, shared by the interpreter and the GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeserve.triton_kernels.attention_rows import META_SIZE, Pages
from moeserve.triton_kernels.rope import Heads


@dataclass
class Cache:
    """Random sequences in shuffled pages; slots that no token owns hold NaN."""

    pages: Pages
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_cache(
    lengths: list[int],
    heads: Heads,
    *,
    shared: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    spread: float = 1.0,
) -> Cache:
    """Sequences of these lengths; the first `shared` tokens (whole pages) are common pages."""
    generator = torch.Generator().manual_seed(seed)
    P = heads.page_size
    counts = [-(-length // P) for length in lengths]
    total = sum(counts) + 2
    numbers = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    width = max(counts) + 1
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    shape = (total, 2, heads.NKV, P, heads.D)
    cache = torch.full(shape, float("nan"))
    common = [numbers.pop() for _ in range(shared // P)]
    for page in common:
        cache[page] = torch.randn(shape[1:], generator=generator) * spread
    keys, values = [], []
    for i, length in enumerate(lengths):
        num_common = min(shared, length) // P
        pages = common[:num_common] + [numbers.pop() for _ in range(counts[i] - num_common)]
        table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for at in range(num_common * P, length):
            cache[pages[at // P], :, :, at % P] = (
                torch.randn(2, heads.NKV, heads.D, generator=generator) * spread
            )
        rows = torch.stack([cache[pages[at // P], :, :, at % P] for at in range(length)])
        keys.append(rows[:, 0].to(dtype).double())
        values.append(rows[:, 1].to(dtype).double())
    meta = torch.zeros(META_SIZE, dtype=torch.int32)
    meta[0], meta[2] = shared, width
    positions = torch.tensor([n - 1 for n in lengths], dtype=torch.int32)
    held = Pages(
        cache.to(dtype).to(device), table.to(device), positions.to(device), meta.to(device)
    )
    return Cache(held, keys, values)


def attention_truth(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int
) -> torch.Tensor:
    """Float64 result [NQ, D] of one query row [NQ, D] over keys 0..position [n, NKV, D]."""
    group = q.shape[0] // keys.shape[1]
    k = keys[: position + 1].repeat_interleave(group, 1)
    v = values[: position + 1].repeat_interleave(group, 1)
    scores = torch.einsum("hd,nhd->hn", q.double(), k) * q.shape[1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(1), v)
