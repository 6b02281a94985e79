"""Jobs of a run share one false-alarm rate: Holm after `evalsuite run`, Bonferroni under pytest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import NUM_QUESTIONS, REPOSITORY, Suite

from evalsuite import baseline_store
from evalsuite.baseline import identity_of, make_baseline
from evalsuite.config import load_config
from evalsuite.report.json_report import read
from evalsuite.verdict import Verdict


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Two jobs with an approved baseline of right answers; `a` then loses six, `b` five."""
    suite = Suite(tmp_path)
    for name in "ab":
        suite.add(name, suite.right())
    done = suite.run("run", "--config", "config-cpu.txt")
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = suite.results.iterdir()
    for verdict in read(results):
        assert verdict.result is not None
        config = load_config(suite.root / f"{verdict.job_id}.yaml")
        identity = identity_of(config, verdict.result)
        made = make_baseline(
            identity, verdict.result, [], engine="e", hardware=verdict.hardware, commit=""
        )
        path = baseline_store.save(tmp_path / "baselines", verdict.job_id, made)
        baseline_store.approve(path.parent, path.stem)
    right = json.loads(suite.answers.read_text())
    assert len(right) == NUM_QUESTIONS
    (suite.root / "s" / "config-cpu.txt").unlink()
    for name, lost in (("a", 6), ("b", 5)):
        answers = tmp_path / f"{name}.json"
        answers.write_text(json.dumps(dict(list(right.items())[lost:])))
        gate = {"name": "paired", "alpha": 0.05}
        baseline = f"s__{name}"
        suite.add(name, f"--answers {answers}", gate=gate, baseline=baseline)
    return suite


def verdicts(suite: Suite, known: set[Path]) -> dict[str, Verdict]:
    (folder,) = set(suite.results.iterdir()) - known
    return {verdict.job_id: verdict for verdict in read(folder)}


def test_a_run_steps_down_and_pytest_shares_out_in_advance(suite: Suite) -> None:
    # One-sided exact p: 1/64 and 1/32. Holm asks for 0.05 / 2, then 0.05; Bonferroni for
    # 0.05 / 2 of both.
    known = set(suite.results.iterdir())
    done = suite.run("run", "--config", "config-cpu.txt")
    assert done.returncode == 1, done.stdout + done.stderr
    found = verdicts(suite, known)
    assert {job: verdict.status for job, verdict in found.items()} == {"s/a": "FAIL", "s/b": "FAIL"}
    assert [found[f"s/{name}"].p_value for name in "ab"] == pytest.approx([1 / 64, 1 / 32])
    assert found["s/b"].detail["p_holm"] == pytest.approx(1 / 32)
    assert found["s/b"].detail["family"] == 2

    known = set(suite.results.iterdir())
    args = ["--configs-root", "configs", "-q", "-p", "no:cacheprovider"]
    done = suite.run(
        str(REPOSITORY / "evalsuite"),
        *args,
        *("--config", "config-cpu.txt"),
        program=("-m", "pytest"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = verdicts(suite, known)
    assert {job: verdict.status for job, verdict in found.items()} == {"s/a": "FAIL", "s/b": "PASS"}
    assert "one-sided p 0.03125 > 0.025" in found["s/b"].reason
    assert found["s/b"].reason.endswith("; 0.05 shared by 2 jobs")
