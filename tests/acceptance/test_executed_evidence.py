"""Evidence of level `executed` from the bundled server: the right backend passes, another never."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from run_helpers import HARDWARE

from evalsuite.report.json_report import read
from evalsuite.verdict import Status, Verdict
from moeserve.native.build import native

pytest.importorskip("torch", reason="the bundled server needs torch")

JOB = {
    "model_name": "moeserve/minigsm-tiny",
    "accuracy_threshold": 0.5,
    "num_questions": 6,
    "num_fewshot": 5,
    "task": "minigsm",
    "gate": {"name": "threshold", "early_end": False},
    "provenance": {"source": "test", "num_questions": 6},
}
# What the server takes by itself on a CPU.
CHOSEN = "cpu" if native().reason else "cpu_native"
JOBS = {
    "cpu-as-expected": ("--moe-backend cpu", "cpu"),
    "grouped-as-expected": ("--moe-backend torch_grouped_mm", "torch_grouped_mm"),
    # No flag: the server chooses, and one of the two expectations is wrong. (A flag that
    # contradicts the expectation is refused before anything starts.)
    "free-and-cpu-expected": ("", CHOSEN),
    "free-and-grouped-expected": ("", "torch_grouped_mm"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """One run of all jobs; two of them share a server."""
    folder = tmp_path_factory.mktemp("executed")
    suite = folder / "configs" / "s"
    suite.mkdir(parents=True)
    (suite.parent / "hardware.yaml").write_text(HARDWARE)
    for name, (args, expected) in JOBS.items():
        values = {**JOB, "server_args": args, "expect_backend": {"name": expected}}
        values["expect_backend"]["level"] = "executed"  # type: ignore[index]
        (suite / f"{name}.yaml").write_text(json.dumps(values))
    (suite / "config-cpu.txt").write_text("".join(f"{name}.yaml\n" for name in JOBS))
    done = subprocess.run(
        [sys.executable, "-m", "evalsuite.cli", "run", "--config", "config-cpu.txt"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 75, done.stdout + done.stderr
    (run,) = (folder / "results").iterdir()
    return {verdict.job_id: verdict for verdict in read(run)}


@pytest.mark.parametrize("name", ["cpu-as-expected", "grouped-as-expected"])
def test_the_expected_backend_was_seen_in_every_layer(
    verdicts: dict[str, Verdict], name: str
) -> None:
    verdict = verdicts[f"s/{name}"]
    assert verdict.status is Status.PASS, verdict.reason
    expected = JOBS[name][1]
    levels = verdict.evidence
    assert [levels.declared, levels.logged, levels.executed] == [expected] * 3
    assert levels.detail["kernels"] == {
        "rank 0 prefill": expected,
        "rank 0 decode": expected,
    }
    seen = levels.detail["evidence"]
    assert isinstance(seen, dict)
    assert seen["num_moe_layers"] == 4
    assert [seen["ranks"][0][phase]["num_tokens"] for phase in ("prefill", "decode")] == [128, 1]


def test_another_backend_is_an_error_with_the_three_levels(verdicts: dict[str, Verdict]) -> None:
    pair = [verdicts["s/free-and-cpu-expected"], verdicts["s/free-and-grouped-expected"]]
    assert sorted(verdict.status for verdict in pair) == [Status.ERROR, Status.PASS]
    right, wrong = sorted(pair, key=lambda verdict: verdict.status is Status.ERROR)
    ran = right.evidence.executed
    assert (right.evidence.logged, wrong.evidence.executed) == (ran, ran)
    (other,) = {CHOSEN, "torch_grouped_mm"} - {ran}
    assert wrong.accuracy is None
    assert wrong.reason.startswith(f"expect_backend names {other!r} and executed is {ran!r} (")
    assert f"declared {wrong.evidence.declared or 'unknown'}" in wrong.reason
    assert f"logged {ran}, executed {ran})" in wrong.reason
