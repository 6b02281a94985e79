"""`/version` tells a rebuilt kernel from the one before: ours, another package's, a library's."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

import moeserve
from moeserve.server import source

REAL = Path(moeserve.__file__).parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a part of the package that is hashed in its place."""
    copy = tmp_path / "moeserve"
    shutil.copytree(REAL / "triton_kernels", copy / "triton_kernels")
    (copy / "__init__.py").write_text("")
    monkeypatch.setattr(moeserve, "__file__", str(copy / "__init__.py"))
    return copy


def test_every_file_of_code_counts_and_nothing_else(package: Path) -> None:
    before = source.source_hash()
    assert len(before) == 16
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"1")
    (package / "model.safetensors").write_bytes(b"1")
    assert source.source_hash() == before
    kernel = next((package / "triton_kernels").glob("*gemm*.py"))
    kernel.write_text(kernel.read_text() + "\n# another tile\n")
    changed = source.source_hash()
    assert changed != before
    (package / "tuned.json").write_text("{}")
    assert source.source_hash() not in (before, changed)


@pytest.mark.parametrize("is_module", [True, False])
def test_the_package_of_another_backend_counts_and_is_not_imported(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool
) -> None:
    before = source.source_hash()
    site = tmp_path / "site"
    about = site / "their_backend-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-backend\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[moeserve.moe_backends]\nx = their_backend.x:B\n")
    code = site / "their_backend.py" if is_module else site / "their_backend" / "__init__.py"
    code.parent.mkdir(exist_ok=True)
    code.write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    found = source.source_hash()
    assert found != before
    code.write_text("raise RuntimeError('imported, rebuilt')\n")
    assert source.source_hash() not in (before, found)


def test_the_version_of_a_kernel_library_counts(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": "2.13.0", "triton": "3.7.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise source.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(source.importlib.metadata, "version", version)
    before = source.source_hash()
    versions["flashinfer-python"] = "0.6.12"
    assert source.source_hash() != before
