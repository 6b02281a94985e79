"""The pull-request pipeline: a choice by changed files, and steps of just these jobs, in bash."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ci_helpers import YAML, Repository

from evalsuite import cli
from evalsuite.ci.plan import PlanRequest, pipelines
from evalsuite.ci.render import matrix

OPTIONS = (
    *("--setup", "echo installed", "--run-args=--engine vllm", "--retries", "2"),
    *("--soft-fail-accuracy", "--watch", "vllm", "--watch", "!vllm/docs"),
)
FAKE_AGENT = """#!/bin/bash
[ "$1" = annotate ] && exec cat > annotated.md
[ "$1 $2" = "pipeline upload" ] && cat "$3" > uploaded.yml
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A clone, as CI has one: `origin` is where it came from."""
    made = Repository(tmp_path / "repo")
    monkeypatch.chdir(made.root)
    made.git("checkout", "-q", "-b", "change")
    made.git("remote", "add", "origin", str(made.root))
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, text in {
        "evalsuite": f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -P -m evalsuite.cli "$@"\n',
        "buildkite-agent": FAKE_AGENT,
    }.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    return made


def render(*options: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The pipeline of both providers: GitHub's and Buildkite's."""
    assert cli.main(["ci", "render", "--pipeline", "changes", *options]) == 0
    assert cli.main(["ci", "render", "--pipeline", "changes", *options, "--check"]) == 0
    paths = (".github/workflows/changes.yml", ".buildkite/changes.yml")
    github, buildkite = (yaml.safe_load(Path(path).read_text()) for path in paths)
    return github, buildkite


def bash(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What a provider's shell does with a step."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def github_matrix(document: dict[Any, Any], base: str) -> tuple[list[dict[str, Any]], str]:
    run = next(step for step in document["jobs"]["select"]["steps"] if step.get("id") == "run")
    Path("output").unlink(missing_ok=True)
    done = bash(run["run"], BASE=base, GITHUB_OUTPUT="output", GITHUB_STEP_SUMMARY="summary.md")
    assert done.returncode == 0, done.stderr
    (line,) = Path("output").read_text().splitlines()
    name, _, text = line.partition("=")
    assert name == "matrix"
    return json.loads(text), done.stderr


def uploaded(document: dict[Any, Any], base: str = "main") -> list[dict[str, Any]]:
    (step,) = document["steps"]
    assert step["if"] == "build.pull_request.id != null"
    Path("uploaded.yml").unlink(missing_ok=True)
    script = step["command"].replace("$$", "$")
    done = bash(script, BUILDKITE_PULL_REQUEST_BASE_BRANCH=base)
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, Any]] = yaml.safe_load(Path("uploaded.yml").read_text())["steps"]
    return steps


def test_a_changed_yaml_runs_its_job_and_no_other(repository: Repository) -> None:
    github, buildkite = render(*OPTIONS)
    repository.merge()
    repository.write("configs/suite/b.yaml", YAML + "seed: 1\n")
    repository.commit()
    (row,), told = github_matrix(github, repository.base)
    assert "run  suite/b (h100): its YAML changed: configs/suite/b.yaml" in told
    assert "skip suite/a (h100): nothing that it runs on changed" in told
    assert (row["key"], row["runs_on"]) == ("eval-h100", ["self-hosted", "h100"])
    (step,) = uploaded(buildkite)
    assert (step["key"], step["agents"]) == ("eval-h100", {"queue": "h100"})
    # The options of the rendering are those of the steps that are made while it runs.
    for script in (row["script"], step["command"].replace("$$", "$")):
        assert script.startswith("echo installed || exit 75\n")
        command = "evalsuite run --config config-h100.txt suite/b --errors-first --engine vllm 2>&1"
        assert command in script
    assert step["retry"] == {"automatic": [{"exit_status": 75, "limit": 2}]}
    assert step["soft_fail"] == [{"exit_status": 1}]
    assert "for attempt in 1 2 3; do" in row["script"]
    assert row["timeout_minutes"] == 3 * step["timeout_in_minutes"]


def test_a_watched_source_runs_every_job_and_documents_none(repository: Repository) -> None:
    github, buildkite = render(*OPTIONS)
    repository.merge()
    repository.write("vllm/docs/x.md", "new\n")
    repository.commit()
    assert github_matrix(github, repository.base)[0] == []
    assert [step["key"] for step in uploaded(buildkite)] == ["nothing-to-do"]
    repository.write("vllm/x.py", "new\n")
    repository.commit()
    rows, _ = github_matrix(github, repository.base)
    assert [row["key"] for row in rows] == ["eval-b200", "eval-h100"]
    assert [step["key"] for step in uploaded(buildkite)] == ["eval-b200", "eval-h100"]


@pytest.mark.parametrize("base", ["0" * 40, "nowhere", ""])
def test_an_unknown_base_runs_every_job(repository: Repository, base: str) -> None:
    github, buildkite = render(*OPTIONS)
    rows, told = github_matrix(github, base)
    assert [row["key"] for row in rows] == ["eval-b200", "eval-h100"]
    assert "warning: no diff, so every job is selected" in told
    assert [step["key"] for step in uploaded(buildkite, base)] == ["eval-b200", "eval-h100"]
    for place in ("summary.md", "annotated.md"):
        assert "warning: no diff, so every job is selected" in Path(place).read_text()
        assert "4 of 4 jobs run, 0 do not" in Path(place).read_text()


