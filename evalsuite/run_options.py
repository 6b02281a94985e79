"""What the jobs of a run have in common, and the command that runs one of them again.

Receives values that `session.py` reads from the command line; used by `pipeline.py`, which runs
a job, and by whatever runs jobs elsewhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evalsuite.jobs import EvalJob


@dataclass(frozen=True)
class RunOptions:
    """What a run has in common, whatever executes it; can be sent to another machine.

    Attributes:
        environ: The suite's environment, read once by the entry file.
        base_url: An external server for every job, "" for none.
        limit: Ask only the first questions of each job.
        data_dir: Folder of data files.
        baselines: Folder of approved baselines.
        grace_s: Seconds between TERM and KILL of a server.
        commit: Revision of the code under test.
        hardware: Name of this machine's accelerator or CPU.
        family_size: Jobs that share one false-alarm rate in advance (pytest decides job by
            job); 1 where Holm's method is applied to all verdicts afterwards.
        ends_early: Whether a job whose gate is sure to fail may end early, if its file allows.
        results: Folder of run folders.
        root: Folder of the suites, "" for the usual one.
    """

    environ: Mapping[str, str] = field(repr=False)
    base_url: str = ""
    limit: int | None = None
    data_dir: Path | None = None
    baselines: Path = Path("baselines")
    grace_s: float = 10.0
    commit: str = ""
    hardware: str = ""
    family_size: int = 1
    ends_early: bool = True
    results: str = "results"
    root: str = ""


def reproduce(job: EvalJob, options: RunOptions) -> str:
    """The command that runs this job again."""
    words = ["evalsuite", "run", "--config", str(job.path)]
    if job.pool is not None:
        words += ["--pool", job.pool.name]
    # Only what was asked for otherwise: the command is to be read, too.
    usual = RunOptions({})
    for name in ("root", "results", "data_dir", "baselines"):
        if (value := getattr(options, name)) != getattr(usual, name):
            flag = {"root": "--configs-root"}.get(name, f"--{name.replace('_', '-')}")
            words += [flag, str(value)]
    if options.base_url:
        words += ["--base-url", options.base_url]
    elif job.config.engine != "moeserve":
        words += ["--engine", job.config.engine]
    if not options.ends_early:
        words.append("--no-early-end")
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    return shlex.join(words)
