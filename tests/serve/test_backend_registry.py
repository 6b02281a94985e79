"""Platforms, libraries that are absent, backends of other packages, and the table of them all."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from moe_helpers import make_spec

from moeserve.errors import Unsupported, UsageError
from moeserve.moe import oracle
from moeserve.moe.backends import registry as registry_module
from moeserve.moe.backends.base import Backend
from moeserve.moe.backends.optional import library_reason
from moeserve.moe.backends.registry import GROUP, load_entry_points, registry
from moeserve.moe.oracle import select_unquantized_moe_backend
from moeserve.moe.platforms import MachineFacts, check_platform, detect_platform
from moeserve.moe.policy import TABLE
from moeserve.moe.report import support_table
from moeserve.moe.spec import PLATFORMS, MoESpec, RoutingSpec

EXAMPLE = Path(__file__).parent / "example_backend"
FI = "VLLM_USE_FLASHINFER_MOE_FP16"
FI_KIND = "VLLM_FLASHINFER_MOE_BACKEND"
AITER, AITER_MOE = "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"
QWEN3 = MoESpec(128, 2048, 768, RoutingSpec(8))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (MachineFacts(), "cpu"),
        (MachineFacts(has_gpu=True, capability=(9, 0)), "cuda-sm90"),
        (MachineFacts(has_gpu=True, capability=(10, 3)), "cuda-sm100"),
        (MachineFacts(has_gpu=True, capability=(12, 1)), "cuda-sm120"),
        (MachineFacts(has_gpu=True, capability=(9, 4), hip="6.3"), "rocm"),
        (MachineFacts(has_xpu=True), "xpu"),
        (MachineFacts(has_tpu=True), "tpu"),
        # An out-of-tree device that looks like CUDA is out of tree (vllm-plugin-FL#141).
        (MachineFacts(out_of_tree="npu", has_gpu=True, capability=(9, 0)), "oot"),
    ],
)
def test_a_machine_is_exactly_one_platform(facts: MachineFacts, expected: str) -> None:
    assert detect_platform(facts) == expected


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (11, 0), (13, 0)])
def test_an_unknown_gpu_raises(capability: tuple[int, int]) -> None:
    with pytest.raises(Unsupported, match=r"compute capability \d+\.\d+ is no platform"):
        detect_platform(MachineFacts(has_gpu=True, capability=capability))


def test_an_unknown_platform_raises_with_the_closest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'cuda-sm90'"):
        check_platform("cuda-sm9")


def test_missing_libraries_are_reasons() -> None:
    assert library_reason("nothing_of_that_name", "nothing-of-that-name") == (
        "nothing-of-that-name is not installed"
    )
    assert "is older than 999" in library_reason("torch", "torch", at_least=(999,))
    assert library_reason("torch", "torch", at_least=(2, 0)) == ""
    assert "needs Python 99.0" in library_reason("torch", "torch", python=(99, 0))
    assert "cannot be imported" in library_reason("not_a_module_of_torch", "torch")


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        (["torch>=2.0", "einops; extra == 'dev'"], ""),
        (["torch>=2.0", "torch<=1.9.1"], "strict-kernels 3.1 wants torch<=1.9.1, this is 2."),
        (["no-such-dsl==4.4.2"], "strict-kernels 3.1 wants no-such-dsl==4.4.2, which is not"),
    ],
)
def test_pins_that_do_not_fit_are_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pins: list[str], reason: str
) -> None:
    """Installed past its pins, as `pip install --no-deps` does, and importable all the same."""
    (tmp_path / "strict_kernels.py").write_text("")
    info = tmp_path / "strict_kernels-3.1.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: strict-kernels", "Version: 3.1"]
    lines += [f"Requires-Dist: {pin}" for pin in pins]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    library_reason.cache_clear()
    found = library_reason("strict_kernels", "strict-kernels", has_binding_pins=True)
    assert found.startswith(reason) if reason else found == ""
    assert library_reason("strict_kernels", "strict-kernels") == ""
    library_reason.cache_clear()


def test_sonicmoe_is_looked_up_by_the_name_it_is_published_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "sonic_moe-0.1.2.post1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sonic-moe\nVersion: 0.1.2.post1\n"
        "Requires-Dist: torch<=2.9.1,>=2.7.1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    library_reason.cache_clear()
    reason = registry().get("sonicmoe").missing()
    library_reason.cache_clear()
    assert reason.startswith("sonic-moe 0.1.2.post1 wants torch<=2.9.1,>=2.7.1, this is ")


def example_points() -> list[importlib.metadata.EntryPoint]:
    (distribution,) = importlib.metadata.distributions(path=[str(EXAMPLE)])
    return list(distribution.entry_points.select(group=GROUP))


@pytest.fixture
def with_example(monkeypatch: pytest.MonkeyPatch) -> registry_module.Registry:
    """The registry as if the example package were installed."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    in_tree = registry().in_tree
    extended = registry_module.Registry(in_tree, *load_entry_points(example_points(), in_tree))
    monkeypatch.setattr(oracle, "registry", lambda: extended)
    return extended


def test_an_out_of_tree_backend_wins_only_by_its_name(
    with_example: registry_module.Registry,
) -> None:
    assert list(with_example.out_of_tree) == ["example_dense"]
    assert with_example.names[-len(with_example.broken) - 1] == "example_dense"
    assert select_unquantized_moe_backend(make_spec()).primary in ("cpu_native", "cpu")
    assert select_unquantized_moe_backend(make_spec(), "example_dense").primary == "example_dense"
    oot = select_unquantized_moe_backend(make_spec(), "example_dense", "oot")
    assert oot.ranges == ((8192, "example_dense"),)
    with pytest.raises(Unsupported):
        select_unquantized_moe_backend(make_spec(), "auto", "oot")


def test_broken_out_of_tree_backends_are_reasons(with_example: registry_module.Registry) -> None:
    broken = with_example.broken
    assert "ModuleNotFoundError" in broken["example_missing"]
    assert "is no moeserve.moe.backends.base.Backend" in broken["example_not_a_backend"]
    assert "calls its backend 'example_dense'" in broken["example_misnamed"]
    with pytest.raises(Unsupported, match="ModuleNotFoundError"):
        select_unquantized_moe_backend(make_spec(), "example_missing")
    # A name of this tree cannot be taken over.
    assert "cpu" not in with_example.out_of_tree
    assert "cpu" not in broken


def test_every_backend_states_its_traits() -> None:
    for name, backend in registry().in_tree.items():
        assert isinstance(backend, Backend)
        traits = backend.traits
        assert traits.name == name
        assert traits.platforms <= set(PLATFORMS)
        assert traits.kernel_patterns
    never = {n for n, b in registry().in_tree.items() if not b.traits.was_executed}
    assert {"aiter", "flashinfer_trtllm"} <= never
    policy_names = {n for rule in TABLE for _, names in rule.ranges for n in names}
    assert policy_names <= set(registry().in_tree) | {"triton"}


def test_readme_has_the_generated_support_table() -> None:
    readme = Path(__file__).parents[2] / "kernels" / "README.md"
    assert support_table() in readme.read_text(encoding="utf-8")