def test_what_does_not_run_and_why_stands_where_a_reviewer_looks(repository: Repository) -> None:
    github, buildkite = render(*OPTIONS)
    repository.merge()
    repository.write("docs/```\nx.md", "new\n")
    repository.commit()
    assert github_matrix(github, repository.base)[0] == []
    assert [step["key"] for step in uploaded(buildkite)] == ["nothing-to-do"]
    for place in ("summary.md", "annotated.md"):
        first, *lines, last = Path(place).read_text().strip().splitlines()
        assert (first[:3], last) == ("```", "```")
        for job in ("suite/a (h100)", "suite/b (h100)", "other/c (b200)"):
            assert f"skip {job}: nothing that it runs on changed" in lines
        assert "0 of 4 jobs run, 4 do not" in lines
        assert "nothing to do: no job is touched by 1 changed file" in lines


def test_a_faulty_config_is_4_and_uploads_nothing(repository: Repository) -> None:
    github, buildkite = render(*OPTIONS)
    repository.write("configs/suite/b.yaml", YAML + "sed: 1\n")
    run = next(step for step in github["jobs"]["select"]["steps"] if step.get("id") == "run")
    files = {"GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary.md"}
    done = bash(run["run"], BASE=repository.base, **files)
    assert done.returncode == 4
    assert "did you mean `seed`" in Path("summary.md").read_text()
    assert "did you mean `seed`" in done.stderr
    assert not Path("output").exists()
    script = buildkite["steps"][0]["command"].replace("$$", "$")
    assert bash(script, BUILDKITE_PULL_REQUEST_BASE_BRANCH="main").returncode == 4
    assert not Path("uploaded.yml").exists()


def test_a_failed_installation_is_75(repository: Repository) -> None:
    github, buildkite = render("--setup", "false")
    run = next(step for step in github["jobs"]["select"]["steps"] if step.get("id") == "run")
    scripts = (run["run"], buildkite["steps"][0]["command"].replace("$$", "$"))
    assert [bash(script, BASE="x").returncode for script in scripts] == [75, 75]


def test_the_shell_of_a_row_is_that_of_the_nightly(repository: Repository) -> None:
    only = frozenset({"suite/a", "suite/b", "suite/é"})
    request = PlanRequest(pipelines=("nightly",), only=only, root=Path("configs"))
    (pipeline,) = pipelines(request)
    (row,) = matrix("github", pipeline)
    repository.write("bin2/evalsuite", "#!/bin/bash\nexit 76\n")
    Path("bin2/evalsuite").chmod(0o755)
    script = (
        str(row["script"]).replace("python3 -m venv", "true").replace(".venv/bin/python", "true")
    )
    # As the workflow hands it over: a variable, and a shell that becomes the script's.
    job = render()[0]["jobs"]["eval"]
    run = next(step for step in job["steps"] if step.get("name") == "Run")
    assert run["env"] == {"SCRIPT": "${{ matrix.script }}"}
    path = f"{Path('bin2').absolute()}{os.pathsep}{os.environ['PATH']}"
    assert bash(run["run"], SCRIPT=script, PATH=path).returncode == 76
    assert Path("results/eval-h100.log").exists()


def test_no_machine_for_a_fork_and_none_before_there_are_any(repository: Repository) -> None:
    jobs = render()[0]["jobs"]
    assert jobs["select"]["if"] == "vars.EVALSUITE_GPU == 'true'"
    assert jobs["eval"]["if"] == (
        "needs.select.outputs.matrix != '[]' "
        "&& github.event.pull_request.head.repo.full_name == github.repository"
    )
    assert "secrets" not in json.dumps(jobs["select"])
    assert jobs["all"]["if"] == "always() && vars.EVALSUITE_GPU == 'true'"


@pytest.mark.parametrize(
    ("select", "is_nothing", "evaluated", "status"),
    [
        ("success", "false", "success", 0),
        ("success", "true", "skipped", 0),
        ("success", "false", "failure", 1),
        ("success", "false", "cancelled", 1),
        # Chosen and never run, as for a fork.
        ("success", "false", "skipped", 1),
        ("failure", "false", "skipped", 1),
        ("failure", "true", "skipped", 1),
    ],
)
def test_the_one_check_is_red_where_a_chosen_job_failed_or_never_ran(
    select: str, is_nothing: str, evaluated: str, status: int, repository: Repository
) -> None:
    job = render()[0]["jobs"]["all"]
    assert job["needs"] == ["select", "eval"]
    assert set(job["env"]) == {"SELECT", "EVAL", "IS_NOTHING"}
    env = {"SELECT": select, "EVAL": evaluated, "IS_NOTHING": is_nothing}
    assert bash(job["steps"][0]["run"], **env).returncode == status
