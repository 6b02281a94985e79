"""The commands about CI: `evalsuite ci render`, `evalsuite ci select`.

Each function receives what the command line says, prints, and returns the exit code: 0, or 4
for anything the user must mend, a stale pipeline among it. The work is in `evalsuite/ci/`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evalsuite.errors import ConfigError
from evalsuite.verdict import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from evalsuite.ci.select import Choice

app = typer.Typer(help="CI pipelines from the configs, and jobs that a change touches.")


@dataclass(frozen=True)
class RenderOptions:
    """`evalsuite ci render` as typed.

    Attributes:
        providers: Which providers, () for every template.
        pipelines: Which pipelines, () for all.
        configs: `--config` values of the nightly, () for every `config-<GPU pool>.txt`.
        root: Folder of the suites, "" to find it.
        setup: Commands that install the suite, () for this repository's own.
        run_args: More arguments of `evalsuite run`, as one text.
        retries: Further attempts after an infrastructure error.
        is_accuracy_soft: Whether a missed threshold is shown without failing the pipeline.
        out: Folder that the providers' paths are below.
    """

    providers: tuple[str, ...] = ()
    pipelines: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    root: str = ""
    setup: tuple[str, ...] = ()
    run_args: str = ""
    retries: int = 1
    is_accuracy_soft: bool = False
    out: str = "."

    def command(self) -> str:
        """The command line that means the same; it stands at the top of each file."""
        argv = ["evalsuite", "ci", "render"]
        named = (
            ("--provider", self.providers),
            ("--pipeline", self.pipelines),
            ("--config", self.configs),
            ("--setup", self.setup),
        )
        for option, values in named:
            for value in values:
                argv += [option, value]
        argv += ["--configs-root", self.root] if self.root else []
        argv += [f"--run-args={self.run_args}"] if self.run_args else []
        argv += ["--retries", str(self.retries)] if self.retries != 1 else []
        argv += ["--soft-fail-accuracy"] if self.is_accuracy_soft else []
        return shlex.join(argv)


def render(options: RenderOptions, *, check: bool = False) -> int:
    """Write the providers' files, or say which of them are stale.

    Args:
        options: What to render.
        check: Write nothing; exit 4 with a diff for each file that is not as it would be.

    Raises:
        ConfigError: Faulty configs or options.
    """
    from evalsuite.ci import render as rendering
    from evalsuite.ci.plan import PIPELINES, PlanRequest, pipelines
    from evalsuite.ci.templates import providers

    if not 0 <= options.retries <= 10:
        raise ConfigError(f"--retries {options.retries}: from 0 to 10, which Buildkite allows")
    request = PlanRequest(
        configs=options.configs,
        root=Path(options.root) if options.root else None,
        setup=options.setup,
        run_args=tuple(shlex.split(options.run_args)),
        num_retries=options.retries,
        is_accuracy_soft=options.is_accuracy_soft,
        pipelines=options.pipelines or PIPELINES,
    )
    built = pipelines(request)
    header = rendering.generated_header(options.command())
    rendered = [
        rendering.render(provider, pipeline, header)
        for provider in options.providers or providers()
        for pipeline in built
    ]
    out = Path(options.out)
    if check:
        diffs = rendering.stale(rendered, out)
        for diff in diffs:
            print(diff)
        if diffs:
            print(f"error: {len(diffs)} stale; run: {options.command()}", file=sys.stderr)
        return EXIT_USAGE if diffs else EXIT_OK
    written = rendering.write(rendered, out)
    for path in written:
        print(f"wrote {path}")
    if not written:
        print(f"{len(rendered)} files are up to date")
    return EXIT_OK


@dataclass(frozen=True)
class SelectOptions:
    """`evalsuite ci select` as typed.

    Attributes:
        base: Commit that the change goes into.
        head: The change.
        changed_files: File of changed paths in place of git, "-" for standard input; separated
            by NUL if there is one in it, by line ends otherwise.
        configs: `--config` values, () for every `config-<GPU pool>.txt`.
        root: Folder of the suites, "" to find it.
        watch: More paths that every job hangs on.
        form: "ids", "json", or a provider, whose pipeline of just these jobs is printed.
    """

    base: str = ""
    head: str = "HEAD"
    changed_files: str = ""
    configs: tuple[str, ...] = ()
    root: str = ""
    watch: tuple[str, ...] = ()
    form: str = "ids"


def select(options: SelectOptions, *, explain: bool = False) -> int:
    """Print the jobs that a change touches; none is an answer, too, and exits with 0.

    Args:
        options: Which change, which jobs, which form.
        explain: Say of each job, on standard error, why it was chosen or not.

    Raises:
        ConfigError: Faulty configs or options.
    """
    from evalsuite.ci import select as selecting
    from evalsuite.ci.plan import planned_jobs
    from evalsuite.ci.templates import providers

    if options.form not in ("ids", "json", *providers()):
        raise ConfigError(f"--format {options.form!r}; known: ids, json, {', '.join(providers())}")
    if bool(options.base) == bool(options.changed_files):
        raise ConfigError("name the change: --base COMMIT, or --changed-files FILE")
    planned = planned_jobs(options.configs, Path(options.root) if options.root else None)
    try:
        if options.changed_files:
            top, changed = _top(), _read_paths(options.changed_files)
        else:
            top = selecting.repository_root()
            changed = selecting.changed_paths(options.base, options.head)
        choices = selecting.select(planned, changed, top, options.watch)
        looked_at = f"{len(changed)} changed files"
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
    if not selected:
        print(f"nothing to do: no job is touched by {looked_at}", file=sys.stderr)
    _print_choices(selected, options)
    return EXIT_OK


def _top() -> Path:
    """The repository's root, or this folder where there is no repository."""
    from evalsuite.ci.select import DiffError, repository_root

    try:
        return repository_root()
    except DiffError:
        return Path.cwd().resolve()


