"""A diff into jobs: what selects, what does not, and what is done where there is no diff."""

from __future__ import annotations

import json
import subprocess
import unicodedata
from pathlib import Path

import pytest
import yaml
from ci_helpers import YAML, Repository, write_configs

from evalsuite import cli
from evalsuite.ci.select import DiffError, changed_paths, matches, shown

ALL = {"suite/a", "suite/b", "suite/é", "other/c"}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    made = Repository(tmp_path / "repo")
    monkeypatch.chdir(made.root)
    return made


def selected(
    capsys: pytest.CaptureFixture[str], *options: str, status: int = 0
) -> tuple[set[str], str]:
    capsys.readouterr()
    assert cli.main(["ci", "select", *options]) == status
    out = capsys.readouterr()
    return set(out.out.split()), out.err


Capture = pytest.CaptureFixture[str]


def test_its_own_yaml_selects_a_job_and_no_other(repository: Repository, capsys: Capture) -> None:
    repository.write("configs/suite/a.yaml", YAML + "seed: 1\n")
    repository.commit()
    jobs, err = selected(capsys, "--base", repository.base, "--explain")
    assert jobs == {"suite/a"}
    assert "run  suite/a (h100): its YAML changed: configs/suite/a.yaml\n" in err
    assert "skip suite/b (h100): nothing that it runs on changed\n" in err


def test_a_file_name_beyond_ascii_selects_its_job(repository: Repository, capsys: Capture) -> None:
    repository.write("configs/suite/é.yaml", YAML + "seed: 1\n")
    repository.commit()
    assert selected(capsys, "--base", repository.base)[0] == {"suite/é"}


def test_the_list_selects_its_jobs(repository: Repository, capsys: Capture) -> None:
    path = repository.root / "configs/suite/config-h100.txt"
    path.write_text("# now with a comment\n" + path.read_text())
    repository.commit()
    jobs, err = selected(capsys, "--base", repository.base, "--explain")
    assert jobs == ALL - {"other/c"}
    assert "its list changed: configs/suite/config-h100.txt" in err


def test_the_file_of_pools_selects_every_job(repository: Repository, capsys: Capture) -> None:
    with (repository.root / "configs/hardware.yaml").open("a") as file:
        file.write("# changed\n")
    repository.commit()
    assert selected(capsys, "--base", repository.base)[0] == ALL


@pytest.mark.parametrize(
    "path",
    [
        ".buildkite/nightly.yml",
        ".github/workflows/nightly.yml",
        ".github/workflows/changes.yml",
        "ci/providers/step.sh.j2",
    ],
)
def test_the_pipeline_selects_every_job(path: str, repository: Repository, capsys: Capture) -> None:
    repository.write(path, "new\n")
    repository.commit()
    assert selected(capsys, "--base", repository.base)[0] == ALL


def test_a_rename_out_of_a_watched_folder_counts_by_its_old_name(
    repository: Repository, capsys: Capture
) -> None:
    repository.git("mv", "vllm/x.py", "docs/moved.py")
    repository.commit()
    assert selected(capsys, "--base", repository.base, "--watch", "vllm")[0] == ALL


def test_a_deleted_watched_file_counts(repository: Repository, capsys: Capture) -> None:
    repository.git("rm", "-q", "vllm/x.py")
    repository.commit()
    assert selected(capsys, "--base", repository.base, "--watch", "vllm/")[0] == ALL


def test_a_prefix_ends_at_a_slash(repository: Repository, capsys: Capture) -> None:
    repository.write("vllm2/x.py", "new\n")
    repository.commit()
    jobs, err = selected(capsys, "--base", repository.base, "--watch", "vllm")
    assert jobs == set()
    assert "nothing to do: no job is touched by 1 changed file" in err


