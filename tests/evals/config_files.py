"""Writes one config to disk and reads it back; shared by the tests of `config.py`."""

from __future__ import annotations

from pathlib import Path

from evalsuite.config import EvalConfig, load_config, read_config
from evalsuite.errors import Problem

BASE = "model_name: Qwen/Qwen3-30B-A3B\naccuracy_threshold: 0.88\nnum_questions: 1319\n"
BASE += "num_fewshot: 5\ntolerance: 0.02\n"


def load(tmp_path: Path, text: str) -> EvalConfig:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def errors(tmp_path: Path, text: str | bytes) -> list[Problem]:
    path = tmp_path / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    loaded = read_config(path, display="a.yaml")
    found = [problem for problem in loaded.problems if problem.severity == "error"]
    assert (loaded.config is None) == bool(found)
    return found


def warnings(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    loaded = read_config(path)
    assert loaded.config is not None, loaded.problems
    return {problem.key: problem.message for problem in loaded.problems}
