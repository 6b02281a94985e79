"""Rendered steps that run the real suite: a miss, a crash, a config error, no jobs; soft or not."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ci_helpers import rendered, scripts
from run_helpers import Suite, statuses

from evalsuite.ci.plan import PlanRequest

HARDWARE = """\
cpu: {arch: cpu, gpus_per_node: 0, memory_gib: 8, vendor: cpu, timeout_minutes: 600,
  ci: {buildkite: {queue: cpu}, github: {runs_on: [cpu]}}}
b200: {arch: sm100, gpus_per_node: 8, memory_gib: 180, vendor: nvidia, timeout_minutes: 600,
  ci: {buildkite: {queue: b200}, github: {runs_on: [b200]}}}
"""
# What each job is, and the exit status that says so.
STATUS = {"pass": 0, "miss": 1, "crash": 75, "config": 4, "none": 5}


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "work").mkdir()
    suite = Suite(tmp_path / "work")
    (suite.root / "hardware.yaml").write_text(HARDWARE)
    command = suite.bin / "evalsuite"
    python = shlex.quote(sys.executable)
    command.write_text(f'#!/bin/bash\nexec {python} -P -m evalsuite.cli "$@"\n')
    command.chmod(0o755)
    return suite


def add(suite: Suite, kind: str) -> str:
    """One list with one job of a kind; the `--config` value."""
    args = {"pass": suite.right(), "crash": "--exit-code 1 --say 'Segmentation fault'"}
    pool = "b200" if kind == "none" else "cpu"
    suite.add(kind, args.get(kind, ""), pool=f"{pool}-{kind}")
    return f"config-{pool}-{kind}.txt"


def step_of(provider: str, suite: Suite, config: str, *, soft: bool) -> tuple[str, dict[Any, Any]]:
    request = PlanRequest(
        configs=(config,),
        root=suite.root,
        setup=("true",),
        run_args=("--stop-grace", "0.5"),
        num_retries=0,
        is_accuracy_soft=soft,
    )
    document = rendered(provider, request)
    (script,) = scripts(provider, document).values()
    return script, document


def run(suite: Suite, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=suite.folder,
        env={**suite.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("kind", sorted(STATUS))
def test_each_outcome_keeps_its_status_and_only_a_miss_can_be_soft(kind: str, suite: Suite) -> None:
    config = add(suite, kind)
    scripts = {
        (provider, soft): step_of(provider, suite, config, soft=soft)
        for provider, soft in (("buildkite", False), ("github", False), ("github", True))
        if not soft or STATUS[kind] in (1, 75)  # what a soft step forgives, and what it must not
    }
    if kind == "config":  # broken after the rendering, which would have refused it
        path = suite.root / "s" / "config.yaml"
        path.write_text(path.read_text().replace("num_fewshot", "num_fewshots"))
    for (provider, soft), (script, document) in scripts.items():
        for log in (suite.folder / "results").glob("*.log"):
            log.unlink()
        done = run(suite, script)
        is_forgiven = soft and kind == "miss"
        assert done.returncode == (0 if is_forgiven else STATUS[kind]), done.stdout + done.stderr
        assert ("::warning::soft failure" in done.stdout) == is_forgiven
        (log,) = (suite.folder / "results").glob("*.log")
        said = {
            "pass": "s/pass: PASS",
            "miss": "s/miss: FAIL",
            "crash": "| Segmentation fault",
            "config": "did you mean `num_fewshot`?",
            "none": "needs pool b200",
        }
        assert said[kind] in log.read_text()
        assert "soft_fail" not in str(document), provider
    _, soft = step_of("buildkite", suite, config, soft=True) if kind != "config" else ("", {})
    for step in soft.get("steps", ()):
        # By number: a crash, a config error and a run of no jobs stay hard.
        assert step["soft_fail"] == [{"exit_status": 1}]


@pytest.mark.parametrize(("soft", "status"), [(False, 1), (True, 75)])
def test_a_crash_beside_a_miss_is_not_forgiven_with_it(
    soft: bool, status: int, suite: Suite
) -> None:
    suite.add("miss", pool="cpu-both")
    suite.add("crash", "--exit-code 1", pool="cpu-both")
    script, _ = step_of("github", suite, "config-cpu-both.txt", soft=soft)
    done = run(suite, script)
    assert done.returncode == status, done.stdout + done.stderr
    (folder,) = (path.parent for path in suite.results.glob("*/results.json"))
    assert statuses(folder) == {"s/miss": "FAIL", "s/crash": "ERROR"}
