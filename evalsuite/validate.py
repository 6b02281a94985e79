"""Folders, lists and YAMLs -> every fault in all of them, without running anything.

Receives paths as a user names them; returns a `Survey` (what was read, what is wrong). How it
is printed is `cli_config.py`; the checks themselves live where the data does (`config.py`,
`lists.py`, `hardware.py`, `capacity.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evalsuite import engines
from evalsuite.capacity import check_capacity
from evalsuite.config import EvalConfig, LoadedConfig, read_config
from evalsuite.errors import ConfigError, Problem
from evalsuite.hardware import FILE_NAME, Hardware, read_hardware
from evalsuite.jobs import make_job
from evalsuite.layout import layout_of
from evalsuite.lists import (
    YAML_SUFFIXES,
    ConfigList,
    hardware_file,
    list_files,
    orphans,
    read_list,
    resolve_lists,
)


@dataclass
class Survey:
    """What was read and what is wrong with it.

    Attributes:
        configs: Every YAML read, by real path.
        lists: Every list read.
        problems: Faults of all of them.
    """

    configs: dict[Path, LoadedConfig] = field(default_factory=dict)
    lists: list[ConfigList] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def has_errors(self) -> bool:
        """Whether anything may not be run."""
        return any(problem.severity == "error" for problem in self.problems)


def survey(
    paths: Sequence[str],
    root: Path,
    *,
    is_strict: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Survey:
    """Read and check everything that the paths name; nothing is raised.

    Args:
        paths: Folders, lists, YAMLs, or bare names of lists.
        root: Folder of the suites: for bare names and for the pools.
        is_strict: Whether an orphan YAML and a threshold without provenance are errors.
        overrides: Config keys set on the command line.
    """
    surveyor = _Surveyor(root, is_strict, overrides or {})
    for path in paths:
        surveyor.visit(path)
    return surveyor.result


class _Surveyor:
    """Walks the paths once, each file once."""

    def __init__(self, root: Path, is_strict: bool, overrides: Mapping[str, Any]) -> None:
        self.root = root
        self.is_strict = is_strict
        self.overrides = overrides
        self.result = Survey()
        self._hardware: dict[Path, Hardware] = {}
        self._fits: set[tuple[Path, str]] = set()

    def visit(self, name: str) -> None:
        path = Path(name)
        if path.is_dir():
            self._folder(path)
        elif path.name == FILE_NAME and path.is_file():
            self._pools_of(path)
        else:
            try:
                for found in resolve_lists(name, self.root):
                    self._list(found, self.root)
            except ConfigError as error:
                self.result.problems += error.problems

    def _pools_of(self, path: Path) -> Hardware:
        key = path.resolve()
        if key not in self._hardware:
            self._hardware[key] = read_hardware(path)
            self.result.problems += self._hardware[key].problems
        return self._hardware[key]

    def _folder(self, folder: Path) -> None:
        if (folder / FILE_NAME).is_file():
            self._pools_of(folder / FILE_NAME)
        num_files = 0
        for suite in _suites(folder):
            # A suite given by itself still belongs to the folder of suites above it.
            root = folder if suite != folder else folder.parent
            lists = [read_list(path, root) for path in list_files(suite)]
            for found in lists:
                self._list(found, root)
            yamls = [path for path in _yamls(suite) if not _is_in_inner_suite(path, suite)]
            for path in yamls:
                self._config(path)
            num_files += len(yamls) + len(lists)
            if lists:
                self._orphans(suite, lists, set(yamls))
        if not num_files and not (folder / FILE_NAME).is_file():
            message = "holds no list (config-*.txt) and no YAML"
            self.result.problems.append(Problem("error", message, str(folder)))

    def _orphans(self, suite: Path, lists: Sequence[ConfigList], yamls: set[Path]) -> None:
        for path in orphans(suite, lists):
            if path not in yamls:
                continue
            severity = "error" if self.is_strict else "warning"
            names = ", ".join(found.path.name for found in lists)
            message = f"no list of this suite names it, so it never runs; add it to one of {names}"
            self.result.problems.append(Problem(severity, message, str(path)))

    def _list(self, found: ConfigList, root: Path) -> None:
        self.result.problems += found.problems
        if not found.is_bare:
            self.result.lists.append(found)
        hardware = self._pools_of(hardware_file(root))
        pool = hardware.pool_of_list(found.path.name)
        if pool is None and found.entries and not found.is_bare:
            known = ", ".join(hardware.pools)
            message = f"its name holds no known pool ({known}), so GPUs and memory go unchecked"
            self.result.problems.append(Problem("note", message, str(found.path)))
        for entry in found.entries:
            loaded = self._config(entry.path)
            key = entry.path.resolve(), pool.name if pool else ""
            if loaded.config is None or pool is None or key in self._fits:
                continue
            self._fits.add(key)
            self.result.problems += check_capacity(
                loaded.config,
                layout_of(loaded.config),
                pool,
                str(entry.path),
                loaded.lines.get("server_args", 1),
            )

    def _config(self, path: Path) -> LoadedConfig:
        key = path.resolve()
        if key in self.result.configs:
            return self.result.configs[key]
        loaded = read_config(path, self.overrides)
        self.result.configs[key] = loaded
        self.result.problems += loaded.problems
        if loaded.config is not None:
            self.result.problems += refused_flags(loaded.config, loaded, path)
            self.result.problems += _refused_settings(loaded.config, loaded, path)
        if self.is_strict and loaded.config is not None and not loaded.config.provenance:
            line = loaded.lines.get("accuracy_threshold", 1)
            message = "says not where the threshold comes from; add `provenance: ...`"
            self.result.problems.append(Problem("error", message, str(path), line, "provenance"))
        return loaded


def refused_flags(config: EvalConfig, loaded: LoadedConfig, path: Path) -> list[Problem]:
    """Flags that the engine cannot take; an external server has none of ours."""
    if config.engine == "external":
        return []
    try:
        engines.get(config.engine).launch_spec(make_job(path, config, None))
    except ConfigError as error:
        default = loaded.lines.get("server_args", 1)
        return [
            replace(problem, file=str(path), line=loaded.lines.get(problem.key, default))
            for problem in error.problems
        ]
    return []


def _refused_settings(config: EvalConfig, loaded: LoadedConfig, path: Path) -> list[Problem]:
    """Settings that the named evaluator does not have, the chat route for lm-eval among them."""
    if config.evaluator != "lm-eval":
        return []
    from evalsuite.evaluators.lm_eval_form import find_form

    try:
        find_form(config)
    except ConfigError as error:
        return [
            replace(problem, file=str(path), line=loaded.lines.get(problem.key, 1))
            for problem in error.problems
        ]
    return []


def _suites(folder: Path) -> Iterator[Path]:
    """The folder and every folder below it that may be a suite, outermost first."""
    for place, inner, _ in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith((".", "__")))
        path = Path(place)
        if path == folder or list_files(path):
            yield path


def _yamls(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in YAML_SUFFIXES
        and path.name != FILE_NAME
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _is_in_inner_suite(path: Path, suite: Path) -> bool:
    """Whether a folder between the file and the suite has lists of its own."""
    folder = path.parent
    while folder != suite:
        if list_files(folder):
            return True
        folder = folder.parent
    return False
