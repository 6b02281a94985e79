"""The Triton experts against float64, in the interpreter here and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from moeserve.moe import triton_experts, tuning
from moeserve.moe.backends.base import Routed, Unrouted
from moeserve.moe.backends.triton import BACKEND
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.moe.tuning import LayerShape, LayerTiles, choose, default_tiles
from moeserve.triton_kernels.gemv import GemvTile
from moeserve.triton_kernels.grouped_gemm import Tile, num_row_blocks

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# ||out - ref|| / ||ref|| in float32, sums of about a hundred products.
LIMIT = 1e-5

SMALL = LayerTiles(Tile(16, 32, 32, 4, 2, group_m=2), Tile(16, 32, 32, 4, 2))
SWAPPED = LayerTiles(
    Tile(16, 64, 32, 4, 2, is_swapped=True, tail_m=8), Tile(16, 64, 32, 4, 2, is_swapped=True)
)
TAILED = LayerTiles(Tile(32, 32, 32, 4, 2, group_m=2, tail_m=16), Tile(32, 64, 32, 4, 2, tail_m=16))
DESCRIBED = LayerTiles(
    Tile(32, 32, 32, 4, 2, group_m=2, uses_tma=True, tail_m=16),
    Tile(32, 32, 32, 4, 2, uses_tma=True, tail_m=16),
)
ARRANGED = LayerTiles(
    Tile(32, 32, 32, 4, 2, group_m=2, uses_tma=True, tail_m=16, is_arranged=True),
    Tile(32, 32, 32, 4, 2),
)
FLAT = LayerTiles(
    Tile(32, 32, 32, 4, 2, group_m=2, uses_tma=True, is_arranged=True, is_persistent=True),
    Tile(32, 32, 32, 4, 2, uses_tma=True, is_persistent=True, programs_per_sm=2),
)
GEMV = LayerTiles(GemvTile(32, 64, 4, 1), GemvTile(16, 32, 4, 1))
PATHS = {"small": SMALL, "swapped": SWAPPED, "tailed": TAILED, "gemv": GEMV}
# Tensor descriptors want rows of whole 16 bytes, and their blocks are slow to interpret.
DESCRIPTOR_PATHS = {
    "described": DESCRIBED, "arranged": ARRANGED, "flat": FLAT,
}  # fmt: skip
ALL_PATHS = {**PATHS, **DESCRIPTOR_PATHS}


def truth(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, routed: Routed, spec: MoESpec
) -> torch.Tensor:
    """Float64, a loop over slots."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    ids = routed.local_ids()
    I = w2.shape[2]
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e, weight = int(ids[t, k]), float(routed.topk_weights[t, k])
            if e < 0:
                continue
            on_input = spec.routing.weight_on_input
            token = x[t].double() * (weight if on_input else 1.0)
            h = w13[e].double() @ token
            if spec.activation == "relu2":
                a = h.clamp(min=0) ** 2
            elif spec.activation == "swiglu_oai":
                g, u = h[:I].clamp(max=7), h[I:].clamp(-7, 7)
                a = g * torch.sigmoid(1.702 * g) * (u + 1)
            else:
                a = torch.nn.functional.silu(h[:I]) * h[I:]
            out[t] += (w2[e].double() @ a) * (1.0 if on_input else weight)
    return out


