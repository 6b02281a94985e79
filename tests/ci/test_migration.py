"""The commands of docs/migration.md, run on the files that it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from evalsuite import cli

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
# What needs a machine of the pool, a network, or a branch to compare with.
_ELSEWHERE = re.compile(r"^evalsuite (run(?!.*--dry-run)|data|calibrate|ci select)")


def commands() -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    return [line for line in lines if line.startswith("evalsuite ")]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, text in re.findall(r"^```yaml\n# (accuracy/\S+)\n(.*?)^```", PAGE, re.M | re.S):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (tmp_path / "accuracy/moe-refactor/config-h100.txt").write_text(
        "Qwen3-30B-A3B-BF16-triton.yaml\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_does_what_it_says(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = [line for line in commands() if not _ELSEWHERE.match(line)]
    named = [line.split()[1] for line in here]
    assert named == ["validate", "ls", "validate", "run", "ci", "ci", "ci"]
    for line in here:
        assert cli.main(shlex.split(line)[1:]) == 0, line + capsys.readouterr().err
    out = capsys.readouterr().out
    assert "tolerance: 0.08 (the default) is 8.9 standard errors" in out
    steps = yaml.safe_load((repository / ".buildkite/nightly.yml").read_text())["steps"]
    assert [step["agents"]["queue"] for step in steps] == ["h100"]
    assert "--config config-h100.txt --configs-root accuracy --engine vllm" in steps[0]["command"]
    assert (repository / ".github/workflows/nightly.yml").is_file()
    (step,) = yaml.safe_load((repository / ".buildkite/changes.yml").read_text())["steps"]
    assert "evalsuite ci select --explain --setup 'pip install PATH-TO-A-CLONE'" in step["command"]
    assert "--watch vllm --configs-root accuracy '--run-args=--engine vllm'" in step["command"]


def test_a_folder_without_pools_is_refused_by_none_of_the_checks(repository: Path) -> None:
    (repository / "accuracy/hardware.yaml").unlink()
    assert cli.main(["validate", "accuracy", "--engine", "vllm"]) == 0


def test_commands_for_elsewhere_have_options_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line in commands():
        if _ELSEWHERE.match(line):
            # --help is answered after the options before it have been read.
            assert cli.main([*shlex.split(line)[1:], "--help"]) == 0, line
            shown = capsys.readouterr().out
            for option in re.findall(r" (--[a-z-]+)", line):
                assert option in shown, f"{line}: no {option}"
