"""The two packages as they lie on the disk, module by module, for tests of the whole tree."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = {"evalsuite": ROOT / "evalsuite", "moeserve": ROOT / "kernels" / "moeserve"}


def python_files(package: str) -> list[Path]:
    return sorted(SOURCE[package].rglob("*.py"))


def module_name(package: str, path: Path) -> str:
    parts = (package, *path.relative_to(SOURCE[package]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(package: str) -> Mapping[str, ast.Module]:
    return {
        module_name(package, path): ast.parse(path.read_text(encoding="utf-8"))
        for path in python_files(package)
    }
