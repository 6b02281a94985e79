"""A small folder of configs, and the shell text of rendered steps."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from evalsuite.ci.plan import PlanRequest, pipelines
from evalsuite.ci.render import render

HARDWARE = """\
b200: {arch: sm100, vendor: nvidia, gpus_per_node: 8, memory_gib: 179, timeout_minutes: 240,
  ci: {buildkite: {queue: b200}, github: {runs_on: [self-hosted, b200]}}}
h100: {arch: sm90, vendor: nvidia, gpus_per_node: 8, memory_gib: 79.6, timeout_minutes: 240,
  ci: {buildkite: {queue: h100, concurrency: 2}, github: {runs_on: [self-hosted, h100]}}}
cpu: {arch: cpu, vendor: cpu, gpus_per_node: 0, memory_gib: 7, timeout_minutes: 30,
  ci: {buildkite: {queue: cpu}, github: {runs_on: [ubuntu-latest]}}}
"""
YAML = """\
model_name: acme/model
accuracy_threshold: 0.8
num_questions: 100
num_fewshot: 5
task: minigsm
server_args: --tensor-parallel-size 2
"""


def write_configs(
    root: Path, lists: dict[str, list[str]], hardware: str = HARDWARE, extra: str = ""
) -> Path:
    """`{"suite/config-h100.txt": ["a", "b"]}` -> a folder of configs with a YAML for each name."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "hardware.yaml").write_text(hardware)
    for name, stems in lists.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{stem}.yaml\n" for stem in stems), encoding="utf-8")
        for stem in stems:
            (path.parent / f"{stem}.yaml").write_text(YAML + extra)
    return root


def rendered(provider: str, request: PlanRequest, pipeline: str = "nightly") -> dict[Any, Any]:
    """One pipeline as its provider reads it."""
    (built,) = (item for item in pipelines(request) if item.name == pipeline)
    loaded = yaml.safe_load(render(provider, built, "# made by a test").text)
    assert isinstance(loaded, dict)
    return loaded


def scripts(provider: str, document: dict[Any, Any]) -> dict[str, str]:
    """Key of each step -> the text that its shell gets."""
    if provider == "buildkite":
        # What the upload does to an escaped dollar.
        return {step["key"]: step["command"].replace("$$", "$") for step in document["steps"]}
    return {
        key: step["run"]
        for key, job in document["jobs"].items()
        for step in job["steps"]
        if step.get("name") == "Run"
    }


class Repository:
    """A git repository with two suites; every change is a commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        write_configs(
            root / "configs",
            {"suite/config-h100.txt": ["a", "b", "é"], "other/config-b200.txt": ["c"]},
        )
        for name in ("vllm/x.py", "vllm2/x.py", "docs/x.md", "evalsuite/client.py"):
            self.write(name, "old\n" * 20)
        self.git("init", "-q", "-b", "main")
        self.base = self.commit()

    def git(self, *argv: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(
            ["git", *identity, *argv], cwd=self.root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "change")
        return self.git("rev-parse", "HEAD")

    def merge(self) -> None:
        """Make what is there now the state that the next change goes into."""
        self.base = self.commit()
        self.git("branch", "-q", "-f", "main")
