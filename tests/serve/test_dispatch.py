"""Layers over 2 to 4 ranks (gloo): every cut gives what one rank gives."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moe_helpers import (
    gate_weight,
    local_part,
    make_layer,
    make_spec,
    on,
    random_weights,
    relative_error,
    tokens,
    width_part,
)

from moeserve.errors import Unsupported
from moeserve.layers.moe import MoELayer
from moeserve.moe.backends.base import Traits
from moeserve.moe.backends.cpu import CpuExperts
from moeserve.moe.dispatch import MoEKernel, Workspace
from moeserve.moe.oracle import select_unquantized_moe_backend
from moeserve.moe.spec import MoESpec, MoEWeights, Plan, RoutingSpec
from moeserve.parallel import Dispatch, Parallel, grid, make_parallel

TOP_2 = RoutingSpec(2)
LLAMA4 = RoutingSpec(1, scoring="sigmoid", is_renormalized=False, weight_on_input=True)
SHARED = 8


@dataclass(frozen=True)
class Cut:
    """One way to spread a layer, and the tokens of each DP rank."""

    dp: int
    tp: int
    is_expert_parallel: bool
    num_experts: int
    num_tokens: tuple[int, ...]
    dispatch: Dispatch = "allgather_reducescatter"
    routing: RoutingSpec = TOP_2
    has_counts: bool = False
    has_nan: bool = False


CUTS = {
    2: [
        Cut(1, 2, False, 8, (7,)),
        Cut(1, 2, True, 5, (7,)),
        Cut(1, 2, False, 8, (7,), routing=LLAMA4),
        Cut(1, 2, True, 5, (7,), routing=LLAMA4),
        Cut(2, 1, True, 5, (7, 3)),
        Cut(2, 1, True, 8, (6, 0)),
        Cut(2, 1, True, 8, (0, 0)),
        Cut(2, 1, True, 8, (5, 9), has_counts=True),
        Cut(2, 1, True, 8, (5, 9), routing=LLAMA4),
        Cut(2, 1, True, 8, (5, 9), has_nan=True),
        Cut(2, 1, True, 5, (7, 3), "alltoall"),
        Cut(2, 1, True, 8, (6, 0), "alltoall"),
        Cut(2, 1, True, 8, (5, 9), "alltoall", routing=LLAMA4),
        Cut(2, 1, False, 8, (4, 2)),
    ],
    4: [
        Cut(2, 2, True, 10, (7, 2)),
        Cut(2, 2, True, 2, (7, 1)),
        Cut(4, 1, True, 2, (3, 0, 5, 1)),
        Cut(2, 2, True, 10, (7, 2), "alltoall"),
        Cut(2, 2, True, 2, (7, 1), "alltoall"),
    ],
}


def whole_layer(cut: Cut) -> tuple[MoESpec, MoEWeights, list[torch.Tensor]]:
    """Spec, all weights and the shared expert's [w1, w3, w2, gate], the same on every rank."""
    spec = make_spec(cut.num_experts, routing=cut.routing, shared_intermediate_size=SHARED,
                     has_shared_gate=True, max_num_tokens=64)  # fmt: skip
    generator = torch.Generator().manual_seed(11)
    shapes = [(SHARED, 32), (SHARED, 32), (32, SHARED), (1, 32)]
    return spec, random_weights(spec), [torch.randn(s, generator=generator) for s in shapes]


def fill_shared(layer: MoELayer, shared: list[torch.Tensor], rank: int, size: int) -> None:
    w1, w3, w2, gate = shared
    assert layer.shared_w13_weight is not None
    assert layer.shared_w2_weight is not None
    assert layer.shared_gate_weight is not None
    layer.shared_w13_weight.copy_(torch.cat([w1.chunk(size)[rank], w3.chunk(size)[rank]]))
    layer.shared_w2_weight.copy_(w2.chunk(size, dim=1)[rank])
    layer.shared_gate_weight.copy_(gate)


def tokens_of(cut: Cut, spec: MoESpec, dp_rank: int) -> torch.Tensor:
    x = tokens(spec, cut.num_tokens[dp_rank], seed=20 + dp_rank)
    if cut.has_nan and dp_rank == 0:
        x[-1] = torch.nan
    return x


def expected(cut: Cut, dp_rank: int) -> torch.Tensor:
    spec, weights, shared = whole_layer(cut)
    layer = make_layer(spec, weights, gate_weight(spec))
    fill_shared(layer, shared, 0, 1)
    return layer(tokens_of(cut, spec, dp_rank))