def run(
    monkeypatch: pytest.MonkeyPatch,
    tiles: LayerTiles,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    routed: Routed,
    spec: MoESpec,
) -> torch.Tensor:
    monkeypatch.setattr(triton_experts, "tiles_for", lambda call: tiles)
    moved = Routed(
        routed.topk_ids.to(DEVICE),
        routed.topk_weights.to(DEVICE),
        None if routed.expert_map is None else routed.expert_map.to(DEVICE),
    )
    # A workspace full of NaN: whatever is read without having been written shows.
    workspace = torch.full(
        (BACKEND.workspace_bytes(spec, x.shape[0]) // 4 + 64,), float("nan"), device=DEVICE
    ).view(torch.uint8)
    weights = MoEWeights(w13.to(DEVICE), w2.to(DEVICE))
    before = x.clone()
    moved_x = x.to(DEVICE)
    out = BACKEND.apply(spec, moved_x, moved, weights, workspace)
    assert torch.equal(moved_x.cpu(), before)
    return out.cpu()


def problem(
    T: int, E: int, H: int, I: int, K: int, spec_args: dict[str, object] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Routed, MoESpec]:
    torch.manual_seed(T * 1000 + E)
    args = dict(spec_args or {})
    routing = args.pop("routing", RoutingSpec(K))
    spec = MoESpec(
        E,
        H,
        I,
        routing,
        dtype=torch.float32,
        platform="cuda-sm90",
        **args,  # type: ignore[arg-type]
    )
    halves = 2 if spec.is_gated else 1
    w13 = torch.randn(spec.num_local_experts, halves * I, H) * H**-0.5
    w2 = torch.randn(spec.num_local_experts, H, I) * I**-0.5
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    return torch.randn(T, H), w13, w2, Routed(ids, torch.rand(T, K)), spec


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm().clamp_min(1e-30))


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize(
    ("T", "E", "H", "I", "K"),
    [(1, 8, 64, 32, 2), (7, 8, 96, 80, 3), (40, 4, 72, 40, 1)],
)
def test_equals_float64(
    monkeypatch: pytest.MonkeyPatch, path: str, T: int, E: int, H: int, I: int, K: int
) -> None:
    x, w13, w2, routed, spec = problem(T, E, H, I, K)
    out = run(monkeypatch, ALL_PATHS[path], x, w13, w2, routed, spec)
    assert error(out, truth(x, w13, w2, routed, spec)) < LIMIT


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
def test_other_activations(monkeypatch: pytest.MonkeyPatch, path: str, activation: str) -> None:
    x, w13, w2, routed, spec = problem(6, 4, 64, 48, 2, {"activation": activation})
    out = run(monkeypatch, ALL_PATHS[path], x * 6, w13, w2, routed, spec)
    assert error(out, truth(x * 6, w13, w2, routed, spec)) < LIMIT


