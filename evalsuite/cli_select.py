"""`evalsuite ci select`: the jobs that a change touches, as ids or as steps to run.

Receives the options of `cli_ci.py`, prints, returns the exit code; no job is an answer, too,
and exits with 0. How changed paths become jobs is `evalsuite/ci/select.py`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evalsuite.ci import render as rendering
from evalsuite.ci import select as selecting
from evalsuite.ci.options import StepOptions
from evalsuite.ci.plan import pipelines, planned_jobs
from evalsuite.ci.select import Choice
from evalsuite.ci.templates import providers
from evalsuite.errors import ConfigError
from evalsuite.verdict import EXIT_OK

# Rows of a matrix name runners, which is one provider's way.
MATRIX = "matrix"
MATRIX_PROVIDER = "github"


@dataclass(frozen=True)
class SelectOptions:
    """`evalsuite ci select` as typed.

    Attributes:
        steps: How the steps of the selected jobs are made.
        base: Commit that the change goes into, None where it is not given; "", as a variable that
            CI does not set leaves it, is a commit that cannot be found.
        head: The change.
        changed_files: File of changed paths in place of git, "-" for standard input; separated
            by NUL if there is one in it, by line ends otherwise.
        form: "ids", "json" (a row a job), "matrix" (a row a step, for GitHub), or a provider,
            whose pipeline of just these jobs is printed.
    """

    steps: StepOptions
    base: str | None = None
    head: str = "HEAD"
    changed_files: str = ""
    form: str = "ids"


def select(options: SelectOptions, *, explain: bool = False) -> int:
    """Print the jobs that a change touches.

    Args:
        options: Which change, which jobs, which form.
        explain: Say of each job, on standard error, why it was chosen or not.

    Raises:
        ConfigError: Faulty configs or options.
    """
    known = ("ids", "json", MATRIX, *providers())
    if options.form not in known:
        raise ConfigError(f"--format {options.form!r}; known: {', '.join(known)}")
    if (options.base is not None) == bool(options.changed_files):
        raise ConfigError("name the change: --base COMMIT, or --changed-files FILE")
    steps = options.steps
    planned = planned_jobs(steps.configs, Path(steps.root) if steps.root else None)
    try:
        if options.changed_files:
            top, changed = _top(), _read_paths(options.changed_files)
        else:
            top = selecting.repository_root()
            changed = selecting.changed_paths(options.base or "", options.head)
        choices = selecting.select(planned, changed, top, steps.watch)
        looked_at = f"{len(changed)} changed file{'' if len(changed) == 1 else 's'}"
    except selecting.DiffError as error:
        looked_at = "an unknown change"
        print(f"warning: no diff, so every job is selected: {error}", file=sys.stderr)
        choices = selecting.select_all(planned, f"no diff to tell by: {error}")
    selected = [choice for choice in choices if choice.is_selected]
    if explain:
        for choice in choices:
            verb = "run " if choice.is_selected else "skip"
            why = choice.reason or "nothing that it runs on changed"
            print(f"{verb} {choice.job.id} ({choice.pool}): {why}", file=sys.stderr)
        left = len(choices) - len(selected)
        print(f"{len(selected)} of {len(choices)} jobs run, {left} do not", file=sys.stderr)
    if not selected:
        print(f"nothing to do: no job is touched by {looked_at}", file=sys.stderr)
    _print_choices(selected, options)
    return EXIT_OK


def _top() -> Path:
    """The repository's root, or this folder where there is no repository."""
    try:
        return selecting.repository_root()
    except selecting.DiffError:
        return Path.cwd().resolve()


def _read_paths(name: str) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--changed-files {name}: {error.strerror or error}") from error
    parts = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(part) for part in parts if part]


def _print_choices(choices: Sequence[Choice], options: SelectOptions) -> None:
    if options.form == "ids":
        for choice in choices:
            print(choice.job.id)
        return
    if options.form == "json":
        rows = [
            {"id": c.job.id, "pool": c.pool, "config": c.config, "reason": c.reason}
            for c in choices
        ]
        print(json.dumps(rows))
        return
    if options.form == MATRIX and not choices:
        print("[]")
        return
    only = frozenset(choice.job.id for choice in choices)
    (pipeline,) = pipelines(options.steps.request(("nightly",), only))
    if options.form == MATRIX:
        print(json.dumps(rendering.matrix(MATRIX_PROVIDER, pipeline)))
        return
    header = "# What one change touches, by `evalsuite ci select`; not to be kept."
    print(rendering.render(options.form, pipeline, header).text, end="")
