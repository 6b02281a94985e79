"""The commands about CI: `evalsuite ci render`, `evalsuite ci select`.

Declares their options; `render` is here, `select` in `cli_select.py`. Each returns the exit
code: 0, or 4 for anything the user must mend, a stale pipeline among it. The work is in
`evalsuite/ci/`.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evalsuite.verdict import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from evalsuite.ci.options import StepOptions

app = typer.Typer(help="CI pipelines from the configs, and jobs that a change touches.")

# Options of both commands.
_CONFIG = typer.Option(None, "--config", help="List of GPU jobs; repeatable.")
_ROOT = typer.Option("", "--configs-root", help="Folder of the suites.")
_SETUP = typer.Option(None, "--setup", help="Command that installs; repeatable.")
_RUN_ARGS = typer.Option("", "--run-args", help="More arguments of `evalsuite run`.")
_RETRIES = typer.Option(1, "--retries", help="Attempts after an infrastructure error.")
_SOFT = typer.Option(False, "--soft-fail-accuracy", help="Show a miss, do not fail.")
_WATCH = typer.Option(None, "--watch", help="Path every job hangs on; !p excludes.")


@dataclass(frozen=True)
class RenderOptions:
    """`evalsuite ci render` as typed.

    Attributes:
        steps: How the steps are made.
        providers: Which providers, () for every template.
        pipelines: Which pipelines, () for all.
        out: Folder that the providers' paths are below.
    """

    steps: StepOptions
    providers: tuple[str, ...] = ()
    pipelines: tuple[str, ...] = ()
    out: str = field(default=".")

    def command(self) -> str:
        """The command line that means the same; it stands at the top of each file."""
        argv = ["evalsuite", "ci", "render"]
        for option, values in (("--provider", self.providers), ("--pipeline", self.pipelines)):
            for value in values:
                argv += [option, value]
        return shlex.join([*argv, *self.steps.argv()])


def render(options: RenderOptions, *, check: bool = False) -> int:
    """Write the providers' files, or say which of them are stale.

    Args:
        options: What to render.
        check: Write nothing; exit 4 with a diff for each file that is not as it would be.

    Raises:
        ConfigError: Faulty configs or options.
    """
    from evalsuite.ci import render as rendering
    from evalsuite.ci.plan import PIPELINES, pipelines
    from evalsuite.ci.templates import providers

    built = pipelines(options.steps.request(options.pipelines or PIPELINES))
    header = rendering.generated_header(options.command())
    rendered = [
        rendering.render(provider, pipeline, header)
        for provider in options.providers or providers()
        for pipeline in built
    ]
    out = Path(options.out)
    if not options.steps.setup and not (out / "constraints.txt").is_file():
        print(
            f"warning: no constraints.txt in {out}: the steps would install a clone of this "
            "project, and none is here; say what installs the suite: --setup 'pip install ...'",
            file=sys.stderr,
        )
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


@app.command(name="render")
def _render(
    provider: list[str] = typer.Option(None, "--provider", help="buildkite, github; repeatable."),
    pipeline: list[str] = typer.Option(None, "--pipeline", help="ci, nightly, changes."),
    config: list[str] = _CONFIG,
    configs_root: str = _ROOT,
    setup: list[str] = _SETUP,
    run_args: str = _RUN_ARGS,
    retries: int = _RETRIES,
    soft: bool = _SOFT,
    watch: list[str] = _WATCH,
    out: str = typer.Option(".", "--out", help="Root of the repository to write into."),
    check: bool = typer.Option(False, "--check", help="Write nothing; exit 4 if stale."),
) -> int:
    """Write the pipelines of every CI provider from the configs."""
    steps = _steps(config, configs_root, setup, run_args, retries, soft, watch)
    options = RenderOptions(steps, tuple(provider or ()), tuple(pipeline or ()), out)
    return render(options, check=check)


@app.command(name="select")
def _select(
    base: str = typer.Option(None, "--base", help="Commit that the change goes into."),
    head: str = typer.Option("HEAD", "--head", help="The change."),
    changed_files: str = typer.Option("", "--changed-files", help="Changed paths; - for stdin."),
    config: list[str] = _CONFIG,
    configs_root: str = _ROOT,
    setup: list[str] = _SETUP,
    run_args: str = _RUN_ARGS,
    retries: int = _RETRIES,
    soft: bool = _SOFT,
    watch: list[str] = _WATCH,
    form: str = typer.Option("ids", "--format", help="ids, json, matrix, buildkite, github."),
    explain: bool = typer.Option(False, "--explain", help="Say why, for each job."),
) -> int:
    """Print the jobs that a change can have touched."""
    from evalsuite.cli_select import SelectOptions, select

    steps = _steps(config, configs_root, setup, run_args, retries, soft, watch)
    return select(SelectOptions(steps, base, head, changed_files, form), explain=explain)


def _steps(
    config: list[str] | None,
    configs_root: str,
    setup: list[str] | None,
    run_args: str,
    retries: int,
    soft: bool,
    watch: list[str] | None,
) -> StepOptions:
    from evalsuite.ci.options import StepOptions

    return StepOptions(
        configs=tuple(config or ()),
        root=configs_root,
        setup=tuple(setup or ()),
        run_args=run_args,
        retries=retries,
        is_accuracy_soft=soft,
        watch=tuple(watch or ()),
    )
