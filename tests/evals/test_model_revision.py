"""Which weights a job served, and that a baseline of others ends a run with exit 4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from run_helpers import NUM_QUESTIONS, Suite

from evalsuite import cli
from evalsuite.config import EvalConfig
from evalsuite.model_revision import fingerprint, model_revision
from evalsuite.report.json_report import read
from evalsuite.verdict import Status, Verdict

RUN = ("run", "--configs-root", "configs", "--config", "config-cpu.txt", "--stop-grace", "0.5")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def config(model: str = "org/model", **keys: object) -> EvalConfig:
    values = {"accuracy_threshold": 0.9, "num_questions": 1, "num_fewshot": 5, "engine": "vllm"}
    return EvalConfig.model_validate({"model_name": model, **values, **keys})


class TestRevision:
    def test_a_commit_on_the_command_line_is_the_revision(self) -> None:
        assert model_revision(config(server_args=f"--revision {COMMIT}"), {}) == COMMIT
        assert model_revision(config(server_args="--revision main"), {}) == ""

    @pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
    def test_a_branch_is_looked_up_where_the_hub_keeps_it(
        self, tmp_path: Path, variable: str
    ) -> None:
        below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}.get(variable, "")
        refs = tmp_path / below / "models--org--model" / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(COMMIT)
        (refs / "v2").write_text(COMMIT[::-1] + "\n")
        environ = {variable: str(tmp_path)}
        assert model_revision(config(), environ) == COMMIT
        assert model_revision(config(server_args="--revision=v2"), environ) == COMMIT[::-1]
        assert model_revision(config("org/other"), environ) == ""
        # The file's own variables are what its server sees.
        assert model_revision(config(env=environ), {"HF_HUB_CACHE": str(tmp_path / "no")}) == (
            COMMIT if variable == "HF_HUB_CACHE" else ""
        )

    def test_a_folder_is_known_by_its_content_and_not_by_its_place(self, tmp_path: Path) -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        one.mkdir()
        (one / "config.json").write_text("{}")
        (one / "model.safetensors").write_bytes(bytes(100))
        (one / "README.md").write_text("old")
        shutil.copytree(one, two)
        (two / "README.md").write_text("new")
        known = model_revision(config(str(one)), {})
        assert known.startswith("files:")
        assert model_revision(config(str(two)), {}) == known
        (two / "model.safetensors").write_bytes(bytes(99) + b"\1")
        assert model_revision(config(str(two)), {}) != known

    def test_a_large_file_is_sampled_from_its_first_to_its_last_byte(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        seen = set()
        for position in (None, 0, 20 << 20, (40 << 20) - 1):
            with path.open("wb") as file:
                file.truncate(40 << 20)
                if position is not None:
                    # Some sampled piece lies within any 700 KiB of a file of 40 MiB.
                    file.seek(max(0, position - (700 << 10)))
                    file.write(b"\1" * min(700 << 10, position or 1))
                    file.seek(position)
                    file.write(b"\1")
            seen.add(fingerprint(tmp_path))
        assert len(seen) == 4

    def test_an_external_server_and_an_absent_model_are_unknown(self, tmp_path: Path) -> None:
        assert model_revision(config(str(tmp_path), engine="external"), {}) == ""
        assert model_revision(config("/no/such/folder"), {}) == ""


def verdicts(suite: Suite, known: set[Path]) -> dict[str, Verdict]:
    (folder,) = set(suite.results.iterdir()) - known
    return {verdict.job_id.removeprefix("s/"): verdict for verdict in read(folder)}


def test_a_baseline_that_does_not_fit_the_run_is_exit_4_with_what_differs(suite: Suite) -> None:
    """Other prompts, sampling, weights or reading: each refused, none scored."""
    folder = suite.folder / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    same = {"model_name": str(folder), "server_args": suite.right()}
    suite.add("same", **same)
    assert suite.run(*RUN).returncode == 0
    saved = suite.run("baseline", "save", "s/same", "--run", str(suite.run_folder()))
    assert saved.returncode == 0, saved.stderr
    (path,) = (suite.folder / "baselines").rglob("*.json")
    paired = {**same, "gate": "paired", "baseline": str(path)}
    suite.add("fits", **paired)
    known = set(suite.results.iterdir())
    assert suite.run(*RUN, "fits").returncode == 0
    assert verdicts(suite, known)["fits"].status is Status.PASS

    changes = {
        "prompt": ({"num_fewshot": 2}, "prompt_hash: "),
        "sampling": ({"temperature": 0.5}, "sampling.temperature: 0.0 -> 0.5"),
        "metric": ({"metric": "numeric"}, "metric: 'last-number' -> 'numeric'"),
        "fewer": ({"num_questions": NUM_QUESTIONS - 1}, f"{NUM_QUESTIONS} -> {NUM_QUESTIONS - 1}"),
    }
    for name, (keys, _) in changes.items():
        suite.add(name, **{**paired, **keys})
    known = set(suite.results.iterdir())
    done = suite.run(*RUN, *changes)
    found = verdicts(suite, known)
    assert done.returncode == 4, done.stdout + done.stderr
    for name, (_, difference) in changes.items():
        assert (found[name].status, found[name].accuracy) == (Status.ERROR, None)
        assert "not comparable with the baseline: " in found[name].reason
        assert difference in found[name].reason
        assert f"s/{name}: ERROR" in done.stdout

    (folder / "config.json").write_text('{"other": "weights"}')
    known = set(suite.results.iterdir())
    done = suite.run(*RUN, "fits")
    assert done.returncode == 4
    assert "model_revision: 'files:" in verdicts(suite, known)["fits"].reason
    junit = next(path for path in set(suite.results.iterdir()) - known) / "junit.xml"
    assert "<error" in junit.read_text()
    assert "<failure" not in junit.read_text()


def test_the_same_under_pytest(suite: Suite) -> None:
    suite.add("job", suite.right())
    assert suite.run(*RUN).returncode == 0
    assert suite.run("baseline", "save", "s/job", "--run", str(suite.run_folder())).returncode == 0
    (path,) = (suite.folder / "baselines").rglob("*.json")
    suite.add("seed", suite.right(), gate="equal", baseline=str(path), seed=7)
    done = suite.run(*("evalsuite", *RUN[1:], "-q", "-k", "seed"), program=("-m", "pytest"))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "1 error" in done.stdout
    assert "sampling.seed: 42 -> 7" in done.stdout


def test_a_job_that_no_baseline_can_fit_is_refused_before_a_server_starts(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = suite.folder / "pids"
    suite.add("job", f"--pids-file {pids}", gate="paired", baseline="none.json")
    (suite.folder / "none.json").write_text(json.dumps({"identity": {}}))
    monkeypatch.chdir(suite.folder)
    assert cli.main(list(RUN)) == 4
    assert "none.json" in capsys.readouterr().err
    assert not pids.exists()
