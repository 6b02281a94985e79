"""A context shorter than the shots, on the bundled server: the config's fault, found at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bundled server needs torch")


@pytest.mark.slow
@pytest.mark.parametrize("evaluator", ["builtin", "lm-eval"])
def test_shots_that_do_not_fit_are_exit_4_with_the_shortfall_and_no_accuracy(
    tmp_path: Path, evaluator: str
) -> None:
    if evaluator == "lm-eval":
        pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    job = {
        "model_name": "moeserve/minigsm-tiny", "accuracy_threshold": 0.9, "tolerance": 0.02,
        "num_questions": 1319, "num_fewshot": 5, "task": "minigsm", "evaluator": evaluator,
        "server_args": "--max-model-len 256", "provenance": "test",
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "evalsuite.cli", "run", "job.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    (run,) = (tmp_path / "results").iterdir()
    (verdict,) = json.loads((run / "results.json").read_text())["verdicts"]
    assert (verdict["status"], verdict["accuracy"]) == ("ERROR", None)
    assert "do not fit the server's context by at least " in verdict["reason"]
    assert "--max-model-len" in verdict["reason"]
    # The first refusal ends it.
    (ledger,) = run.glob("jobs/*/ledger.jsonl")
    assert not any('"status": "answered"' in line for line in ledger.read_text().splitlines())
