"""What a user installs: the wheel, the editable form, and a machine that has its own torch."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from fake_server import Action, FakeServer

from evalsuite import tasks
from evalsuite.tasks.base import DataSource, TaskSettings

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


def build(kind: str, folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install '.[test]'")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_both_packages_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "evalsuite",
        "moeserve",
        "moe_evalsuite-0.1.0.dist-info",
    }
    for path in (ROOT / "configs").rglob("*.*"):
        assert f"evalsuite/configs/{path.relative_to(ROOT / 'configs')}" in names
    assert "evalsuite/ci/providers/github.yml.j2" in names
    assert "moeserve/tiny/minigsm-tiny/model.safetensors" in names


def test_the_editable_form_puts_no_folder_in_front_of_the_real_one(tmp_path: Path) -> None:
    # Even a folder of data called `evalsuite` beside the packages would hide this one, because
    # the finder of an editable install is asked last.
    names = zipfile.ZipFile(build("build_editable", tmp_path)).namelist()
    assert [name for name in names if name.startswith(("evalsuite/", "moeserve/"))] == []
    assert "_editable_impl_moe_evalsuite.py" in names


def test_pytest_does_not_warn_of_the_editable_form_away_from_the_clone(tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    site = next((home / "lib").iterdir()) / "site-packages"
    zipfile.ZipFile(build("build_editable", tmp_path)).extractall(site)
    # The rest of this environment, with whatever form of the package it has behind that one.
    (site / "zz_shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    away = tmp_path / "away"
    away.mkdir()
    command = [home / "bin" / "python", "-m", "pytest", "evalsuite"]
    done = subprocess.run(
        [*command, "--config", "config-cpu.txt", "--dry-run"],
        cwd=away,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AssertRewriteWarning" not in done.stdout + done.stderr


OTHER_TORCH = """\
import pathlib
pathlib.Path(r"{marker}").write_text("torch was imported")
__version__ = "1.0.0"
"""


def test_the_suite_alone_leaves_another_torch_where_it_is(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = next((home / "lib").iterdir()) / "site-packages"
    # The base dependencies are those of this environment; its torch is hidden by another.
    (site / "zz_shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    marker = tmp_path / "imported"
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(OTHER_TORCH.format(marker=marker))
    about = site / "torch-1.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    (about / "RECORD").write_text("torch/__init__.py,,\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, cwd=tmp_path)
    where = "import importlib.util as u; print(u.find_spec('evalsuite').origin)"
    found = subprocess.run(
        [python, "-c", where], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert found.stdout.startswith(str(site))

    samples = tasks.get("minigsm").samples(TaskSettings(20, 1, "", DataSource()))
    right = {sample.prompt: f" The answer is {sample.target}." for sample in samples}
    job = {
        "model_name": "fake", "accuracy_threshold": 0.9, "tolerance": 0.1, "num_questions": 20,
        "num_fewshot": 1, "task": "minigsm",
        "provenance": {"source": "test", "num_questions": 20},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    with FakeServer(lambda r: Action(texts=tuple(right[p] for p in r.prompts))) as server:
        done = subprocess.run(
            [home / "bin" / "evalsuite", "run", "job.yaml", "--base-url", server.url],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS 1.0000" in done.stdout
    assert not marker.exists()
    assert "Version: 1.0.0" in (about / "METADATA").read_text()
