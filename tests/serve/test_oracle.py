"""The selector: table, names, switches, reasons and ranges of tokens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from moe_helpers import make_spec, on

from moeserve.errors import Unsupported, UsageError
from moeserve.moe import oracle, policy
from moeserve.moe.backends import registry as registry_module
from moeserve.moe.backends.registry import registry
from moeserve.moe.oracle import canonical_name, select_unquantized_moe_backend
from moeserve.moe.policy import ANY, TABLE, Rule, rule_for
from moeserve.moe.report import backend_report
from moeserve.moe.spec import PLATFORMS, MoESpec, RoutingSpec

EXAMPLE = Path(__file__).parent / "example_backend"
FI = "VLLM_USE_FLASHINFER_MOE_FP16"
FI_KIND = "VLLM_FLASHINFER_MOE_BACKEND"
AITER, AITER_MOE = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"
QWEN3 = MoESpec(128, 2048, 768, RoutingSpec(8))


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every optional library counts as present; what a backend supports is still its own word."""
    for backend in registry().in_tree.values():
        monkeypatch.setattr(type(backend), "missing", lambda self: "")


def chosen(platform: str, spec: MoESpec = QWEN3, env: dict[str, str] | None = None) -> str:
    return select_unquantized_moe_backend(spec, "auto", platform, env).primary


def test_policy_table_is_the_agreed_one() -> None:
    hopper = ("triton", "torch_grouped_mm", "flashinfer_trtllm", "flashinfer_cutlass", "sonicmoe")
    blackwell = ("flashinfer_trtllm", "flashinfer_cutlass", "triton", "torch_grouped_mm")
    odd = ("flashinfer_trtllm", "triton", "torch_grouped_mm", "flashinfer_cutlass")
    # A list, because the first row that fits is taken.
    golden = [
        ("cuda-sm90", "any layer", ((ANY, hopper),)),
        ("cuda-sm100", "I no multiple of 128", ((ANY, odd),)),
        ("cuda-sm100", "any layer", ((ANY, blackwell),)),
        ("cuda-sm120", "any layer", ((ANY, blackwell),)),
        ("rocm", "any layer", ((ANY, ("aiter", "triton")),)),
        ("xpu", "any layer", ((ANY, ("triton",)),)),
        ("cpu", "any layer", ((ANY, ("cpu_native", "cpu", "torch_grouped_mm")),)),
        ("tpu", "any layer", ((ANY, ()),)),
        ("oot", "any layer", ((ANY, ()),)),
    ]
    assert [(r.platform, r.condition, r.ranges) for r in TABLE] == golden
    # What the conditions say is what they do.
    narrow = on(QWEN3, platform="cuda-sm100", intermediate_size=704)
    assert rule_for(narrow).condition == "I no multiple of 128"
    assert rule_for(on(narrow, intermediate_size=768)).condition == "any layer"
    assert rule_for(on(narrow, platform="cuda-sm120")).condition == "any layer"


def test_every_platform_has_a_rule_that_ends_with_any() -> None:
    for platform in PLATFORMS:
        assert rule_for(on(QWEN3, platform=platform)).ranges[-1][0] == ANY


def test_a_hole_in_the_table_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "TABLE", ())
    with pytest.raises(LookupError, match="no rule"):
        rule_for(QWEN3)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("cuda-sm100", "flashinfer_trtllm"), ("cuda-sm120", "flashinfer_cutlass"), ("rocm", "aiter")],
)
def test_auto_with_every_library(all_installed: None, platform: str, expected: str) -> None:
    assert chosen(platform) == expected
    # Data parallelism demotes nothing: the router removed the cause.
    assert chosen(platform, on(QWEN3, dp_size=2)) == expected


def test_auto_without_libraries_says_why_each_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether it is installed here or not.
    cutlass = type(registry().get("flashinfer_cutlass"))
    monkeypatch.setattr(cutlass, "missing", lambda self: "flashinfer-python is not installed")
    plan = select_unquantized_moe_backend(QWEN3, "auto", "cuda-sm120")
    reasons = {r.backend: r.reason for r in plan.rejected}
    assert plan.primary in ("triton", "torch_grouped_mm")
    assert reasons["flashinfer_trtllm"] == "kernel does not support current device cuda-sm120"
    assert reasons["flashinfer_cutlass"] == "flashinfer-python is not installed"


@pytest.mark.parametrize(
    ("reason", "name"), [("", "cpu_native"), ("no C compiler on this machine", "cpu")]
)
def test_cpu_takes_the_native_experts_where_they_compile(
    monkeypatch: pytest.MonkeyPatch, reason: str, name: str
) -> None:
    monkeypatch.setattr(type(registry().get("cpu_native")), "missing", lambda self: reason)
    plan = select_unquantized_moe_backend(make_spec())
    assert plan.ranges == ((8192, name),)
    assert plan.requested == "auto"
    assert plan.considered == ("cpu_native", "cpu", "torch_grouped_mm")
    assert [r.reason for r in plan.rejected] == [reason] * bool(reason)
    assert select_unquantized_moe_backend(make_spec(dtype=torch.bfloat16)).primary == "cpu"