def run_cut(cut: Cut) -> float:
    """Relative error of this rank's result; inf where something else is wrong."""
    parallel = make_parallel(cut.dp, cut.tp, cut.is_expert_parallel, cut.dispatch)
    spec, weights, shared = whole_layer(cut)
    spec = replace(
        spec,
        intermediate_size=spec.intermediate_size // parallel.moe_tp_size,
        shared_intermediate_size=SHARED // parallel.tp_size,
        ep_size=parallel.ep_size,
        ep_rank=parallel.ep_rank,
        tp_size=parallel.moe_tp_size,
        dp_size=parallel.dp_size,
    )
    if parallel.is_expert_parallel:
        mine = local_part(weights, spec)
    else:
        mine = width_part(weights, parallel.tp_rank, parallel.tp_size)
    layer = make_layer(spec, mine, gate_weight(spec), parallel=parallel)
    fill_shared(layer, shared, parallel.tp_rank, parallel.tp_size)
    x = tokens_of(cut, spec, parallel.dp_rank)
    copy = x.clone()
    batch = SimpleNamespace(dp_num_tokens=cut.num_tokens) if cut.has_counts else None
    out = layer(x, batch)
    reference = expected(cut, parallel.dp_rank)
    clean = slice(0, len(x) - 1) if cut.has_nan and parallel.dp_rank == 0 else slice(None)
    if out.shape != x.shape or not torch.equal(x[clean], copy[clean]):
        return float("inf")
    error = relative_error(out[clean], reference[clean])
    return error if error == error else float("inf")


def worker(rank: int, world: int, port: int, cuts: list[Cut], results: object) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for index, cut in enumerate(cuts):
        results[rank, index] = run_cut(cut)  # type: ignore[index]
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("world", [2, 4])
def test_every_cut_equals_one_rank(world: int) -> None:
    cuts = CUTS[world]
    errors = torch.full((world, len(cuts)), torch.inf).share_memory_()
    # Forked, not spawned: importing torch once more for each rank takes longer than the test.
    mp.start_processes(worker, (world, free_port(), cuts, errors), world, start_method="fork")
    for index, cut in enumerate(cuts):
        assert errors[:, index].max() < 5e-6, (cut, errors[:, index].tolist())


def test_the_grid_is_dp_major() -> None:
    assert grid(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    ranks = [
        Parallel(2, d, 3, t, is_expert_parallel=True).ep_rank for d in (0, 1) for t in range(3)
    ]
    assert ranks == list(range(6))
    assert Parallel(2, 1, 3, 2).ep_size == 1
    assert Parallel(2, 1, 3, 2).moe_tp_size == 3
    assert Parallel(2, 1, 3, 2, is_expert_parallel=True).moe_tp_size == 1


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="data_parallel_size=2 × tensor_parallel_size=2 needs 4"):
        make_parallel(2, 2)
    assert make_parallel(1, 1) == Parallel()


class LogitsExperts(CpuExperts):
    """A backend that routes by itself; all-to-all has no ids to send for it."""

    traits = Traits(
        name="cpu", title="logits", platforms=frozenset({"cpu"}), takes="logits"
    )  # fmt: skip


def test_logits_cannot_travel_by_all_to_all() -> None:
    spec = on(make_spec(), ep_size=2, dp_size=2)
    parallel = Parallel(dp_size=2, is_expert_parallel=True, dispatch="alltoall")
    plan = Plan(((64, "cpu"),), "checkpoint", "test")
    experts = {"cpu": LogitsExperts()}
    with pytest.raises(Unsupported, match="cpu takes router logits, which alltoall cannot carry"):
        MoEKernel(spec, plan, experts, torch.device("cpu"), parallel, Workspace())


def test_workspace_is_one_buffer_of_the_largest_size() -> None:
    workspace = Workspace()
    assert workspace.buffer is None
    for num_bytes in (100, 7, 300, 200):
        workspace.reserve(num_bytes, torch.device("cpu"))
    assert workspace.buffer is not None
    assert workspace.buffer.numel() == 300
    assert workspace.buffer.dtype == torch.uint8


def test_dp_ranks_without_expert_parallelism_are_replicas() -> None:
    spec = make_spec()
    plan = select_unquantized_moe_backend(spec)
    layer = MoELayer(spec, plan, parallel=Parallel(dp_size=2, dp_rank=1))
    assert not layer.kernel.is_partial
    assert layer.kernel.transport.is_local
