"""Kernels compiled before they are launched, by a process of their own or without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.runner import compile_process
from moeserve.runner.compile_process import CompileProcess

SCRIPT = Path(__file__).parents[1] / "support" / "compile_without_gpu.py"


def compiled(how: str, cache: Path) -> tuple[dict[str, object], str, set[str]]:
    """What the script printed, what it logged, and names of what lies in the cache."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), how],
        env={**env, "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return printed, done.stderr, {path.name for path in cache.iterdir()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache as an engine without the process has left it."""
    folder = tmp_path_factory.mktemp("alone")
    printed, _, _ = compiled("alone", folder)
    assert printed == {"found": 0, "made": 3, "error": ""}
    return folder


def test_the_process_leaves_on_disk_what_the_engine_would_have_made(
    tmp_path: Path, cache: Path
) -> None:
    by_process, logged, found = compiled("process", tmp_path)
    assert by_process == {"found": 3, "made": 0, "error": ""}
    assert "3 compiled by a process of their own" in logged
    assert found == {path.name for path in cache.iterdir()}


def test_a_process_that_dies_only_costs_its_help(tmp_path: Path) -> None:
    printed, _, _ = compiled("dying", tmp_path)
    assert printed == {"found": 0, "made": 3, "error": ""}


def test_a_kernel_that_cannot_be_compiled_fails_where_it_was_asked_for(tmp_path: Path) -> None:
    printed, logged, _ = compiled("faulty", tmp_path)
    assert "power of 2" in str(printed["error"])
    assert "a kernel did not compile ahead" in logged
    assert printed["found"] == 3


def test_the_process_is_not_asked_for_what_is_on_disk(cache: Path) -> None:
    printed, logged, _ = compiled("process", cache)
    assert printed == {"found": 3, "made": 0, "error": ""}
    assert "3 Triton kernels" in logged
    assert "0 compiled by a process of their own" in logged


@pytest.mark.parametrize(
    ("has_gpu", "cores", "starts"), [(True, 16, True), (False, 16, False), (True, 2, False)]
)
def test_the_process_is_started_where_it_pays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_gpu: bool, cores: int, starts: bool
) -> None:
    device = tmp_path / "nvidiactl"
    if has_gpu:
        device.touch()
    monkeypatch.setattr(compile_process, "GPU_DEVICES", (device,))
    monkeypatch.setattr(compile_process, "num_cores", lambda: cores)
    begun = []
    monkeypatch.setattr(CompileProcess, "start", classmethod(lambda cls: begun.append(cls)))
    CompileProcess.start_if_useful()
    assert bool(begun) == starts


def test_samples_hold_every_graph_and_begin_with_the_largest_step() -> None:
    from moeserve.runner.compile_ahead import sample_steps

    steps = sample_steps(24, 100, [1, 2, 3, 24])
    assert steps[0][0].num_tokens == 100
    decodes = [(sizes.num_decodes, shared) for sizes, shared in steps if sizes.num_decodes]
    assert len(decodes) == len(set(decodes))
    for shared in (False, True):
        mine = [rows for rows, s in decodes if s == shared]
        assert mine == [16, 8, 4, 2, 1, 24, 3]
