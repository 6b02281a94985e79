"""A suite folder whose engine is a scripted server: `vllm` on the PATH is a stub.

Used by the tests of the pipeline, the command line and the pytest plugin. The job's server
arguments are the stub's options, so that a YAML scripts the misbehaviour.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from evalsuite import tasks
from evalsuite.tasks.base import DataSource, TaskSettings

REPOSITORY = Path(__file__).resolve().parents[2]
STUB = REPOSITORY / "tests" / "evals" / "stub_servers.py"
NUM_QUESTIONS = 30

HARDWARE = """\
cpu: {arch: cpu, gpus_per_node: 0, memory_gib: 8, vendor: cpu, timeout_minutes: 10}
b200: {arch: sm100, gpus_per_node: 8, memory_gib: 180, vendor: nvidia, timeout_minutes: 60}
"""


class Suite:
    """`configs/` with one suite `s`, a fake `vllm`, and the right answers of MiniGSM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "configs"
        (self.root / "s").mkdir(parents=True)
        (self.root / "hardware.yaml").write_text(HARDWARE)
        self.results = folder / "results"
        self.bin = folder / "bin"
        self.bin.mkdir()
        command = self.bin / "vllm"
        # Through the shell: a `#!` line cannot hold an interpreter whose path has a blank.
        stub = shlex.join([sys.executable, str(STUB)])
        command.write_text(
            f'#!/bin/sh\nshift\nmodel=$1\nshift\nexec {stub} --model "$model" "$@"\n'
        )
        command.chmod(0o755)
        self.answers = folder / "answers.json"
        samples = tasks.get("minigsm").samples(TaskSettings(NUM_QUESTIONS, 1, "", DataSource()))
        right = {sample.prompt: f" The answer is {sample.target}." for sample in samples}
        self.answers.write_text(json.dumps(right))

    @property
    def environ(self) -> dict[str, str]:
        """Environment with the fake engine first on the PATH."""
        return {
            **os.environ,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            # Hypothesis loads all of itself at the end of each pytest run: a second of waiting.
            "PYTEST_ADDOPTS": "-p no:hypothesispytest",
        }

    def add(self, name: str, args: str = "", pool: str = "cpu", **keys: object) -> Path:
        """Write a job and add it to its list; right answers unless `args` say otherwise."""
        values = {
            "model_name": "stub",
            "accuracy_threshold": 0.9,
            "tolerance": 0.2,
            "num_questions": NUM_QUESTIONS,
            "num_fewshot": 1,
            "task": "minigsm",
            "engine": "vllm",
            "startup_max_wait_seconds": 20,
            "max_retries": 1,
            "provenance": {"source": "test", "num_questions": NUM_QUESTIONS},
            "server_args": args,
            **keys,
        }
        path = self.root / "s" / f"{name}.yaml"
        path.write_text(json.dumps(values, indent=1))
        with (self.root / "s" / f"config-{pool}.txt").open("a") as file:
            file.write(f"{name}.yaml\n")
        return path

    def right(self) -> str:
        """Server arguments for right answers."""
        return f"--answers {self.answers}"

    def run(
        self, *args: str, program: tuple[str, ...] = ("-m", "evalsuite.cli"), timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line in the suite's folder."""
        return subprocess.run(
            [sys.executable, *program, *args],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run_folder(self) -> Path:
        """The one run folder there is."""
        (found,) = self.results.iterdir()
        return found


def is_alive(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def pids_in(path: Path) -> list[int]:
    """Pids that stubs noted."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for a condition, fail after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.02)


def statuses(results: Mapping[str, object] | Path) -> dict[str, str]:
    """Job id -> status of a run folder."""
    data = json.loads((Path(str(results)) / "results.json").read_text())
    return {verdict["job_id"]: verdict["status"] for verdict in data["verdicts"]}
