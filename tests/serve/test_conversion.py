"""Weight conversion: exact, once per load, in place, one expert of extra memory at most.

The inverses here are written from the layouts' descriptions, element by element, and share nothing
with the conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from moe_helpers import gate_weight, make_spec, random_weights, tokens

from moeserve.layers.moe import MoELayer
from moeserve.moe.backends.base import Backend, Routed, Traits
from moeserve.moe.backends.registry import registry
from moeserve.moe.oracle import (
    convert_to_unquantized_kernel_format,
    select_unquantized_moe_backend,
)
from moeserve.moe.spec import MoESpec, MoEWeights, Plan

E, H, I = 3, 128, 128
Inverse = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def undo_up_gate(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([w13[I:], w13[:I]]), w2


def undo_interleaved(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [w13[2 * i] for i in range(I)] + [w13[2 * i + 1] for i in range(I)]
    return torch.stack(rows), w2


def undo_aiter(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def one(w: torch.Tensor) -> torch.Tensor:
        n, k = w.shape
        flat, out = w.flatten(), torch.empty_like(w)
        row, column = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
        # Tile (16 rows × 32 columns), vector of 8 columns, row in the tile, column in the vector.
        tile = (row // 16) * (k // 32) + column // 32
        at = tile * 512 + (column % 32 // 8) * 128 + (row % 16) * 8 + column % 8
        out[row, column] = flat[at]
        return out

    return one(w13), one(w2)


def undo_column_blocks(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def one(w: torch.Tensor) -> torch.Tensor:
        return torch.stack([column for block in w for column in block.unbind(1)])

    return one(w13), one(w2)


# FlashInfer's table: old row i of a block of 32 goes to new row ROW_MAP[i].
ROW_MAP = [8 * (i % 4) + i // 4 for i in range(32)]
assert ROW_MAP[:8] == [0, 8, 16, 24, 1, 9, 17, 25]


def undo_block_major(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def one(w: torch.Tensor) -> torch.Tensor:
        blocks, rows, block = w.shape
        assert block * w.element_size() == 128
        flat = torch.cat([w[b] for b in range(blocks)], dim=1)
        return torch.stack([flat[r // 32 * 32 + ROW_MAP[r % 32]] for r in range(rows)])

    interleaved = one(w13)
    gate, up = interleaved[1::2], interleaved[0::2]  # up rows came first
    return torch.cat([gate, up]), one(w2)


INVERSES: dict[str, Inverse] = {
    "up_gate": undo_up_gate,
    "gate_up_interleaved": undo_interleaved,
    "aiter_16x16": undo_aiter,
    "block_major_k": undo_block_major,
    "checkpoint": lambda w13, w2: (w13, w2),
    "column_blocks": undo_column_blocks,
}


def numbered(dtype: torch.dtype = torch.bfloat16) -> MoEWeights:
    """Weights whose numbers are all different within an expert (as bit patterns of 16 bits)."""
    w13 = torch.randn(E, 2 * I, H, generator=torch.Generator().manual_seed(5)).to(dtype)
    w2 = torch.randn(E, H, I, generator=torch.Generator().manual_seed(6)).to(dtype)
    return MoEWeights(w13, w2)


BACKENDS = [b for b in registry().in_tree.values() if b.layout in INVERSES]


def test_every_layout_of_the_tree_has_an_inverse_here() -> None:
    own = {b.layout for n, b in registry().in_tree.items() if n != "triton"}
    assert own <= set(INVERSES)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_conversion_is_undone_by_an_independent_inverse(backend: Backend) -> None:
    before = numbered()
    loaded = MoEWeights(before.w13.clone(), before.w2.clone())
    after = convert_to_unquantized_kernel_format(backend, loaded)
    assert after.layout == backend.layout
    for expert in range(E):
        w13, w2 = INVERSES[backend.layout](after.w13[expert], after.w2[expert])
        assert torch.equal(w13, before.w13[expert])
        assert torch.equal(w2, before.w2[expert])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_conversion_is_in_place_and_once(backend: Backend) -> None:
    loaded = numbered()
    after = backend.prepare(loaded)
    assert after.w13.data_ptr() == loaded.w13.data_ptr()
    assert after.w2.data_ptr() == loaded.w2.data_ptr()
    copy = after.w13.clone(), after.w2.clone()
    again = backend.prepare(after)
    assert torch.equal(again.w13, copy[0])
    assert torch.equal(again.w2, copy[1])


def test_ungated_weights_are_not_swapped() -> None:
    w13, w2 = torch.randn(I, H), torch.randn(H, I)
    kept13, kept2 = registry().get("flashinfer_cutlass").convert_expert(w13, w2)
    assert torch.equal(kept13, w13)
    assert torch.equal(kept2, w2)


def test_a_third_layout_is_refused() -> None:
    up_gate = registry().get("flashinfer_cutlass").prepare(numbered())
    with pytest.raises(ValueError, match="weights are in layout 'up_gate'"):
        registry().get("aiter").prepare(up_gate)


def test_a_rank_without_experts_converts_nothing() -> None:
    empty = MoEWeights(torch.empty(0, 2 * I, H), torch.empty(0, H, I))
    assert registry().get("flashinfer_trtllm").prepare(empty).layout == "block_major_k"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_extra_memory_is_about_one_expert(backend: Backend) -> None:
    """The most that is allocated at any moment of a conversion, by torch's own account."""
    weights = numbered()
    one_expert = weights.w13[0].nbytes + weights.w2[0].nbytes
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiled:
        backend.prepare(weights)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    assert len(changes) >= 2 * E or backend.layout == "checkpoint"
    most = max(accumulate((num_bytes for _, num_bytes in changes), initial=0))
    assert most <= 1.5 * one_expert


