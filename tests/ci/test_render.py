"""Rendered files: valid, free of leftovers, up to date, and refused where they could not be."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml
from ci_helpers import HARDWARE, rendered, write_configs

from evalsuite import cli
from evalsuite.ci import render as rendering
from evalsuite.ci import templates
from evalsuite.ci.plan import PlanRequest, pipelines
from evalsuite.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
SCHEMAS = {"buildkite": "vendor.buildkite", "github": "vendor.github-workflows"}
LEFTOVER = re.compile(r"\[=|=\]|\[%|%\]|\[#|#\]|\{%|%\}")


def all_rendered(request: PlanRequest) -> list[tuple[str, rendering.Rendered]]:
    return [
        (provider, rendering.render(provider, pipeline, "# header"))
        for provider in templates.providers()
        for pipeline in pipelines(request)
    ]


def test_the_providers_are_the_files_of_the_folder() -> None:
    assert templates.providers() == ("buildkite", "github")
    with pytest.raises(ConfigError, match="'jenkins' has no template; known: buildkite, github"):
        templates.template_name("jenkins")


@pytest.mark.parametrize("provider", sorted(SCHEMAS))
def test_files_are_valid_by_the_providers_schema(provider: str, tmp_path: Path) -> None:
    root = write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a", "b"]})
    requests = [
        PlanRequest(root=REPOSITORY / "configs"),
        PlanRequest(root=root, is_accuracy_soft=True, num_retries=10),
        PlanRequest(root=root, only=frozenset(), num_retries=0),
    ]
    files = []
    for number, request in enumerate(requests):
        for name, item in all_rendered(request):
            if name == provider:
                path = tmp_path / f"{number}-{Path(item.path).name}"
                path.write_text(item.text)
                files.append(str(path))
    assert len(files) == 9
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[provider]]
    done = subprocess.run([*check, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # The schema does refuse something: a key that no step has.
    bad = tmp_path / "bad.yml"
    bad.write_text('steps:\n  - command: "x"\n    timeout_in_minutes: "soon"\njobs: 3\n')
    assert subprocess.run([*check, str(bad)], capture_output=True, check=False).returncode == 1


def test_no_template_leftovers_and_no_tabs() -> None:
    for _, item in all_rendered(PlanRequest(root=REPOSITORY / "configs")):
        assert not LEFTOVER.search(item.text), item.path
        assert "\t" not in item.text
        assert item.text.endswith("\n")
        assert not item.text.endswith("\n\n")
        assert not re.search(r"[ ]+$", item.text, re.MULTILINE)


def test_the_committed_pipelines_are_what_the_configs_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert cli.main(["ci", "render", "--check"]) == 0


def test_every_dollar_of_buildkite_is_escaped() -> None:
    for provider, item in all_rendered(PlanRequest(root=REPOSITORY / "configs")):
        if provider == "buildkite":
            assert not re.search(r"(?<!\$)\$(?:\$\$)*(?!\$)", item.text)
            assert "$${PIPESTATUS[0]}" in item.text or "nightly" not in item.path


def test_check_shows_the_difference_and_exits_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a"]})
    options = ["ci", "render", "--configs-root", str(root), "--out", str(tmp_path)]
    assert cli.main([*options, "--check"]) == 4
    told = capsys.readouterr()
    assert "(absent)" in told.out
    # Steps that install a clone which is not there could only end in 75, again and again.
    assert "warning: no constraints.txt in" in told.err
    assert cli.main([*options, "--check", "--setup", "pip install x"]) == 4
    assert "warning" not in capsys.readouterr().err
    assert cli.main(options) == 0
    assert capsys.readouterr().out.count("wrote ") == 6
    assert cli.main([*options, "--check"]) == 0
    assert cli.main(options) == 0
    assert "6 files are up to date" in capsys.readouterr().out
    path = tmp_path / ".buildkite" / "nightly.yml"
    path.write_text(path.read_text().replace("exit_status: 75", "exit_status: '*'"))
    (tmp_path / "configs/suite/b.yaml").write_text((root / "suite/a.yaml").read_text())
    (tmp_path / "configs/suite/config-b200.txt").write_text("b.yaml\n")
    assert cli.main([*options, "--check"]) == 4
    shown = capsys.readouterr()
    assert "-        - exit_status: '*'\n+        - exit_status: 75" in shown.out
    assert '+    key: "eval-b200"' in shown.out
    assert "2 stale; run: evalsuite ci render --configs-root" in shown.err


def test_the_header_names_the_command_that_gives_the_same_file_again(tmp_path: Path) -> None:
    root = write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a"]})
    options = [
        *("ci", "render", "--configs-root", str(root), "--provider", "github"),
        *("--pipeline", "nightly", "--config", "config-h100.txt", "--retries", "2"),
        *("--setup", "pip install 'moe-evalsuite>=0.1'", "--run-args=--engine vllm"),
        "--soft-fail-accuracy",
    ]
    assert cli.main([*options, "--out", str(tmp_path)]) == 0
    path = tmp_path / ".github/workflows/nightly.yml"
    text = path.read_text()
    again = shlex.split(text.splitlines()[1].removeprefix("#   evalsuite "))
    path.unlink()
    assert cli.main([*again, "--out", str(tmp_path)]) == 0
    assert path.read_text() == text
    assert not (tmp_path / ".buildkite").exists()


@pytest.mark.parametrize(
    "wrong",
    [["--provider", "jenkins"], ["--pipeline", "weekly"], ["--retries", "11"], ["--config", "x"]],
    ids=lambda wrong: wrong[0],
)
def test_wrong_options_are_4_with_the_right_ones(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a"]})
    out = str(tmp_path / "out")
    assert cli.main(["ci", "render", "--configs-root", str(root), "--out", out, *wrong]) == 4
    assert wrong[1] in capsys.readouterr().err
    assert not Path(out).exists()


def test_a_pool_that_a_provider_cannot_reach_is_an_error(tmp_path: Path) -> None:
    hardware = HARDWARE.replace("ci: {buildkite: {queue: b200}, ", "ci: {")
    root = write_configs(tmp_path, {"suite/config-b200.txt": ["a"]}, hardware)
    rendered("github", PlanRequest(root=root))
    with pytest.raises(ConfigError, match=r"pool b200 has no ci\.buildkite"):
        rendered("buildkite", PlanRequest(root=root))


@pytest.mark.parametrize("name", ["${{ secrets.X }}", "{{matrix}}"])
def test_names_of_files_cannot_carry_a_providers_expressions(name: str, tmp_path: Path) -> None:
    root = write_configs(tmp_path, {f"suite/config-h100-{name}.txt": ["a"]})
    with pytest.raises(ConfigError, match="which CI expands"):
        rendered("github", PlanRequest(root=root, configs=(f"config-h100-{name}.txt",)))


def test_a_list_name_with_blanks_and_quotes_is_one_word_of_the_shell(tmp_path: Path) -> None:
    name = "config-h100-it's $(touch pwned) `x`.txt"
    root = write_configs(tmp_path / "configs", {f"suite/{name}": ["a"]})
    (step,) = rendered("buildkite", PlanRequest(root=root, configs=(name,)))["steps"]
    line = next(line for line in step["command"].splitlines() if "evalsuite run" in line)
    command = (
        line.replace("$$", "$").strip().rstrip("\\").replace("evalsuite run", "printf '%s\\n'")
    )
    command = command.replace(" 2>&1 ", " ")
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1] == name
    assert not (tmp_path / "pwned").exists()


def test_an_undefined_name_in_a_template_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pipeline,) = pipelines(PlanRequest(root=REPOSITORY / "configs", pipelines=("ci",)))
    folder = tmp_path / "providers"
    folder.mkdir()
    (folder / "own.yml.j2").write_text("[# output ci: own.yml #]\nkey: [= pipeline.colour =]\n")
    templates.providers.cache_clear()
    monkeypatch.setattr(templates, "template_folder", lambda: folder)
    monkeypatch.setattr(rendering, "template_folder", lambda: folder)
    try:
        with pytest.raises(ConfigError, match="no attribute 'colour'") as caught:
            rendering.render("own", pipeline, "")
        assert isinstance(caught.value.__cause__, jinja2.UndefinedError)
        # A provider is one file, and nothing else has to be changed for it, pools included.
        hardware = HARDWARE.replace("github:", "own:").replace("buildkite:", "own2:")
        root = write_configs(tmp_path / "configs", {"s/config-h100.txt": ["a"]}, hardware)
        with pytest.raises(ConfigError, match="'own2' is no CI provider; known: own"):
            pipelines(PlanRequest(root=root))
        (folder / "own.yml.j2").write_text(
            "[# output ci: own.yml #]\nkeys: [= pipeline.steps | map(attribute='key') | list =]\n"
        )
        item = rendering.render("own", pipeline, "")
        assert item.path == "own.yml"
        assert yaml.safe_load(item.text) == {"keys": ["check", "test", "demo"]}
    finally:
        templates.providers.cache_clear()
