"""`evalsuite run` and `evalsuite rerun`: jobs into verdicts, reports and one exit code.

Receives the options, prints progress and the table, returns the exit code of the run. The same
without this file: `pytest evalsuite` (`plugin.py`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evalsuite.errors import ConfigError
from evalsuite.family import hold_family_rate
from evalsuite.names import suggestion
from evalsuite.verdict import (
    EXIT_ACCURACY,
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    Status,
    Verdict,
    exit_code,
)

if TYPE_CHECKING:
    from evalsuite.run_folder import RunFolder
    from evalsuite.session import Prepared, RunRequest

_RERUN = frozenset({Status.FAIL, Status.ERROR, Status.INCONCLUSIVE})


def add_commands(app: typer.Typer) -> None:
    """Add this file's commands to the command line."""
    app.command()(run)
    app.command()(rerun)


def run(
    names: list[str] = typer.Argument(None, help="Lists, YAMLs, or jobs to keep of --config."),
    config: list[str] = typer.Option(None, "--config", help="List or YAML; may be repeated."),
    engine: str = typer.Option("", "--engine", help="Engine in place of the files' own."),
    base_url: str = typer.Option("", "--base-url", help="Evaluate this running server."),
    pool: str = typer.Option("", "--pool", help="Pool in place of the lists' own."),
    limit: int = typer.Option(None, "--limit", help="Ask only the first N questions."),
    shard: str = typer.Option("", "--shard", metavar="I/N", help="Run the i-th of n parts."),
    durations: str = typer.Option("", "--durations", help="Recorded durations, for --shard."),
    record_durations: str = typer.Option(
        "", "--record-durations", metavar="FILE", help="Add this run's durations to FILE."
    ),
    results: str = typer.Option("results", "--results", help="Folder for run folders."),
    configs_root: str = typer.Option("", "--configs-root", help="Folder of the suites."),
    data_dir: str = typer.Option("", "--data-dir", help="Folder of data files."),
    baselines: str = typer.Option("baselines", "--baselines", help="Approved baselines."),
    executor: str = typer.Option("local", "--executor", help="local or ray."),
    stop_grace: float = typer.Option(
        10.0, "--stop-grace", metavar="SECONDS", help="From TERM to KILL of a server."
    ),
    resume: str = typer.Option("", "--resume", metavar="RUN", help="Go on with this run folder."),
    keep_going: bool = typer.Option(
        True, "--keep-going/--fail-fast", help="Run the rest after a failure, or leave it."
    ),
    early_end: bool = typer.Option(
        True, "--early-end/--no-early-end", help="End a job whose gate is sure to fail, or not."
    ),
    errors_first: bool = typer.Option(False, "--errors-first", help="Let 4 and 75 beat 1."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check and list; start nothing."),
) -> int:
    """Run jobs: server, questions, verdict, reports."""
    from evalsuite.run_folder import RunFolder, new_folder
    from evalsuite.session import RunRequest, with_new_configs

    if resume:
        _refuse_with_resume(names, config, engine, base_url, pool, limit, shard)
        folder = RunFolder(_find_run(resume, results))
        return _run(RunRequest.from_json(folder.asked()), folder, dry_run=dry_run)
    request = RunRequest(
        configs=tuple(config or ()),
        root=configs_root,
        engine=engine,
        base_url=base_url,
        pool=pool,
        limit=limit,
        shard=shard,
        durations=durations,
        results=results,
        data_dir=data_dir,
        baselines=baselines,
        executor=executor,
        stops_at_failure=not keep_going,
        grace_s=stop_grace,
        recorded=record_durations,
        ends_early=early_end,
        errors_first=errors_first,
    )
    request = with_new_configs(request, names or ())
    return _run(request, new_folder(Path(results)), dry_run=dry_run)


def rerun(
    run_folder: str = typer.Argument(metavar="RUN", help="Folder of a run, or its name."),
    failed: bool = typer.Option(False, "--failed", help="Only what did not pass."),
    results: str = typer.Option("results", "--results", help="Folder for run folders."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check and list; start nothing."),
) -> int:
    """Run a run's jobs again, from the first question, in a new folder."""
    from evalsuite.report import json_report
    from evalsuite.run_folder import RunFolder, new_folder
    from evalsuite.session import RunRequest

    old = RunFolder(_find_run(run_folder, results))
    request = RunRequest.from_json(old.asked())
    if failed:
        only = tuple(v.job_id for v in json_report.read(old.path) if v.status in _RERUN)
        if not only:
            print(f"{old.path}: every job passed or was skipped; nothing to run again")
            return EXIT_OK
        # The shard was cut from the whole list; what failed is named job by job.
        request = replace(request, only=only, shard="")
    return _run(request, new_folder(Path(results)), dry_run=dry_run)


def _refuse_with_resume(*given: object) -> None:
    if any(given):
        raise ConfigError("--resume goes on with what the run was asked for; give nothing else")


def _find_run(name: str, results: str) -> Path:
    for path in (Path(name), Path(results) / name):
        if (path / "run.json").is_file():
            return path
    runs = sorted((path.parent.name for path in Path(results).glob("*/run.json")), reverse=True)
    hint = suggestion(name, runs) if runs else ""
    raise ConfigError(f"{name!r} is not the folder of a run, nor one below {results}{hint}")


def _run(request: RunRequest, folder: RunFolder, *, dry_run: bool) -> int:
    """Prepare, execute, report."""
    from evalsuite.session import interrupt_on_sigterm, prepare

    interrupt_on_sigterm()
    prepared = prepare(request, dict(os.environ))
    for problem in prepared.problems:
        print(problem, file=sys.stderr)
    if dry_run:
        return _describe(prepared)
    if not prepared.jobs:
        print(f"shard {request.shard}: nothing assigned of {prepared.num_selected} jobs")
        return EXIT_OK
    folder.check_writable()
    folder.begin(request.to_json())
    with folder.held():
        return _run_in(folder, request, prepared)


def _run_in(folder: RunFolder, request: RunRequest, prepared: Prepared) -> int:
    """Run the jobs and write the reports into a folder that nobody else has."""
    began = time.monotonic()
    is_interrupted = False
    try:
        # Many comparisons in one run share one false-alarm rate.
        verdicts = hold_family_rate(_execute(request, prepared, folder))
    except BaseException as error:
        kept = [folder.kept(job.id) for job in prepared.jobs]
        verdicts = [verdict for verdict in kept if verdict is not None]
        is_interrupted = isinstance(error, KeyboardInterrupt)
        if not is_interrupted:
            # A fault of the suite or the disk: what is decided is reported, then it is raised.
            _print_table(verdicts)
            with contextlib.suppress(OSError):
                _finish(request, verdicts, folder, began)
            raise
    _print_table(verdicts)
    code = exit_code(verdicts, errors_first=request.errors_first)
    try:
        _finish(request, verdicts, folder, began)
    except OSError as error:
        # What was decided stands on the screen; a low score is one, written down or not.
        print(f"error: {folder.path}: the reports cannot be written: {error}", file=sys.stderr)
        code = code if code in (EXIT_ACCURACY, EXIT_USAGE) else EXIT_INFRASTRUCTURE
    else:
        print(f"results: {folder.path}", *folder.comparisons(verdicts), sep="\n")
    if is_interrupted:
        print(folder.how_to_go_on(), file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _finish(
    request: RunRequest, verdicts: Sequence[Verdict], folder: RunFolder, began: float
) -> None:
    from evalsuite.session import record_durations

    command = shlex.join(["evalsuite", *sys.argv[1:]])
    folder.finish(verdicts, command, time.monotonic() - began)
    record_durations(request, verdicts)


def _execute(request: RunRequest, prepared: Prepared, folder: RunFolder) -> list[Verdict]:
    from rich.console import Console

    from evalsuite.progress import Display, LiveDisplay, PlainDisplay

    console = Console()
    with contextlib.ExitStack() as stack:
        display: Display
        if console.is_terminal:
            display = stack.enter_context(LiveDisplay(console))
        else:
            display = PlainDisplay(lambda line: print(line, flush=True))
        if request.executor == "ray":
            from evalsuite.executors import ray

            return ray.execute(prepared.jobs, prepared.options, folder, display)
        from evalsuite.executors import local

        return local.execute(
            prepared.jobs,
            prepared.options,
            folder,
            display,
            stops_at_failure=request.stops_at_failure,
        )


def _describe(prepared: Prepared) -> int:
    """`--dry-run`: one line per job, and the command that would start its server."""
    from evalsuite.masking import mask_command
    from evalsuite.pipeline import engine_of

    for job in prepared.jobs:
        if job.skip_reason:
            print(f"{job.id}: SKIP: {job.skip_reason}")
            continue
        engine = engine_of(job, prepared.options)
        spec = engine.launch_spec(job)
        how = spec.base_url or mask_command((*spec.argv, *spec.port_args), spec.env)
        print(f"{job.id}: {how}")
        if reason := engine.unavailable_reason(job):
            print(f"  would end in ERROR: {reason}")
    return EXIT_OK


def _print_table(verdicts: Sequence[Verdict]) -> None:
    from evalsuite.report.terminal import print_verdicts

    if verdicts:
        print_verdicts(verdicts)
