"""The commands about configs: `validate` (with `--explain`), `ls`, `new`.

Each function receives what the command line says, prints, and returns the exit code: 0, or 4
for anything the user must mend. Options are declared in `cli.py`; output is plain text, so
that it reads the same in a terminal, a log and a pre-commit hook.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from evalsuite.errors import ConfigError, Problem
from evalsuite.hardware import read_hardware
from evalsuite.jobs import EvalJob, Selection, load_jobs
from evalsuite.lists import configs_root, hardware_file, list_files, own_root, suite_folders
from evalsuite.machine import detect_machine
from evalsuite.names import engine_override
from evalsuite.new_config import NewConfig, write_config
from evalsuite.validate import survey
from evalsuite.verdict import EXIT_OK, EXIT_USAGE


def print_problems(problems: Sequence[Problem], *, is_verbose: bool = False) -> None:
    """Print errors in full on stderr; equal warnings of many files once on stdout."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        if problem.severity == "error":
            print(problem, file=sys.stderr)
            continue
        key = (problem.severity, problem.key, problem.message)
        groups.setdefault(key, []).append(problem)
    for group in groups.values():
        if is_verbose:
            for problem in group:
                print(problem)
            continue
        more = len(group) - 1
        print(f"{group[0]}" + (f" (and {more} more like it; --verbose lists them)" if more else ""))


def validate(
    paths: Sequence[str],
    *,
    strict: bool = False,
    engine: str | None = None,
    explain: str | None = None,
    root: str | None = None,
    verbose: bool = False,
) -> int:
    """Check folders, lists and YAMLs; explain one job.

    Args:
        paths: What to check; the whole folder of configs where there is none.
        strict: Whether orphans and thresholds without provenance are errors.
        engine: Engine to check for, in place of the files' own.
        explain: A job to describe, by id or file name.
        root: Folder of the suites.
        verbose: Whether every warning is printed, equal ones too.

    Returns:
        0 without errors (warnings and notes allowed), else 4.
    """
    try:
        overrides = engine_override(engine)
        folder = _root_for(paths, root)
        if explain is not None:
            return _explain(explain, paths or [str(folder)], folder, overrides)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_USAGE
    result = survey(paths or [str(folder)], folder, is_strict=strict, overrides=overrides)
    print_problems(result.problems, is_verbose=verbose)
    counts = {
        name: sum(problem.severity == name for problem in result.problems)
        for name in ("error", "warning", "note")
    }
    found = ", ".join(_count(number, name) for name, number in counts.items())
    read = f"{_count(len(result.configs), 'config')} in {_count(len(result.lists), 'list')}"
    print(f"{read}: {found}")
    return EXIT_USAGE if result.has_errors else EXIT_OK


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def _root_for(paths: Sequence[str], root: str | None) -> Path:
    """The suites' folder; one of the paths may be it."""
    if root is None and len(paths) == 1 and Path(paths[0]).is_dir():
        return Path(paths[0])
    return configs_root(root)


def _explain(name: str, paths: Sequence[str], root: Path, overrides: dict[str, str]) -> int:
    from evalsuite.explain import explain, find_jobs

    machine = detect_machine(environ=os.environ)
    found, problems = find_jobs(name, paths, root, overrides, machine)
    print_problems(problems, is_verbose=True)
    print("\n\n".join("\n".join(explain(job, sources)) for job, sources in found))
    return EXIT_OK


def new_config(asked: NewConfig, root: str | None = None) -> int:
    """Write a YAML and add it to its list; nothing is overwritten.

    Returns:
        0, or 4 with everything that is wrong and nothing written.
    """
    try:
        path, list_path, problems = write_config(asked, own_root(root))
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_USAGE
    print_problems(problems, is_verbose=True)
    print(f"wrote {path} and added it to {list_path}")
    print(f"try it: {shlex.join(['evalsuite', 'run', str(path), '--limit', '50'])}")
    return EXIT_OK


def list_jobs(
    configs: Sequence[str] = (), *, root: str | None = None, engine: str | None = None
) -> int:
    """Print the jobs of lists (of every list where none is named), with pool and need.

    Returns:
        0, or 4 with every fault of every file.
    """
    machine = detect_machine(environ=os.environ)
    jobs_of: dict[str, tuple[EvalJob, ...]] = {}
    problems: list[Problem] = []
    try:
        overrides = engine_override(engine)
        folder = configs_root(root)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_USAGE
    every = [str(path) for suite in suite_folders(folder) for path in list_files(suite)]
    # One list at a time, because a file may stand in the lists of several pools.
    for name in configs or every:
        try:
            selected = load_jobs(Selection((name,), folder, overrides), machine)
            jobs_of[name] = selected.jobs
        except ConfigError as error:
            problems += error.problems
    if not configs and not every:
        problems += read_hardware(hardware_file(folder)).problems
        problems.append(Problem("error", f"no lists (config-<pool>.txt) in {folder}"))
    if problems:
        print_problems(problems)
        return EXIT_USAGE
    for name, jobs in jobs_of.items():
        pools = sorted({job.pool.name if job.pool else "no pool" for job in jobs})
        print(f"{name} ({', '.join(pools)}, {_count(len(jobs), 'job')})")
        _print_table([_row(job) for job in jobs])
    print(f"this machine: {machine}")
    return EXIT_OK


def _row(job: EvalJob) -> tuple[str, ...]:
    config, layout = job.config, job.layout
    is_cpu = job.pool is not None and job.pool.vendor == "cpu"
    return (
        job.id,
        config.engine,
        str(layout),
        "CPU" if is_cpu else f"{layout.num_gpus} GPU" + ("s" if layout.num_gpus > 1 else ""),
        config.model_name,
        f"{config.accuracy_threshold:g} - {config.tolerance:g}",
        "skip" if job.skip_reason else "runs here",
    )


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
