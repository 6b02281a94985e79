"""How long the suite itself takes: a whole run against a server that answers at once.

CPU time gates, user and system, because a loaded machine's clock says nothing; on an idle one the
clock shows little more.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import Action, FakeServer, Request

from evalsuite import tasks
from evalsuite.tasks.base import DataSource, TaskSettings

NUM_QUESTIONS = 1319
CONCURRENCY = 256


def right_answers() -> Callable[[Request], Action]:
    samples = tasks.get("minigsm").samples(TaskSettings(NUM_QUESTIONS, 5, "", DataSource()))
    right = {sample.prompt: f" The answer is {sample.target}." for sample in samples}
    return lambda request: Action(texts=tuple(right[p] for p in request.prompts))


def write_job(folder: Path, num_questions: int) -> None:
    job = {
        "model_name": "fake", "accuracy_threshold": 0.9, "tolerance": 0.02,
        "num_questions": num_questions, "num_fewshot": 5, "task": "minigsm",
        "max_concurrency": CONCURRENCY, "provenance": "test",
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job))


def cpu_seconds_of_run(folder: Path, url: str) -> tuple[float, float, dict[str, object]]:
    """CPU and clock seconds of one `evalsuite run`, and its verdict."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "evalsuite.cli", "run", "job.yaml", "--base-url", url],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    clock = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "results").iterdir()
    verdict: dict[str, object] = json.loads((run / "results.json").read_text())["verdicts"][0]
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, clock, verdict


@pytest.mark.parametrize(
    "num_questions", [100, pytest.param(NUM_QUESTIONS, marks=pytest.mark.slow)]
)
def test_a_whole_run_takes_less_than_five_seconds_of_cpu(
    tmp_path: Path, num_questions: int
) -> None:
    write_job(tmp_path, num_questions)
    with FakeServer(right_answers()) as server:
        cpu, clock, verdict = cpu_seconds_of_run(tmp_path, server.url)
    print(f"{num_questions} questions: {cpu:.2f} s of CPU, {clock:.2f} s by the clock")
    assert verdict["accuracy"] == 1.0
    assert len(server.requests) == num_questions
    assert cpu < 5.0