def test_an_empty_diff_is_nothing_to_do_in_every_form(
    repository: Repository, capsys: Capture
) -> None:
    repository.commit()
    jobs, err = selected(capsys, "--base", repository.base)
    assert jobs == set()
    assert "nothing to do: no job is touched by 0 changed files" in err
    assert cli.main(["ci", "select", "--base", repository.base, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert cli.main(["ci", "select", "--base", repository.base, "--format", "buildkite"]) == 0
    (step,) = yaml.safe_load(capsys.readouterr().out)["steps"]
    assert step["key"] == "nothing-to-do"
    assert subprocess.run(["bash", "-ec", step["command"].replace("$$", "$")]).returncode == 0


def test_what_is_only_read_after_a_run_selects_nothing(
    repository: Repository, capsys: Capture
) -> None:
    for name in ("docs/x.md", "README.md", "evalsuite/report/html.py", "tests/ci/test_x.py"):
        repository.write(name, "new\n")
    repository.commit()
    assert selected(capsys, "--base", repository.base)[0] == set()
    repository.write("evalsuite/client.py", "new\n")
    repository.commit()
    assert selected(capsys, "--base", repository.base)[0] == ALL


def test_the_server_of_this_repository_selects_only_jobs_that_run_on_it(
    repository: Repository, capsys: Capture
) -> None:
    repository.write("configs/suite/a.yaml", YAML + "engine: vllm\n")
    base = repository.commit()
    repository.write("kernels/moeserve/moe/oracle.py", "new\n")
    repository.commit()
    assert selected(capsys, "--base", base)[0] == ALL - {"suite/a"}


def test_changes_of_the_base_after_the_branch_are_not_the_branchs(
    repository: Repository, capsys: Capture
) -> None:
    repository.git("checkout", "-q", "-b", "change")
    repository.write("configs/suite/a.yaml", YAML + "seed: 1\n")
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.write("configs/suite/b.yaml", YAML + "seed: 1\n")
    repository.commit()
    jobs, _ = selected(capsys, "--base", "main", "--head", "change")
    assert jobs == {"suite/a"}


@pytest.mark.parametrize("base", ["0123456789abcdef" * 2 + "01234567", "no-branch", "--output=x"])
def test_an_unknown_base_selects_everything_with_a_warning(
    base: str, repository: Repository, capsys: Capture
) -> None:
    jobs, err = selected(capsys, "--base", base, "--explain")
    assert jobs == ALL
    assert "warning: no diff, so every job is selected: fatal:" in err
    assert not (repository.root / "x...HEAD").exists()
    assert "run  other/c (b200): no diff to tell by: fatal:" in err


def test_a_shallow_clone_without_the_base_selects_everything(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    repository.commit()
    shallow = tmp_path / "shallow"
    source = f"file://{repository.root}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", source, str(shallow)], check=True)
    monkeypatch.chdir(shallow)
    jobs, err = selected(capsys, "--base", repository.base)
    assert jobs == ALL
    assert "warning: no diff" in err


def test_no_repository_selects_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a"]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    jobs, err = selected(capsys, "--base", "main")
    assert jobs == {"suite/a"}
    assert "not a git repository" in err


def test_a_name_with_a_line_break_is_one_name_and_is_escaped_in_the_log(
    repository: Repository, capsys: Capture
) -> None:
    repository.write("vllm/two\nlines\x1b[31m.py", "new\n")
    repository.commit()
    assert changed_paths(repository.base) == ["vllm/two\nlines\x1b[31m.py"]
    jobs, err = selected(capsys, "--base", repository.base, "--watch", "vllm", "--explain")
    assert jobs == ALL
    assert r"changed: vllm/two\nlines\x1b[31m.py" in err
    assert "\x1b" not in err


def test_bytes_that_are_no_utf8_are_no_obstacle(repository: Repository, capsys: Capture) -> None:
    name = b"vllm/\xff.py".decode("utf-8", "surrogateescape")
    repository.write(name, "new\n")
    repository.commit()
    jobs, err = selected(capsys, "--base", repository.base, "--watch", "vllm", "--explain")
    assert jobs == ALL
    assert r"changed: vllm/\udcff.py" in err


def test_a_decomposed_name_is_the_same_name(
    repository: Repository, tmp_path: Path, capsys: Capture
) -> None:
    name = unicodedata.normalize("NFD", "configs/suite/é.yaml")
    (tmp_path / "changed").write_bytes(name.encode() + b"\0")
    assert selected(capsys, "--changed-files", str(tmp_path / "changed"))[0] == {"suite/é"}


def test_changed_files_come_from_a_list_with_either_separator(
    repository: Repository, tmp_path: Path, capsys: Capture
) -> None:
    for separator in ("\n", "\0"):
        names = ["configs/suite/a.yaml", "configs/other/c.yaml", ""]
        (tmp_path / "changed").write_text(separator.join(names))
        jobs, _ = selected(capsys, "--changed-files", str(tmp_path / "changed"))
        assert jobs == {"suite/a", "other/c"}


def test_the_selection_becomes_a_pipeline_of_just_its_jobs(
    repository: Repository, capsys: Capture
) -> None:
    repository.write("configs/suite/b.yaml", YAML + "seed: 1\n")
    repository.commit()
    options = ("ci", "select", "--base", repository.base)
    assert cli.main([*options, "--format", "buildkite"]) == 0
    (step,) = yaml.safe_load(capsys.readouterr().out)["steps"]
    assert "evalsuite run --config config-h100.txt suite/b 2>&1" in step["command"]
    assert cli.main([*options, "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "id": "suite/b",
        "pool": "h100",
        "config": "config-h100.txt",
        "reason": "its YAML changed: configs/suite/b.yaml",
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "name the change"),
        (("--base", "main", "--changed-files", "-"), "name the change"),
        (("--base", "main", "--format", "xml"), "known: ids, json, matrix, buildkite, github"),
        (("--changed-files", "absent"), "--changed-files absent: No such file"),
        (("--base", "main", "--config", "config-h101.txt"), "did you mean 'config-h100.txt'"),
    ],
)
def test_wrong_options_are_4(
    options: tuple[str, ...], named: str, repository: Repository, capsys: Capture
) -> None:
    assert named in selected(capsys, *options, status=4)[1]


@pytest.mark.parametrize(
    ("path", "rules", "is_in"),
    [
        ("vllm/a.py", ("vllm",), True),
        ("vllm/a.py", ("vllm/",), True),
        ("vllm", ("vllm",), True),
        ("vllm2/a.py", ("vllm",), False),
        ("x/vllm/a.py", ("vllm",), False),
        ("vllm/docs/a.md", ("vllm", "!vllm/docs"), False),
        ("vllm/docs2/a.md", ("vllm", "!vllm/docs"), True),
        ("vllm/docs/keep/a.md", ("vllm", "!vllm/docs", "vllm/docs/keep"), True),
        ("a.py", (), False),
    ],
)
def test_rules(path: str, rules: tuple[str, ...], is_in: bool) -> None:
    assert matches(path, rules) is is_in


def test_names_in_logs_keep_letters_and_lose_controls() -> None:
    assert shown("é/中.yaml") == "é/中.yaml"
    assert shown("a\nb\u202ec") == r"a\nb\u202ec"


def test_git_that_cannot_be_asked_is_a_diff_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DiffError, match="git cannot be asked"):
        changed_paths("main")
