"""Paged attention in Triton against float64, in the interpreter here and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_helpers import Cache, attention_truth, make_cache

from moeserve.layers.rope import RotaryTable
from moeserve.triton_kernels import attention_decode, attention_rows
from moeserve.triton_kernels.attention_decode import NewTokens, attend_new_tokens
from moeserve.triton_kernels.attention_rows import Pages, RowsTile, SharedState
from moeserve.triton_kernels.rope import Heads, RopeTables, rope_and_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# ||out - truth|| / ||truth|| in float32.
LIMIT = 2e-6
HEADS = {
    "grouped": Heads(NQ=8, NKV=2, D=32, page_size=32),
    "qwen": Heads(NQ=16, NKV=2, D=16, page_size=32),
    "one each": Heads(NQ=2, NKV=2, D=64, page_size=32),
    "three heads a key": Heads(NQ=6, NKV=2, D=16, page_size=64),
}
SMALL = RowsTile(16, 32, 4, 2)
LENGTHS = [1, 31, 32, 33, 64, 65, 100]


def queries(num_rows: int, heads: Heads) -> torch.Tensor:
    """Rows strided as the fused projection leaves them, the rest NaN."""
    wide = torch.full((num_rows, heads.NQ + 2 * heads.NKV, heads.D), float("nan"))
    wide[:, : heads.NQ] = torch.randn(num_rows, heads.NQ, heads.D)
    return wide.to(DEVICE).view(num_rows, -1)


def result(num_rows: int, heads: Heads) -> torch.Tensor:
    return torch.full((num_rows, heads.NQ * heads.D), float("nan"), device=DEVICE)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert not out.isnan().any()
    diff = out.cpu().double().view(expected.shape) - expected
    return float(diff.norm() / expected.norm())


def decode_truth(q: torch.Tensor, cache: Cache, heads: Heads) -> torch.Tensor:
    rows = q.cpu().view(q.shape[0], -1, heads.D)[:, : heads.NQ]
    pairs = zip(rows, cache.keys, cache.values, strict=True)
    return torch.stack([attention_truth(r, k, v, len(k) - 1) for r, k, v in pairs])


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_decode_equals_float64(name: str, is_fixed: bool) -> None:
    heads = HEADS[name]
    cache = make_cache(LENGTHS, heads, device=DEVICE)
    q, out = queries(len(LENGTHS), heads), result(len(LENGTHS), heads)
    attention_rows.decode_rows(q, out, len(LENGTHS), cache.pages, heads, SMALL, is_fixed=is_fixed)
    assert error(out, decode_truth(q, cache, heads)) < LIMIT


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("programs", [1, 64, 512])
def test_new_tokens_are_normed_rotated_stored_and_attended(
    name: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_decode, "NUM_PROGRAMS", programs)
    heads = HEADS[name]
    B, NQ, NKV, D = len(LENGTHS), heads.NQ, heads.NKV, heads.D
    cache = make_cache(LENGTHS, heads, device=DEVICE, spread=2.0)
    table = RotaryTable(D, 128, 1e4, torch.float32)
    tables = RopeTables(table.cos.to(DEVICE), table.sin.to(DEVICE))
    norm = (torch.rand(NQ + NKV, D, device=DEVICE) + 0.5, 1e-6)
    given = torch.randn(B, (NQ + 2 * NKV) * D, device=DEVICE)
    slots = torch.tensor(
        [
            int(cache.pages.table[i, (n - 1) // heads.page_size]) * heads.page_size
            + (n - 1) % heads.page_size
            for i, n in enumerate(LENGTHS)
        ],
        dtype=torch.int32,
        device=DEVICE,
    )
    # What three launches give: norm, rotation and cache write, then attention.
    qkv, expected = given.clone(), result(B, heads)
    rope_and_store(qkv, norm, tables, (cache.pages.positions, slots), cache.pages.cache, heads)
    stored = cache.pages.cache.clone()
    attention_rows.decode_rows(qkv, expected, B, cache.pages, heads, SMALL)
    cache.pages.cache.view(-1, 2, NKV, heads.page_size, D)[
        slots // heads.page_size, :, :, slots % heads.page_size
    ] = float("nan")
    out = result(B, heads)
    tickets = torch.zeros(attention_decode.num_tickets(heads), dtype=torch.int32, device=DEVICE)
    new = NewTokens(norm, tables, slots)
    attend_new_tokens(given, out, B, new, cache.pages, heads, SMALL, tickets)
    assert error(out, expected.cpu().double()) < LIMIT
    kept = ~stored.isnan()
    assert torch.equal(kept, ~cache.pages.cache.isnan())
    assert error(cache.pages.cache[kept], stored[kept].cpu().double()) < LIMIT
    # Ready for the next layer.
    assert not tickets.any()


def test_number_of_parts_fills_the_card_and_ends_at_one() -> None:
    heads = Heads(32, 4, 128, 32)
    counts = {B: attention_decode.num_splits(B, heads) for B in (1, 4, 16, 64, 65, 128, 256)}
    assert counts == {1: 32, 4: 16, 16: 4, 64: 1, 65: 1, 128: 1, 256: 1}


@pytest.mark.parametrize("name", ["grouped", "qwen", "three heads a key"])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_shared_prefix_once_then_the_rest(name: str, is_fixed: bool) -> None:
    heads = HEADS[name]
    lengths = [97, 65, 70, 128, 64 + 1]
    cache = make_cache(lengths, heads, shared=64, device=DEVICE)
    q, out = queries(len(lengths), heads), result(len(lengths), heads)
    B = len(lengths)
    state = SharedState(
        torch.full((B,), 64, dtype=torch.int32, device=DEVICE),
        torch.full((B, heads.NQ, heads.D), float("nan"), device=DEVICE),
        torch.full((B, heads.NQ, 2), float("nan"), device=DEVICE),
    )
    attention_rows.shared_prefix(q, state, B, cache.pages, heads, SMALL, is_fixed=is_fixed)
    attention_rows.decode_rows(q, out, B, cache.pages, heads, SMALL, state=state, is_fixed=is_fixed)
    assert error(out, decode_truth(q, cache, heads)) < LIMIT
    alone = result(B, heads)
    attention_rows.decode_rows(q, alone, B, cache.pages, heads, SMALL, is_fixed=is_fixed)
    # Going on from the stored state is the same pass, bit for bit, unless the compiler may choose
    # where it fuses multiplications with additions.
    if is_fixed or DEVICE == "cpu":
        assert torch.equal(out, alone)


def test_a_sequence_without_the_prefix_begins_at_zero() -> None:
    heads = HEADS["grouped"]
    lengths = [80, 70, 90]
    cache = make_cache(lengths, heads, shared=64, device=DEVICE)
    other = make_cache([40], heads, device=DEVICE, seed=1)
    num_pages, width = cache.pages.cache.shape[0], cache.pages.table.shape[1]
    line = torch.zeros(1, width, dtype=torch.int32, device=DEVICE)
    line[0, :3] = other.pages.table[0, :3] + num_pages
    pages = Pages(
        torch.cat([cache.pages.cache, other.pages.cache]),
        torch.cat([cache.pages.table, line]),
        torch.cat([cache.pages.positions, other.pages.positions]),
        cache.pages.meta,
    )
    q, out = queries(4, heads), result(4, heads)
    state = SharedState(
        torch.tensor([64, 64, 64, 0], dtype=torch.int32, device=DEVICE),
        torch.empty(4, heads.NQ, heads.D, device=DEVICE),
        torch.empty(4, heads.NQ, 2, device=DEVICE),
    )
    attention_rows.shared_prefix(q, state, 4, pages, heads, SMALL)
    attention_rows.decode_rows(q, out, 4, pages, heads, SMALL, state=state)
    both = Cache(pages, cache.keys + other.keys, cache.values + other.values)
    assert error(out, decode_truth(q, both, heads)) < LIMIT


def test_padding_reads_nothing_and_gives_zero() -> None:
    heads = HEADS["grouped"]
    cache = make_cache([20, 30], heads, device=DEVICE)
    pages = Pages(
        cache.pages.cache,
        torch.cat([cache.pages.table, torch.full_like(cache.pages.table, 2**30)]),
        torch.tensor([19, 29, -1, -1], dtype=torch.int32, device=DEVICE),
        cache.pages.meta,
    )
    q = queries(4, heads)
    q[2:] = float("nan")
    out = result(4, heads)
    attention_rows.decode_rows(q, out, 4, pages, heads, SMALL)
    assert error(out[:2], decode_truth(q[:2], cache, heads)) < LIMIT
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    # The form that stores new tokens: rows of padding store nothing either.
    table = RotaryTable(heads.D, 64, 1e4, torch.float32)
    tables = RopeTables(table.cos.to(DEVICE), table.sin.to(DEVICE))
    slots = torch.tensor([-1, -1, -1, -1], dtype=torch.int32, device=DEVICE)
    tickets = torch.zeros(attention_decode.num_tickets(heads), dtype=torch.int32, device=DEVICE)
    before = pages.cache.clone()
    out = result(4, heads)
    attend_new_tokens(q, out, 4, NewTokens(None, tables, slots), pages, heads, SMALL, tickets)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert torch.equal(before.nan_to_num(9.0), pages.cache.nan_to_num(9.0))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_prompt_chunks_are_causal_and_see_what_came_before(name: str, is_fixed: bool) -> None:
    heads = HEADS[name]
    tile = RowsTile(32, 32, 4, 2)
    per_block = tile.block_m // (heads.NQ // heads.NKV)
    # (tokens before the chunk, tokens of the chunk)
    chunks = [(0, 33), (40, 7), (64, 64), (0, 1), (95, 2)]
    cache = make_cache([a + b for a, b in chunks], heads, device=DEVICE)
    positions, items, row = [], [], 0
    for sequence, (before, count) in enumerate(chunks):
        for start in range(0, count, per_block):
            items.append([row + start, min(per_block, count - start), sequence])
        positions += list(range(before, before + count))
        row += count
    pages = Pages(
        cache.pages.cache,
        cache.pages.table,
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        cache.pages.meta,
    )
    q, out = queries(row, heads), result(row, heads)
    table = torch.tensor(items, dtype=torch.int32, device=DEVICE)
    attention_rows.prefill_rows(q, out, table, len(items), pages, heads, tile, is_fixed=is_fixed)
    rows = q.cpu().view(row, -1, heads.D)[:, : heads.NQ]
    owner = [i for i, (_, count) in enumerate(chunks) for _ in range(count)]
    expected = torch.stack(
        [
            attention_truth(rows[t], cache.keys[owner[t]], cache.values[owner[t]], positions[t])
            for t in range(row)
        ]
    )
    assert error(out, expected) < LIMIT


def test_a_row_has_the_same_bits_as_decode_and_in_any_chunk() -> None:
    heads = HEADS["grouped"]
    cache = make_cache([100], heads, device=DEVICE)
    tile = RowsTile(32, 32, 4, 2)
    q = queries(100, heads)
    positions = torch.arange(100, dtype=torch.int32, device=DEVICE)
    pages = Pages(cache.pages.cache, cache.pages.table, positions, cache.pages.meta)

    def prefill(first: int, per_block: int) -> torch.Tensor:
        out = result(100, heads)
        items = [[start, min(per_block, 100 - start), 0] for start in range(first, 100, per_block)]
        table = torch.tensor(items, dtype=torch.int32, device=DEVICE)
        attention_rows.prefill_rows(q, out, table, len(items), pages, heads, tile, is_fixed=True)
        return out

    whole = prefill(0, 8)
    assert torch.equal(whole[37:], prefill(37, 8)[37:])
    assert torch.equal(whole[37:], prefill(37, 3)[37:])
    one = Pages(pages.cache, pages.table, positions[60:61], pages.meta)
    out = result(1, heads)
    attention_rows.decode_rows(q[60:61], out, 1, one, heads, tile, is_fixed=True)
    assert torch.equal(out[0], whole[60])