def _read_paths(name: str) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--changed-files {name}: {error.strerror or error}") from error
    parts = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(part) for part in parts if part]


def _print_choices(choices: Sequence[Choice], options: SelectOptions) -> None:
    from evalsuite.ci.plan import PlanRequest, pipelines
    from evalsuite.ci.render import render as render_pipeline

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
    request = PlanRequest(
        configs=options.configs,
        root=Path(options.root) if options.root else None,
        pipelines=("nightly",),
        only=frozenset(choice.job.id for choice in choices),
    )
    (pipeline,) = pipelines(request)
    header = "# What one change touches, by `evalsuite ci select`; not to be kept."
    print(render_pipeline(options.form, pipeline, header).text, end="")


@app.command(name="render")
def _render(
    provider: list[str] = typer.Option(None, "--provider", help="buildkite, github; repeatable."),
    pipeline: list[str] = typer.Option(None, "--pipeline", help="ci, nightly; repeatable."),
    config: list[str] = typer.Option(None, "--config", help="List of the nightly; repeatable."),
    configs_root: str = typer.Option("", "--configs-root", help="Folder of the suites."),
    setup: list[str] = typer.Option(None, "--setup", help="Command that installs; repeatable."),
    run_args: str = typer.Option("", "--run-args", help="More arguments of `evalsuite run`."),
    retries: int = typer.Option(1, "--retries", help="Attempts after an infrastructure error."),
    soft: bool = typer.Option(False, "--soft-fail-accuracy", help="Show a miss, do not fail."),
    out: str = typer.Option(".", "--out", help="Root of the repository to write into."),
    check: bool = typer.Option(False, "--check", help="Write nothing; exit 4 if stale."),
) -> int:
    """Write the pipelines of every CI provider from the configs."""
    options = RenderOptions(
        providers=tuple(provider or ()),
        pipelines=tuple(pipeline or ()),
        configs=tuple(config or ()),
        root=configs_root,
        setup=tuple(setup or ()),
        run_args=run_args,
        retries=retries,
        is_accuracy_soft=soft,
        out=out,
    )
    return render(options, check=check)


@app.command(name="select")
def _select(
    base: str = typer.Option("", "--base", help="Commit that the change goes into."),
    head: str = typer.Option("HEAD", "--head", help="The change."),
    changed_files: str = typer.Option("", "--changed-files", help="Changed paths; - for stdin."),
    config: list[str] = typer.Option(None, "--config", help="List to choose from; repeatable."),
    configs_root: str = typer.Option("", "--configs-root", help="Folder of the suites."),
    watch: list[str] = typer.Option(None, "--watch", help="Path every job hangs on; !p excludes."),
    form: str = typer.Option("ids", "--format", help="ids, json, buildkite, github."),
    explain: bool = typer.Option(False, "--explain", help="Say why, for each job."),
) -> int:
    """Print the jobs that a change can have touched."""
    options = SelectOptions(
        base=base,
        head=head,
        changed_files=changed_files,
        configs=tuple(config or ()),
        root=configs_root,
        watch=tuple(watch or ()),
        form=form,
    )
    return select(options, explain=explain)
