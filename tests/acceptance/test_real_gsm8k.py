"""A verdict that says no: the real GSM8K against the embedded model, which never saw it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import REPOSITORY

from evalsuite.errors import ConfigError
from evalsuite.ledger import read_ledger
from evalsuite.tasks.data import gsm8k_rows, source_from

pytest.importorskip("torch", reason="the bundled server needs torch")
SUITE = REPOSITORY / "configs" / "gsm8k-real"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_questions"),
    [("MiniGSM-tiny-on-gsm8k", 1319), ("MiniGSM-tiny-on-gsm8k-lm-eval", 100)],
)
def test_every_question_is_on_record_and_the_run_ends_with_1(
    tmp_path: Path, name: str, num_questions: int
) -> None:
    try:
        gsm8k_rows("test", source_from(os.environ))
    except ConfigError as error:
        pytest.skip(str(error))
    if name.endswith("lm-eval"):
        pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    config = ("--config", f"{SUITE}/{name}.yaml", "--pool", "cpu", "--results", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "evalsuite.cli", "run", *config],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = tmp_path.iterdir()
    (verdict,) = json.loads((run / "results.json").read_text())["verdicts"]
    assert verdict["status"] == "FAIL"
    # 1.1 % were right when this was written; a model that can do it would pass at 48 %.
    assert verdict["accuracy"] < 0.1
    (ledger,) = run.glob("jobs/*/ledger.jsonl")
    records = {record.index: record for record in read_ledger(ledger)}
    assert sorted(records) == list(range(num_questions))
    assert all(record.is_answered for record in records.values())
    assert verdict["result"]["num_failed"] == 0


def test_a_bare_name_does_not_run_what_has_to_fail() -> None:
    names = [path.name for path in SUITE.glob("*.txt")]
    assert names == ["config-cpu-gsm8k-real.txt"]
    others = {path.name for path in (REPOSITORY / "configs").glob("*/config-*.txt")} - set(names)
    assert names[0] not in others