@pytest.mark.parametrize("platform", ["tpu", "oot"])
def test_tpu_and_out_of_tree_do_not_fall_through(platform: str) -> None:
    with pytest.raises(Unsupported, match=f"Platform {platform} has no backend in this build"):
        select_unquantized_moe_backend(QWEN3, "auto", platform)
    # A name is checked there as anywhere: upstream swallowed it (facts: bug class 33).
    with pytest.raises(UsageError, match="'bogus' is not supported for unquantized MoE"):
        select_unquantized_moe_backend(QWEN3, "bogus", platform)
    with pytest.raises(
        Unsupported, match=f"since kernel does not support current device {platform}"
    ):
        select_unquantized_moe_backend(QWEN3, "torch_grouped_mm", platform)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (None, "auto"),
        ("AUTO", "auto"),
        ("FlashInfer CUTLASS", "flashinfer_cutlass"),
        ("flashinfer-trtllm", "flashinfer_trtllm"),
        ("ROCm AITER", "aiter"),
        ("CPU", "cpu"),
    ],
)
def test_the_fields_spellings(spelling: str | None, name: str) -> None:
    assert canonical_name(spelling) == name


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"Expected one of \['auto'.*'cpu'.*Did you mean 'aiter'"):
        canonical_name("aitr")
    with pytest.raises(UsageError, match="deep_gemm: it computes FP8 experts only"):
        canonical_name("deep_gemm")


