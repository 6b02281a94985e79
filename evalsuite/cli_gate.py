"""The commands around a verdict: `baseline`, `calibrate`, `replay`, `compare`.

Declares their options and finds the job; what they do is in `cli_baseline.py`, `cli_stats.py` and
`cli_calibrate.py`, imported when one is called. Returns exit codes as `evalsuite run` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evalsuite.errors import ConfigError

if TYPE_CHECKING:
    from evalsuite.jobs import EvalJob
    from evalsuite.run_options import RunOptions

baseline = typer.Typer(help="Approved runs that the paired gate compares with.")

_JOB = typer.Argument(metavar="JOB", help="Job id, file name or YAML.")
_ROOT = typer.Option("", "--configs-root", help="Folder of the suites.")
_BASELINES = typer.Option("baselines", "--baselines", help="Folder of baselines.")
_ENGINE = typer.Option("", "--engine", help="Engine in place of the file's own.")
_BASE_URL = typer.Option("", "--base-url", help="Use this running server.")
_POOL = typer.Option("", "--pool", help="Pool of machines, where no list names one.")
_DATA = typer.Option("", "--data-dir", help="Folder of data files.")
_RESULTS = typer.Option("results", "--results", help="Folder for run folders.")


@dataclass(frozen=True)
class _Where:
    """Where a job and its server come from."""

    root: str = ""
    engine: str = ""
    base_url: str = ""
    data_dir: str = ""
    limit: int | None = None
    pool: str = ""


def add_commands(app: typer.Typer) -> None:
    """Add this file's commands to the command line."""
    app.add_typer(baseline, name="baseline")
    app.command()(calibrate)
    app.command()(replay)
    app.command()(compare)


def _find(name: str, where: _Where) -> tuple[EvalJob, RunOptions]:
    """The one job of that name.

    Raises:
        ConfigError: None, or several.
    """
    from evalsuite.session import RunRequest, prepare, with_new_configs

    request = with_new_configs(
        RunRequest(
            root=where.root,
            engine=where.engine,
            base_url=where.base_url,
            data_dir=where.data_dir,
            limit=where.limit,
            pool=where.pool,
        ),
        [name],
    )
    # Its baseline may be what is being made: only the file itself is checked.
    prepared = prepare(request, dict(os.environ), has_checks=False)
    if len(prepared.jobs) != 1:
        found = ", ".join(job.id for job in prepared.jobs)
        raise ConfigError(f"{name!r} means several jobs: {found}")
    return prepared.jobs[0], prepared.options


@baseline.command(name="save")
def baseline_save(
    job: str = _JOB,
    run: str = typer.Option(None, "--run", metavar="RUN", help="Folder of a finished run."),
    repeats: int = typer.Option(None, "--repeats", help="Ask anew, so often, in place of --run."),
    baselines: str = _BASELINES,
    configs_root: str = _ROOT,
    model_revision: str = typer.Option("", "--model-revision", help="Revision of the weights."),
    replays: bool = typer.Option(False, "--replay", help="Add log-probabilities, by a server."),
    engine: str = _ENGINE,
    base_url: str = _BASE_URL,
    data_dir: str = _DATA,
    pool: str = _POOL,
    results: str = _RESULTS,
) -> int:
    """Save a job of a finished run, or of repeats on one warm server; approve makes it count."""
    from evalsuite import cli_baseline
    from evalsuite.run_folder import new_folder
    from evalsuite.session import interrupt_on_sigterm

    if (run is None) == (repeats is None):
        raise ConfigError("baseline save: give --run RUN, or --repeats N to ask anew")
    found, options = _find(job, _Where(configs_root, engine, base_url, data_dir, pool=pool))
    interrupt_on_sigterm()
    needs_server = run is None or replays
    return cli_baseline.baseline_save(
        found,
        options,
        cli_baseline.SaveWish(
            Path(baselines),
            Path(run) if run is not None else None,
            1 if repeats is None else repeats,
            model_revision,
            replays,
            new_folder(Path(results) / "baseline").path if needs_server else Path(results),
        ),
    )


@baseline.command(name="show")
def baseline_show(
    job: str = typer.Argument(metavar="JOB", help="Job id."),
    name: str = typer.Argument("", metavar="[DIGEST]", help="First digits of a baseline."),
    baselines: str = _BASELINES,
) -> int:
    """Print the approved baselines of a job, or one of its saved ones."""
    from evalsuite import cli_baseline

    return cli_baseline.baseline_show(job, Path(baselines), name)


