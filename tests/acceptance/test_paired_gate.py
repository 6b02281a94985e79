"""The paired gate from end to end: a baseline is saved and approved, a faulty build is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import HARDWARE, REPOSITORY

from evalsuite import baseline_store as store
from evalsuite.report.json_report import read
from evalsuite.verdict import Status, Verdict

pytest.importorskip("torch", reason="the bundled server needs torch")

# A layer's experts answer half as much again: three points of accuracy, which a tolerance of
# eight does not see.
FAULT = "layer-scale:0.5@1"
JOB = {
    "model_name": "moeserve/minigsm-tiny",
    "accuracy_threshold": 0.94,
    "tolerance": 0.08,
    "num_questions": 330,
    "num_fewshot": 5,
    "task": "minigsm",
    "gate": {"name": "paired", "alpha": 0.05, "power": 0.8},
    "baseline": "s__tiny",
    "provenance": {"source": "docs/embedded-model.md", "num_questions": 330},
}


def faulty(fault: str) -> dict[str, object]:
    """Keys of a job whose server has a fault."""
    return {
        "server_args": "--moe-backend faulty",
        "env": {
            "PYTHONPATH": str(REPOSITORY / "tests" / "serve" / "faulty_backend"),
            "MOESERVE_TEST_FAULT": fault,
        },
    }


class Folder:
    """A suite with one job, and the commands about it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.suite = path / "configs" / "s"
        self.suite.mkdir(parents=True)
        (self.suite.parent / "hardware.yaml").write_text(HARDWARE)
        (self.suite / "config-cpu.txt").write_text("tiny.yaml\n")

    def write(self, **keys: object) -> None:
        (self.suite / "tiny.yaml").write_text(json.dumps({**JOB, **keys}, indent=1))

    def call(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "evalsuite.cli", *args],
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def run(self) -> tuple[int, Verdict, Path]:
        known = set(self.path.glob("results/*"))
        done = self.call("run", "--config", "config-cpu.txt")
        (folder,) = set(self.path.glob("results/*")) - known
        print(done.stdout)
        (verdict,) = read(folder)
        return done.returncode, verdict, folder


@pytest.mark.slow
def test_a_faulty_build_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(gate="threshold", server_args="--moe-backend cpu")
    code, first, run = folder.run()
    assert (code, first.status) == (0, Status.PASS)

    folder.write(server_args="--moe-backend cpu")
    missing = folder.call("run", "--config", "config-cpu.txt")
    assert missing.returncode == 4
    assert "no approved baseline" in missing.stderr

    saved = folder.call("baseline", "save", "s/tiny", "--run", str(run), "--replay")
    assert saved.returncode == 0, saved.stderr
    (path,) = (tmp_path / "baselines").glob("*/*.json")
    approved = folder.call("baseline", "approve", "s/tiny", path.stem[:12])
    assert approved.returncode == 0, approved.stderr
    print(saved.stdout, approved.stdout)

    code, again, _ = folder.run()
    assert (code, again.status) == (0, Status.PASS)
    assert "(0 lost, 0 gained of 330)" in again.reason

    replayed = folder.call("replay", "s/tiny")
    print(replayed.stdout)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr

    # What no accuracy gate sees: the least of the four experts left out.
    folder.write(**faulty("slots-dropped:1"))
    subtle = folder.call("replay", "s/tiny")
    print(subtle.stdout)
    assert subtle.returncode == 1, subtle.stdout + subtle.stderr

    folder.write(**faulty(FAULT))
    code, verdict, _ = folder.run()
    assert (code, verdict.status) == (1, Status.FAIL)
    assert verdict.accuracy is not None
    # The floor alone would have let it pass.
    assert verdict.accuracy >= JOB["accuracy_threshold"] - JOB["tolerance"]  # type: ignore[operator]
    assert verdict.p_value is not None
    assert verdict.p_value <= 0.05
    assert len(verdict.detail["lost"]) >= 5  # type: ignore[arg-type]
    flips = verdict.detail["flips"]
    assert isinstance(flips, list)
    assert {flip["index"] for flip in flips} >= set(verdict.detail["lost"])  # type: ignore[call-overload]


def test_a_baseline_of_several_repeats(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    few = {"num_questions": 12, "provenance": {"source": "test", "num_questions": 12}}
    folder.write(server_args="--moe-backend cpu", **few)
    for words in ([], ["--run", "x", "--repeats", "2"], ["--repeats", "0"]):
        refused = folder.call("baseline", "save", "s/tiny", *words)
        assert refused.returncode == 4, refused.stdout + refused.stderr
        assert "--repeats" in refused.stderr
    saved = folder.call("baseline", "save", "s/tiny", "--repeats", "2", "--replay")
    assert saved.returncode == 0, saved.stdout + saved.stderr
    assert "over 2 repeat(s)" in saved.stdout
    assert "logprobs    12 of 12 answers" in saved.stdout
    (path,) = (tmp_path / "baselines").glob("*/*.json")
    made = store.load(path)
    assert made.repeats == 2
    assert {len(answer.outcomes) for answer in made.answers.values()} == {2}
    assert made.identity.model_revision.startswith("files:")
    for answer in made.answers.values():
        assert len(answer.logprobs) == len(answer.logprobs_again) > 10
        assert answer.logprob_noise is not None
        assert answer.logprob_noise < 1e-5
    assert folder.call("baseline", "approve", "s/tiny", path.stem[:12]).returncode == 0
    # Another prompt, and sampling: both are named.
    folder.write(server_args="--moe-backend cpu", **{**few, "num_fewshot": 4, "temperature": 0.5})  # type: ignore[arg-type]
    code, verdict, _ = folder.run()
    assert (code, verdict.status) == (4, Status.ERROR)
    for part in ("prompt_hash", "sampling.num_fewshot: 5 -> 4", "sampling.temperature: 0.0 -> 0.5"):
        assert part in verdict.reason


@pytest.mark.slow
def test_every_flip_of_a_sampled_run_is_explained(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    few = {"num_questions": 24, "provenance": {"source": "test", "num_questions": 24}}
    folder.write(server_args="--moe-backend cpu", **few)
    saved = folder.call("baseline", "save", "s/tiny", "--repeats", "1", "--replay")
    assert saved.returncode == 0, saved.stdout + saved.stderr
    (path,) = (tmp_path / "baselines").glob("*/*.json")
    assert folder.call("baseline", "approve", "s/tiny", path.stem[:12]).returncode == 0
    broken = {**few, **faulty("no-renormalisation:1"), "tolerance": 0.5}
    broken["gate"] = {"name": "paired", "alpha": 0.05, "early_end": False}
    folder.write(**broken)
    _, verdict, run = folder.run()
    lost = verdict.detail["lost"]
    assert isinstance(lost, list)
    assert lost
    replayed = folder.call("replay", "s/tiny", "--run", str(run))
    assert replayed.returncode == 1, replayed.stdout + replayed.stderr
    assert "two shifts agree by" in replayed.stdout
    notes = re.findall(
        r"flip (\d+) \(right -> wrong\): (near-tie|real): margin [+-][\d.]+ nats at token \d+",
        replayed.stdout,
    )
    assert [int(index) for index, _ in notes] == lost
    # The same build with room for other kernels: this fault is a loss all the same.
    allowed = folder.call("replay", "s/tiny", "--other-kernels")
    assert allowed.returncode == 1, allowed.stdout
    assert "two shifts agree" not in allowed.stdout