@pytest.mark.parametrize(
    ("name", "platform", "fields", "reason"),
    [
        ("flashinfer_cutlass", "cuda-sm90", {"intermediate_size": 100}, "I=100, no multiple of 8"),
        ("flashinfer_cutlass", "cuda-sm90", {"ep_size": 3}, "128 experts on ep_size=3"),
        ("flashinfer_cutlass", "cuda-sm90", {"dtype": torch.float32}, "float32 weights"),
        ("flashinfer_cutlass", "cuda-sm90", {"is_deterministic": True}, "batch invariance"),
        ("flashinfer_cutlass", "cuda-sm90", {"max_num_tokens": 2**22}, "over int32"),
        ("flashinfer_trtllm", "cuda-sm90", {}, "current device cuda-sm90"),
        (
            "flashinfer_trtllm",
            "cuda-sm100",
            {"intermediate_size": 704},
            "I=704, no multiple of 128",
        ),
        ("flashinfer_trtllm", "cuda-sm100", {"num_experts": 126}, "126 experts with top_k=8"),
        ("flashinfer_trtllm", "cuda-sm100", {"activation": "relu2"}, "relu2 activation"),
        ("aiter", "rocm", {"hidden_size": 2040}, "H=2040, no multiple of 32"),
        ("sonicmoe", "cuda-sm90", {"ep_size": 2}, "parallel config with ep_size=2"),
        ("sonicmoe", "cuda-sm90", {"needs_graph": True}, "capture in a CUDA graph"),
        ("torch_grouped_mm", "cuda-sm90", {"hidden_size": 2044}, "H=2044, no multiple of 8"),
        ("torch_grouped_mm", "cuda-sm90", {"is_deterministic": True}, "batch invariance"),
        ("cpu", "cpu", {"needs_graph": True}, "capture in a CUDA graph"),
    ],
)
def test_an_explicit_name_is_honoured_or_raises(
    all_installed: None, name: str, platform: str, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(Unsupported) as error:
        select_unquantized_moe_backend(on(QWEN3, **fields), name, platform)
    text = str(error.value)
    assert text.startswith(f"Unquantized MoE backend {name} does not support the deployment")
    assert reason in text


def test_weight_on_the_input_is_refused_where_it_is_not_done(all_installed: None) -> None:
    llama4 = RoutingSpec(1, scoring="sigmoid", is_renormalized=False, weight_on_input=True)
    with pytest.raises(Unsupported, match="weight on the input"):
        select_unquantized_moe_backend(on(QWEN3, routing=llama4), "flashinfer_cutlass", "cuda-sm90")


SWITCH_CASES = [
    ({}, "cuda-sm100", "flashinfer_trtllm"),
    ({FI: "1"}, "cuda-sm100", "flashinfer_trtllm"),
    ({FI: "1"}, "cuda-sm90", "flashinfer_cutlass"),
    ({FI: "1", FI_KIND: "throughput"}, "cuda-sm100", "flashinfer_cutlass"),
    ({FI: "1", FI_KIND: "latency"}, "cuda-sm100", "flashinfer_trtllm"),
    ({FI: "1", FI_KIND: "latency"}, "cuda-sm90", "flashinfer_cutlass"),
    ({FI_KIND: "throughput"}, "cuda-sm100", "flashinfer_trtllm"),  # no effect alone
    ({AITER: "1"}, "rocm", "aiter"),
    ({AITER: "1", AITER_MOE: "1"}, "rocm", "aiter"),
    ({FI: ""}, "cuda-sm100", "flashinfer_trtllm"),  # empty is unset
]


@pytest.mark.parametrize(("env", "platform", "expected"), SWITCH_CASES)
def test_switches(all_installed: None, env: dict[str, str], platform: str, expected: str) -> None:
    assert chosen(platform, env=env) == expected


def test_switches_that_take_backends_out(all_installed: None) -> None:
    plan = select_unquantized_moe_backend(QWEN3, "auto", "cuda-sm100", {FI: "0"})
    assert plan.primary in ("triton", "torch_grouped_mm")
    reasons = {r.backend: r.reason for r in plan.rejected}
    assert reasons["flashinfer_trtllm"] == f"taken out by {FI}=0"
    for env in ({AITER: "0"}, {AITER: "1", AITER_MOE: "0"}, {AITER_MOE: "1"}):
        refused = backend_report(QWEN3, "auto", "rocm", env)
        assert refused.plan is None or refused.plan.primary != "aiter"
        text = refused.error or str(refused.plan)
        assert "taken out by VLLM_ROCM_USE_AITER" in text


@pytest.mark.parametrize(
    ("env", "platform", "kind", "message"),
    [
        ({FI: "1", FI_KIND: "masked_gemm"}, "cuda-sm90", UsageError,
         "FlashInfer MOE backend masked_gemm does not support unquantized MoE."),
        ({FI: "1", FI_KIND: "throughputt"}, "cuda-sm90", UsageError, "Did you mean 'throughput'"),
        ({FI: "yes please"}, "cuda-sm90", UsageError, "expected 0 or 1"),
        ({FI: "1"}, "cpu", Unsupported, f"Found {FI}=1, but no FlashInfer unquantized MoE backend"),
        # A switch for ROCm on a CUDA machine is a demand that cannot be met, not noise.
        ({AITER: "1"}, "cuda-sm90", Unsupported, "Unquantized MoE backend aiter does not support"),
        ({AITER: "1"}, "oot", Unsupported, "Unquantized MoE backend aiter does not support"),
    ],
)  # fmt: skip
def test_switches_that_cannot_be_met(
    env: dict[str, str], platform: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as error:
        select_unquantized_moe_backend(QWEN3, "auto", platform, env)
    assert message in str(error.value)


def test_a_name_beats_the_switches(all_installed: None) -> None:
    env = {FI: "1", AITER: "1"}
    plan = select_unquantized_moe_backend(QWEN3, "torch_grouped_mm", "cuda-sm90", env)
    assert plan.primary == "torch_grouped_mm"
    assert plan.reason == "torch_grouped_mm was asked for by name"


def test_ranges_share_the_layout_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_for(*ranges: tuple[int, tuple[str, ...]]) -> tuple[tuple[int, str], ...]:
        monkeypatch.setattr(policy, "TABLE", (Rule("cpu", "test", ranges),))
        return select_unquantized_moe_backend(make_spec(max_num_tokens=512)).ranges

    assert plan_for((16, ("torch_grouped_mm",)), (ANY, ("cpu",))) == (
        (16, "torch_grouped_mm"),
        (512, "cpu"),
    )
    assert plan_for((16, ("cpu",)), (ANY, ("cpu",))) == ((512, "cpu"),)
    # A range without a choice of its own is served by its neighbour.
    assert plan_for((16, ("aiter",)), (ANY, ("cpu",))) == ((512, "cpu"),)
    assert plan_for((16, ("cpu",)), (ANY, ("aiter",))) == ((512, "cpu"),)
    assert plan_for((1024, ("cpu",)), (ANY, ("torch_grouped_mm",))) == ((512, "cpu"),)

    class Odd(type(registry().get("cpu"))):  # type: ignore[misc]
        layout = "odd"

    backends = {**registry().in_tree, "cpu": Odd()}
    with_odd = registry_module.Registry(backends, {}, {})
    monkeypatch.setattr(oracle, "registry", lambda: with_odd)
    assert plan_for((16, ("cpu",)), (ANY, ("torch_grouped_mm",))) == ((512, "torch_grouped_mm"),)


def test_plan_picks_by_tokens() -> None:
    plan = select_unquantized_moe_backend(make_spec(), "cpu")
    assert plan.backend_for(1) == plan.backend_for(10**6) == "cpu"


def test_choice_and_refusals_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "_logged", set())
    with caplog.at_level(logging.INFO, logger="moeserve.moe.oracle"):
        for _ in range(3):
            select_unquantized_moe_backend(make_spec(hidden_size=36), "cpu")
            select_unquantized_moe_backend(QWEN3, "auto", "cuda-sm90", {FI: "0"})
    first = [m for m in caplog.messages if m.startswith("Using CPU Unquantized MoE backend")]
    assert first == ["Using CPU Unquantized MoE backend out of potential backends: ['cpu']."]
    refusal = f"MoE backend flashinfer_cutlass not used: taken out by {FI}=0"
    assert caplog.messages.count(refusal) == 1
