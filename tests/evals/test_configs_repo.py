"""The configs of this repository: what is covered, on which pool, and that all of it is valid."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from evalsuite import names
from evalsuite.config import EvalConfig, load_config
from evalsuite.config_checks import TEST_SET_SIZE
from evalsuite.hardware import load_hardware
from evalsuite.layout import layout_of
from evalsuite.lists import list_files, read_list
from evalsuite.model_sizes import MODEL_SIZES
from evalsuite.server_args import flag_values

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
OURS = ("moe-refactor", "moe-refactor-dp-ep")
QWEN3, MIXTRAL = "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"
SCOUT, QWEN35 = "meta-llama/Llama-4-Scout-17B-16E-Instruct", "Qwen/Qwen3.5-35B-A3B"
THRESHOLDS = {QWEN3: 0.88, MIXTRAL: 0.58, SCOUT: 0.92, QWEN35: 0.84}


@cache
def listed(suite: str, name: str) -> dict[str, EvalConfig]:
    found = read_list(CONFIGS / suite / name, CONFIGS)
    assert not found.problems
    return {entry.path.stem: load_config(entry.path) for entry in found.entries}


def cells(suite: str, pool: str) -> set[tuple[str, str, str]]:
    """(model, backend, layout) of a pool's list; each once."""
    found = [
        (
            config.model_name,
            str(flag_values(config.server_args, ("--moe-backend",))[0]),
            str(layout_of(config)),
        )
        for config in listed(suite, f"config-{pool}.txt").values()
    ]
    assert len(set(found)) == len(found)
    return set(found)


def grid(
    models: tuple[str, ...], backends: tuple[str, ...], kind: str
) -> set[tuple[str, str, str]]:
    layouts = (f"{kind}2", f"{kind}2+EP")
    return {(m, b, layout) for m in models for b in backends for layout in layouts}


def test_the_whole_tree_is_strictly_valid_in_two_seconds() -> None:
    num_configs = len([path for path in CONFIGS.rglob("*.yaml") if path.name != "hardware.yaml"])
    num_lists = len(list(CONFIGS.rglob("config-*.txt")))
    assert num_configs >= 117
    seconds = []
    # Processor time, and the best of three: other processes may hold the cores.
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "evalsuite.cli", "validate", "configs", "--strict"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=REPOSITORY,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert f"{num_configs} configs in {num_lists} lists: 0 errors" in done.stdout
    assert min(seconds) < 2


def test_every_cell_runs_on_exactly_one_nvidia_pool() -> None:
    three = ("triton", "flashinfer_cutlass", "flashinfer_trtllm")
    wanted = {
        "moe-refactor": grid((QWEN3, MIXTRAL, SCOUT), three, "TP"),
        "moe-refactor-dp-ep": grid((QWEN3, QWEN35), three, "DP"),
    }
    for suite, cells_wanted in wanted.items():
        b200, h100 = cells(suite, "b200"), cells(suite, "h100")
        assert b200 | h100 == cells_wanted
        assert not b200 & h100
        assert abs(len(b200) - len(h100)) <= 2
        assert not [cell for cell in h100 if cell[1] == "flashinfer_trtllm" or cell[0] == SCOUT]
    assert cells("moe-refactor", "rocm") == grid((QWEN3, MIXTRAL, SCOUT), ("aiter",), "TP")
    assert cells("moe-refactor-dp-ep", "rocm") == grid((QWEN3, QWEN35), ("aiter",), "DP")


@pytest.mark.parametrize("suite", OURS)
def test_ours_name_everything_that_gives_a_threshold_its_meaning(suite: str) -> None:
    for path in sorted((CONFIGS / suite).glob("*.yaml")):
        config = load_config(path)
        assert {"task", "evaluator", "metric", "calibration"} <= config.model_fields_set, path
        # A file that is calibrated has the tolerance that its noise gave.
        is_measured = config.calibration != "uncalibrated"
        assert config.tolerance < 0.02 if is_measured else config.tolerance == 0.02
        assert config.metric == "last-number"
        assert config.provenance
        assert config.engine == "moeserve"
        assert config.expect_backend is not None
        flag = flag_values(config.server_args, ("--moe-backend",))
        assert flag == [config.expect_backend.name]
        assert not config.has_remote_code
        if config.model_name in THRESHOLDS:
            assert config.accuracy_threshold == THRESHOLDS[config.model_name]
            assert (config.num_questions, config.num_fewshot) == (1319, 5)
            assert "upstream" in str(config.provenance)


def test_the_cpu_list_runs_the_embedded_model_on_two_backends() -> None:
    configs = listed("moe-refactor", "config-cpu.txt")
    assert {config.model_name for config in configs.values()} == {"moeserve/minigsm-tiny"}
    backends = {config.expect_backend.name for config in configs.values() if config.expect_backend}
    assert backends == {"cpu", "torch_grouped_mm"}
    assert all(config.task == "minigsm" for config in configs.values())
    assert all(config.num_questions >= 300 for config in configs.values())


def test_the_fields_own_configurations_are_here() -> None:
    tp = [load_config(path) for path in (CONFIGS / "upstream-moe-refactor").glob("*.yaml")]
    dp = [load_config(path) for path in (CONFIGS / "upstream-moe-refactor-dp-ep").glob("*.yaml")]
    assert (len(tp), len(dp)) == (45, 23)
    assert {config.engine for config in tp + dp} == {"vllm"}
    assert {config.tolerance for config in tp + dp} == {0.08}
    assert all(str(config.provenance).startswith("upstream") for config in tp + dp)
    assert Counter(config.accuracy_threshold for config in dp) == {
        0.88: 17,
        0.85: 4,
        0.79: 1,
        0.92: 1,
    }
    assert Counter(config.accuracy_threshold for config in tp)[0.29] == 5
    waits = Counter(config.startup_max_wait_seconds for config in dp)
    assert waits == {1200.0: 20, 2400.0: 3}


def test_every_list_is_for_a_pool_but_the_unlisted_ones() -> None:
    hardware = load_hardware(CONFIGS / "hardware.yaml")
    without = [
        path.name
        for suite in CONFIGS.iterdir()
        if suite.is_dir()
        for path in list_files(suite)
        if hardware.pool_of_list(path.name) is None
    ]
    assert without == ["config-upstream-unlisted.txt"] * 2


def test_the_size_of_every_model_of_ours_is_known() -> None:
    for suite in OURS:
        for name in ("config-b200.txt", "config-h100.txt", "config-rocm.txt"):
            for config in listed(suite, name).values():
                assert config.model_name in MODEL_SIZES


def test_the_reference_names_every_key_engine_and_task() -> None:
    text = (REPOSITORY / "docs/config.md").read_text()
    keys = re.findall(r"^\| `(\w+)` \|", text.partition("## server_args")[0], re.MULTILINE)
    assert sorted(keys) == sorted(EvalConfig.model_fields)
    for kind in ("engine", "task", "evaluator"):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{kind}` |"))
        words = row.split("|")[2].replace(" ", "").split(",")
        assert sorted(words) == sorted(names.known(kind))


def test_every_task_has_a_known_size() -> None:
    assert set(TEST_SET_SIZE) == set(names.known("task"))
