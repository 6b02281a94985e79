"""The embedded model on two ranks of this machine: every layout passes, seen on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import REPOSITORY

pytest.importorskip("torch", reason="the bundled server needs torch")
SUITE = REPOSITORY / "configs" / "parallel-cpu"
LAYOUTS = {
    "tp2": {"tensor_parallel_size": 2, "data_parallel_size": 1, "expert_parallel_size": 1},
    "tep2": {"tensor_parallel_size": 2, "data_parallel_size": 1, "expert_parallel_size": 2},
    "dp2": {"tensor_parallel_size": 1, "data_parallel_size": 2, "expert_parallel_size": 1},
    "dep2": {"tensor_parallel_size": 1, "data_parallel_size": 2, "expert_parallel_size": 2},
}


@pytest.mark.slow
def test_every_layout_passes_with_its_kernels_seen_on_both_ranks(tmp_path: Path) -> None:
    config = ("--config", "config-cpu-parallel.txt", "--results", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "evalsuite.cli", "run", "--configs-root", "configs", *config],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.iterdir()
    verdicts = json.loads((run / "results.json").read_text())["verdicts"]
    assert len(verdicts) == len(LAYOUTS)
    for verdict, (name, sizes) in zip(verdicts, LAYOUTS.items(), strict=True):
        evidence = verdict["evidence"]
        assert (verdict["status"], evidence["executed"]) == ("PASS", "cpu"), name
        backends = evidence["detail"]["backends"]
        assert backends["parallel"] == sizes
        assert [rank["rank"] for rank in backends["ranks"]] == [0, 1]
        assert verdict["accuracy"] >= 0.96


def test_a_bare_name_does_not_run_these() -> None:
    assert [path.name for path in SUITE.glob("*.txt")] == ["config-cpu-parallel.txt"]
    assert not list(REPOSITORY.glob("configs/moe-refactor*/config-cpu-parallel.txt"))
