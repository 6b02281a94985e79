"""The layer as a whole: padding, determinism, shared experts, and the duplicate-expert repro."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from moe_helpers import (
    gate_weight,
    make_layer,
    make_spec,
    on,
    random_weights,
    tokens,
)

from moeserve.errors import UsageError
from moeserve.layers.moe import MoELayer
from moeserve.moe.backends.base import Backend, Routed
from moeserve.moe.backends.flashinfer_trtllm import routing_method
from moeserve.moe.backends.registry import registry
from moeserve.moe.oracle import select_unquantized_moe_backend
from moeserve.moe.reference import reference_routing
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec

BACKENDS = ["cpu", "cpu_native", "torch_grouped_mm"]
LLAMA4 = RoutingSpec(1, scoring="sigmoid", is_renormalized=False, weight_on_input=True)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_padding_rows_do_not_leak(name: str, garbage: float) -> None:
    spec = make_spec()
    layer = make_layer(spec, random_weights(spec), gate_weight(spec), backend=name)
    real = tokens(spec, 19)
    padding = torch.full((13, spec.hidden_size), garbage)
    alone = layer(real)
    beside = layer(torch.cat([real, padding]), SimpleNamespace(num_padding_tokens=13))
    assert beside.shape == (32, spec.hidden_size)
    torch.testing.assert_close(beside[:19], alone, rtol=1e-5, atol=1e-6)
    assert layer.padding_rows == 13
    if garbage is torch.nan:
        assert layer.nan_rows == 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_beside", [1, 15, 16, 63, 200])
def test_deterministic_rows_do_not_depend_on_the_batch(dtype: torch.dtype, num_beside: int) -> None:
    routing = RoutingSpec(4)
    spec = make_spec(
        16, 128, 64, routing=routing, dtype=dtype, is_deterministic=True,
        shared_intermediate_size=64, has_shared_gate=True,
    )  # fmt: skip
    layer = make_layer(spec, random_weights(spec), gate_weight(spec))
    for parameter in (layer.shared_w13_weight, layer.shared_w2_weight, layer.shared_gate_weight):
        assert parameter is not None
        torch.nn.init.normal_(parameter, std=0.1)
    rows = tokens(spec, 5)
    alone = torch.cat([layer(row.unsqueeze(0)) for row in rows])
    others = tokens(spec, num_beside, seed=8)
    batch = layer(torch.cat([others[: num_beside // 2], rows, others[num_beside // 2 :]]))
    assert torch.equal(batch[num_beside // 2 : num_beside // 2 + 5], alone)
    # A padding row of NaN beside it changes nothing either.
    nan = torch.full((3, 128), torch.nan, dtype=dtype)
    assert torch.equal(layer(torch.cat([rows, nan]))[:5], alone)


def test_shared_expert_reads_the_untouched_input_and_counts_once() -> None:
    spec = make_spec(shared_intermediate_size=8)
    weights, gate = random_weights(spec), gate_weight(spec)
    layer = make_layer(spec, weights, gate)
    assert layer.shared_w13_weight is not None
    assert layer.shared_w2_weight is not None
    torch.nn.init.normal_(layer.shared_w13_weight)
    torch.nn.init.normal_(layer.shared_w2_weight)
    x = tokens(spec, 6)
    routed = make_layer(on(spec, shared_intermediate_size=0), weights, gate)(x)
    first, up = (x @ layer.shared_w13_weight.T).chunk(2, dim=-1)
    shared = (torch.nn.functional.silu(first) * up) @ layer.shared_w2_weight.T
    torch.testing.assert_close(layer(x), routed + shared, rtol=1e-5, atol=1e-5)


def test_all_backends_agree_on_ids_and_numbers_with_nan_rows() -> None:
    spec = make_spec()
    x = tokens(spec, 24)
    x[3] = torch.nan
    outs = []
    for name in BACKENDS:
        layer = make_layer(spec, random_weights(spec), gate_weight(spec), backend=name)
        outs.append(layer(x))
        assert layer.nan_rows == 1
    clean = [i for i in range(24) if i != 3]
    torch.testing.assert_close(outs[0][clean], outs[1][clean], rtol=1e-5, atol=1e-6)
    weights, ids = reference_routing(x @ gate_weight(spec).T, spec.routing)
    assert ids[3].tolist() == [0, 1]
    assert weights[3].tolist() == [0.5, 0.5]


def test_a_backend_may_leave_weighting_and_sum_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = registry().get("cpu")

    class PerSlot(Backend):
        traits = cpu.traits.__class__(
            name="cpu", title="per slot", platforms=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32}), has_weighting=False, has_reduction=False,
        )  # fmt: skip

        def apply(
            self,
            spec: MoESpec,
            x: torch.Tensor,
            routed: Routed,
            weights: MoEWeights,
            workspace: torch.Tensor | None = None,
        ) -> torch.Tensor:
            ones = torch.ones(x.shape[0], 1)
            slots = [
                cpu.apply(spec, x, Routed(routed.topk_ids[:, k : k + 1], ones), weights)
                for k in range(routed.topk_ids.shape[1])
            ]
            return torch.stack(slots, dim=1)

    spec = make_spec()
    weights, gate, x = random_weights(spec), gate_weight(spec), tokens(spec, 20)
    expected = make_layer(spec, weights, gate)(x)
    monkeypatch.setitem(registry().in_tree, "cpu", PerSlot())  # type: ignore[arg-type]
    torch.testing.assert_close(make_layer(spec, weights, gate)(x), expected)


def test_spec_and_grid_have_to_agree() -> None:
    spec = make_spec(ep_size=2, ep_rank=1)
    with pytest.raises(ValueError, match="expert rank 1 of 2, the grid 0 of 1"):
        MoELayer(spec, select_unquantized_moe_backend(spec))


@pytest.mark.parametrize(
    ("routing", "number"),
    [
        (RoutingSpec(8), 4),
        (RoutingSpec(8, is_renormalized=False), 0),
        (RoutingSpec(8, scoring="sigmoid"), 6),
        (RoutingSpec(8, scoring="sigmoid", is_renormalized=False), 8),
        (RoutingSpec(8, scoring="sigmoid", has_bias=True, num_groups=8, top_k_groups=4), 2),
        (LLAMA4, 3),
        (RoutingSpec(8, has_bias=True), None),
        (RoutingSpec(8, scaling_factor=2.0), None),
        (RoutingSpec(8, num_groups=8, top_k_groups=4), None),
    ],
)
def test_flashinfers_names_of_routing(routing: RoutingSpec, number: int | None) -> None:
    assert routing_method(routing) == number


def test_repro_refuses_unknown_backends() -> None:
    from moeserve.bench import repro

    with pytest.raises(UsageError, match="no backend 'nothing'"):
        repro.main(["duplicate-experts", "--moe-backend", "nothing"])
    with pytest.raises(UsageError, match="Did you mean 'triton'"):
        repro.main(["duplicate-experts", "--moe-backend", "tritn"])
    with pytest.raises(UsageError, match="invalid choice: 'other'"):
        repro.main(["other"])
    for count in ("0", "-4"):
        with pytest.raises(UsageError, match=f"--tokens {count}: at least 1"):
            repro.main(["duplicate-experts", "--moe-backend", "cpu", "--tokens", count])


def test_repro_of_a_backend_that_ran_nothing_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """AITER wants ROCm, which no machine of this project has."""
    from moeserve.bench import repro

    assert repro.main(["duplicate-experts", "--moe-backend", "aiter", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row["backend"], row["dtype"], row["outcome"]) for row in rows] == [
        ("aiter", "bfloat16", "refused"),
        ("aiter", "float8_e4m3fn", "refused"),
    ]
    assert all("does not support current device" in row["detail"] for row in rows)


def test_repro_runs_every_case_in_a_process_of_its_own() -> None:
    from moeserve.bench.repro import run_backend

    rows = {(r.dtype, r.case): r for r in run_backend("cpu", 16)}
    for case in ("one_expert", "nan_rows", "duplicate_ids"):
        assert rows["bfloat16", case].outcome == "ok"
        assert rows["bfloat16", case].detail.startswith("relative error")
    assert rows["float8_e4m3fn", ""].detail == "kernel does not support float8_e4m3fn weights"