class UpGateExperts(Backend):
    """CPU experts that want another layout: what a conversion looks like to a layer."""

    traits = Traits(
        name="up_gate_cpu",
        title="test",
        platforms=frozenset({"cpu"}),
        layout="up_gate",
        dtypes=frozenset({torch.float32}),
    )

    def convert_expert(
        self, w13: torch.Tensor, w2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return w13.roll(w2.shape[1], dims=0), w2

    def apply(
        self,
        spec: MoESpec,
        x: torch.Tensor,
        routed: Routed,
        weights: MoEWeights,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        up, gate = weights.w13.chunk(2, dim=1)
        plain = MoEWeights(torch.cat([gate, up], dim=1), weights.w2)
        return registry().get("cpu").apply(spec, x, routed, plain)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> tuple[MoELayer, MoELayer]:
    """A layer with converted weights, and one that computes from the checkpoint's layout."""
    monkeypatch.setitem(registry().in_tree, "up_gate_cpu", UpGateExperts())  # type: ignore[arg-type]
    spec = make_spec()
    plan = Plan(((8192, "up_gate_cpu"),), "up_gate", "test")
    return MoELayer(spec, plan), MoELayer(spec, select_unquantized_moe_backend(spec))


def load(layer: MoELayer, seed: int) -> None:
    weights = random_weights(layer.spec, seed)
    layer.gate_weight.copy_(gate_weight(layer.spec))
    layer.w13_weight.copy_(weights.w13)
    layer.w2_weight.copy_(weights.w2)
    layer.process_weights()


def test_loading_twice_equals_loading_once(layers: tuple[MoELayer, MoELayer]) -> None:
    converted, plain = layers
    x = tokens(converted.spec, 9)
    for layer in layers:
        load(layer, seed=1)
    first = converted(x)
    torch.testing.assert_close(first, plain(x))
    converted.process_weights()  # a second call without new weights
    assert torch.equal(converted(x), first)
    load(converted, seed=1)  # the same weights again
    assert torch.equal(converted(x), first)


def test_reloading_keeps_addresses_and_takes_the_new_weights(
    layers: tuple[MoELayer, MoELayer],
) -> None:
    converted, plain = layers
    x = tokens(converted.spec, 9)
    load(converted, seed=1)
    held = converted._weights
    assert held is not None
    addresses = held.w13.data_ptr(), held.w2.data_ptr()
    for layer in layers:
        load(layer, seed=2)
    now = converted._weights
    assert now is not None
    assert (now.w13.data_ptr(), now.w2.data_ptr()) == addresses
    # What a captured graph holds is the old tensor: it has the new numbers.
    assert torch.equal(held.w13, now.w13)
    torch.testing.assert_close(converted(x), plain(x))


def test_loading_through_data_is_announced(layers: tuple[MoELayer, MoELayer]) -> None:
    converted, plain = layers
    x = tokens(converted.spec, 9)
    load(converted, seed=1)
    load(plain, seed=2)
    weights = random_weights(converted.spec, 2)
    converted.begin_load()
    converted.w13_weight.data.copy_(weights.w13)
    converted.w2_weight.data.copy_(weights.w2)
    with pytest.raises(RuntimeError, match="process_weights"):
        converted(x)
    converted.process_weights()
    torch.testing.assert_close(converted(x), plain(x))


def test_half_a_reload_is_refused(layers: tuple[MoELayer, MoELayer]) -> None:
    converted, _ = layers
    load(converted, seed=1)
    converted.w13_weight.copy_(random_weights(converted.spec, 2).w13)
    with pytest.raises(RuntimeError, match="only one was loaded again"):
        converted.process_weights()


def test_forward_before_loading_is_refused(layers: tuple[MoELayer, MoELayer]) -> None:
    with pytest.raises(RuntimeError, match=r"process_weights\(\) has to follow loading"):
        layers[0](tokens(layers[0].spec, 2))