@pytest.mark.parametrize("path", ALL_PATHS)
def test_llama4_weight_on_the_input(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    routing = RoutingSpec(1, "sigmoid", False, weight_on_input=True)
    x, w13, w2, routed, spec = problem(5, 4, 64, 32, 1, {"routing": routing})
    out = run(monkeypatch, ALL_PATHS[path], x, w13, w2, routed, spec)
    assert error(out, truth(x, w13, w2, routed, spec)) < LIMIT
    if path in DESCRIPTOR_PATHS:
        return
    one = torch.ones(1, 1)
    value = run(
        monkeypatch, ALL_PATHS[path], one, torch.ones(1, 2, 1), torch.ones(1, 1, 1),
        Routed(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[0.5]])),
        MoESpec(1, 1, 1, routing, dtype=torch.float32, platform="cuda-sm90"),
    )  # fmt: skip
    assert float(value) == pytest.approx(0.15561, abs=1e-5)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_ranks_sum_to_the_whole_and_strangers_add_zero(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    x, w13, w2, routed, spec = problem(9, 5, 64, 32, 2)
    routed = Routed(torch.where(routed.topk_ids == 3, -1, routed.topk_ids), routed.topk_weights)
    whole = truth(x, w13, w2, routed, spec)
    total = torch.zeros_like(whole)
    for rank in (0, 1):
        *_, part = problem(9, 5, 64, 32, 2, {"ep_size": 2, "ep_rank": rank})
        first, count = part.first_local_expert, part.num_local_experts
        assert (first, count) == ((0, 3), (3, 2))[rank]
        expert_map = torch.full((5,), -1, dtype=torch.int32)
        expert_map[first : first + count] = torch.arange(count, dtype=torch.int32)
        mine = Routed(routed.topk_ids, routed.topk_weights, expert_map)
        here = slice(first, first + count)
        out = run(monkeypatch, ALL_PATHS[path], x, w13[here], w2[here], mine, part)
        assert torch.isfinite(out).all()
        total += out.double()
    assert error(total, whole) < LIMIT


@pytest.mark.parametrize("path", PATHS)
def test_all_tokens_on_one_expert_and_on_another_rank(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    x, w13, w2, _, spec = problem(37, 4, 64, 32, 1)
    routed = Routed(torch.full((37, 1), 2, dtype=torch.int32), torch.rand(37, 1))
    out = run(monkeypatch, PATHS[path], x, w13, w2, routed, spec)
    assert error(out, truth(x, w13, w2, routed, spec)) < LIMIT
    elsewhere = Routed(
        routed.topk_ids, routed.topk_weights, torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    )
    *_, part = problem(37, 4, 64, 32, 1, {"ep_size": 2, "ep_rank": 0})
    out = run(monkeypatch, PATHS[path], x, w13[:2], w2[:2], elsewhere, part)
    assert torch.equal(out, torch.zeros_like(out))


def test_an_id_that_repeats_in_a_row_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w13, w2, _, spec = problem(6, 4, 64, 32, 3)
    routed = Routed(torch.full((6, 3), 1, dtype=torch.int32), torch.rand(6, 3))
    out = run(monkeypatch, SMALL, x, w13, w2, routed, spec)
    assert error(out, truth(x, w13, w2, routed, spec)) < LIMIT


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rank", [0, 1])
def test_routing_in_the_same_call_equals_routing_before(
    monkeypatch: pytest.MonkeyPatch, path: str, rank: int
) -> None:
    monkeypatch.setattr(triton_experts, "tiles_for", lambda call: PATHS[path])
    x, w13, w2, _, spec = problem(9, 5, 64, 32, 2, {"ep_size": 2, "ep_rank": rank})
    logits = torch.randn(9, 5)
    logits[3] = float("nan")
    weights, ids = route(logits, spec.routing)
    first, count = spec.first_local_expert, spec.num_local_experts
    expert_map = torch.full((5,), -1, dtype=torch.int32)
    expert_map[first : first + count] = torch.arange(count, dtype=torch.int32)
    local = MoEWeights(w13.to(DEVICE), w2.to(DEVICE))
    moved = Routed(ids.to(DEVICE), weights.to(DEVICE), expert_map.to(DEVICE))
    before = BACKEND.apply(spec, x.to(DEVICE), moved, local)
    nan_rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    unrouted = Unrouted(logits.to(DEVICE), None, nan_rows)
    inside = BACKEND.apply_logits(spec, x.to(DEVICE), unrouted, local)
    torch.testing.assert_close(inside, before, atol=1e-6, rtol=1e-5)
    assert int(nan_rows) == 1


def test_no_tokens_and_no_experts() -> None:
    x, w13, w2, routed, spec = problem(3, 4, 64, 32, 2)
    none = Routed(routed.topk_ids[:0], routed.topk_weights[:0])
    assert BACKEND.apply(spec, x[:0], none, MoEWeights(w13, w2)).shape == (0, 64)
    out = BACKEND.apply(spec, x, routed, MoEWeights(w13[:0], w2[:0]))
    assert torch.equal(out, torch.zeros(3, 64))


@pytest.mark.parametrize("fault", ["one expert wrong", "a row of a tile lost", "K tail dropped"])
def test_the_limit_catches_small_faults(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """What these tests would see of a kernel that is a little wrong."""
    x, w13, w2, routed, spec = problem(40, 8, 96, 80, 2)
    ref = truth(x, w13, w2, routed, spec)
    if fault == "one expert wrong":
        w2 = w2.clone()
        w2[5] = w2[4]
    elif fault == "K tail dropped":
        w13 = w13.clone()
        w13[:, :, 90:] = 0
    out = run(monkeypatch, SMALL, x, w13, w2, routed, spec)
    if fault == "a row of a tile lost":
        out[17] = 0
    assert error(out, ref) > 100 * LIMIT


def test_a_tokens_bits_do_not_depend_on_its_batch() -> None:
    x, w13, w2, routed, spec = problem(33, 4, 64, 64, 2)
    spec = MoESpec(4, 64, 64, RoutingSpec(2), dtype=torch.float32, platform="cuda-sm90",
                   is_deterministic=True)  # fmt: skip
    weights = MoEWeights(w13.to(DEVICE), w2.to(DEVICE))

    def go(rows: list[int]) -> torch.Tensor:
        part = Routed(routed.topk_ids[rows].to(DEVICE), routed.topk_weights[rows].to(DEVICE))
        return BACKEND.apply(spec, x[rows].to(DEVICE), part, weights).cpu()

    whole = go(list(range(33)))
    assert torch.equal(go([20]), whole[20:21])
    order = torch.randperm(33).tolist()
    assert torch.equal(go(order), whole[order])


def test_row_blocks_bound_holds_for_every_split() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        E = int(torch.randint(1, 9, (), generator=generator))
        slots = int(torch.randint(1, 60, (), generator=generator))
        owners = torch.randint(0, E, (slots,), generator=generator)
        counts = torch.bincount(owners, minlength=E)
        used = int(((counts + 15) // 16).sum())
        assert used <= num_row_blocks(slots, E, 16)


def test_tables_load_and_choose_the_nearest_count() -> None:
    shape = LayerShape(128, 2048, 768, 8)
    table = tuning.load_table("NVIDIA H200", shape)
    assert table
    assert choose(table, shape, 1) == table[1]
    assert choose(table, shape, 7000) == table[8192]
    assert choose(table, shape, 10**6) == table[max(table)]
    assert isinstance(choose(table, shape, 24).gate_up, Tile)
    odd = LayerShape(60, 2816, 704, 4)
    assert tuning.load_table("NVIDIA H200", odd) == {}
    assert choose({}, odd, 300) == default_tiles(odd, 300)