@baseline.command(name="diff")
def baseline_diff(
    job: str = typer.Argument(metavar="JOB", help="Job id."),
    name: str = typer.Argument(metavar="DIGEST", help="First digits of a saved baseline."),
    baselines: str = _BASELINES,
) -> int:
    """Print how a saved baseline differs from the current one, and from the anchor."""
    from evalsuite import cli_baseline

    return cli_baseline.baseline_diff(job, Path(baselines), name)


@baseline.command(name="approve")
def baseline_approve(
    job: str = typer.Argument(metavar="JOB", help="Job id."),
    name: str = typer.Argument(metavar="DIGEST", help="First digits of a saved baseline."),
    baselines: str = _BASELINES,
    move_anchor: bool = typer.Option(False, "--move-anchor", help="Pin the anchor to it too."),
) -> int:
    """Make a saved baseline the current one."""
    from evalsuite import cli_baseline

    return cli_baseline.baseline_approve(job, Path(baselines), name, move_anchor=move_anchor)


def calibrate(
    job: str = _JOB,
    repeats: int = typer.Option(10, "--repeats", help="Two or more."),
    alpha: float = typer.Option(0.001, "--alpha", help="False alarms of the tolerance."),
    write: bool = typer.Option(False, "--write", help="Write the result into the file."),
    set_threshold: bool = typer.Option(False, "--set-threshold", help="The threshold too."),
    limit: int = typer.Option(None, "--limit", help="Ask only the first N questions."),
    configs_root: str = _ROOT,
    engine: str = _ENGINE,
    base_url: str = _BASE_URL,
    data_dir: str = _DATA,
    pool: str = _POOL,
    results: str = _RESULTS,
) -> int:
    """Measure the run-to-run noise of a job on one warm server."""
    from evalsuite import cli_calibrate
    from evalsuite.run_folder import new_folder
    from evalsuite.session import interrupt_on_sigterm

    found, options = _find(job, _Where(configs_root, engine, base_url, data_dir, limit, pool))
    interrupt_on_sigterm()
    return cli_calibrate.calibrate_job(
        found,
        options,
        new_folder(Path(results) / "calibrate").path,
        cli_calibrate.CalibrateWish(repeats, alpha, write, set_threshold),
    )


def replay(
    job: str = _JOB,
    reference: str = typer.Option(None, "--baseline", help="File or folder; default: its own."),
    run: str = typer.Option(None, "--run", metavar="RUN", help="Explain this run's flips."),
    other_kernels: bool = typer.Option(
        False, "--other-kernels", help="Rounding may differ: test for loss and large shifts alone."
    ),
    baselines: str = _BASELINES,
    configs_root: str = _ROOT,
    engine: str = _ENGINE,
    base_url: str = _BASE_URL,
    data_dir: str = _DATA,
    pool: str = _POOL,
    results: str = _RESULTS,
) -> int:
    """Teacher-force a baseline's answers through a server and gate on the shift."""
    from evalsuite import cli_stats
    from evalsuite.replay import ReplayLimits
    from evalsuite.run_folder import new_folder
    from evalsuite.session import interrupt_on_sigterm

    found, options = _find(job, _Where(configs_root, engine, base_url, data_dir, pool=pool))
    interrupt_on_sigterm()
    return cli_stats.replay_job(
        found,
        options,
        new_folder(Path(results) / "replay").path,
        cli_stats.ReplayWish(
            Path(baselines),
            reference,
            Path(run) if run else None,
            ReplayLimits(has_other_kernels=other_kernels),
        ),
    )


def compare(
    runs: list[str] = typer.Argument(metavar="RUN...", help="Folders of finished runs."),
    metric: str = typer.Option(None, "--metric", help="Reading to compare by."),
    markdown: str = typer.Option(None, "--markdown", metavar="FILE", help="Write Markdown."),
    html: str = typer.Option(None, "--html", metavar="FILE", help="Write a page."),
) -> int:
    """Compare finished runs, engines, backends or layouts on the same questions."""
    from evalsuite import cli_stats

    return cli_stats.compare_runs(
        [Path(run) for run in runs],
        metric=metric,
        markdown=Path(markdown) if markdown else None,
        html=Path(html) if html else None,
    )
