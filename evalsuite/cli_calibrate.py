"""Entry function of `evalsuite calibrate`: repeats on one warm server, then their noise.

Receives a job and what is wanted, prints, returns an exit code. The estimates are `calibrate.py`,
the repeats `warm.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from evalsuite.calibrate import calibrate, write_into
from evalsuite.cli_stats import say
from evalsuite.errors import ConfigError, Problem
from evalsuite.jobs import EvalJob
from evalsuite.lists import is_installed
from evalsuite.run_options import RunOptions
from evalsuite.verdict import EXIT_OK
from evalsuite.warm import WarmServer, run_repeats


@dataclass(frozen=True)
class CalibrateWish:
    """What `calibrate` is asked for.

    Attributes:
        repeats: Two or more.
        alpha: False-alarm rate of the suggested tolerance.
        is_written: Write `calibration` and `tolerance` into the job's file.
        is_threshold_set: Write the threshold too.
    """

    repeats: int
    alpha: float = 0.001
    is_written: bool = False
    is_threshold_set: bool = False


def calibrate_job(
    job: EvalJob,
    options: RunOptions,
    folder: Path,
    wanted: CalibrateWish,
) -> int:
    """Repeat a job on one warm server in shuffled order at varied concurrency; print its noise.

    Args:
        job: What to repeat.
        options: As for a run.
        folder: Where ledger and server log go.
        wanted: Repeats, and what is done with the result.
    """
    if wanted.repeats < 2:
        raise ConfigError(f"--repeats {wanted.repeats}: noise needs two or more repeats")
    if wanted.is_written and (fault := _write_fault(job.path)):
        raise ConfigError(Problem("error", f"{fault}; it is to be written into", str(job.path)))
    with WarmServer(job, options, folder) as warm:
        result = run_repeats(warm, job, options, folder / "ledger.jsonl", wanted.repeats)
    report = calibrate(result, job.config, wanted.alpha)
    shown = [f"  question {index}: right in {share:.0%}" for index, share in report.flips.items()]
    say(*report.lines(), *shown)
    if wanted.is_written:
        is_set = wanted.is_threshold_set
        write_into(job.path, report, options.hardware, is_threshold_set=is_set)
        say(f"wrote {job.path}")
    return EXIT_OK


def _write_fault(path: Path) -> str:
    """Why a job's file should not be written, "" where it can; known before hours of repeats."""
    if is_installed(path):
        return "is an installed file, gone with the next version: copy it to ./configs"
    return "" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "is read-only"
