"""`EvalConfig` x `Pool` -> `EvalJob`: a unique id, what it needs, and why it cannot run here.

Receives `--config` values (through `lists.py` and `config.py`) and this machine; returns frozen
jobs with every fault of every file found at once. How jobs are split between machines is
`shards.py`; starting a server for a job is `engines/` and `server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalsuite.capacity import check_capacity
from evalsuite.config import EvalConfig, LoadedConfig, read_config
from evalsuite.errors import ConfigError, Problem
from evalsuite.hardware import Hardware, Pool, load_hardware
from evalsuite.layout import Layout, layout_of
from evalsuite.lists import ConfigList, Entry, configs_root, hardware_file, resolve_lists
from evalsuite.machine import Machine, skip_reason
from evalsuite.names import suggestion

__all__ = ["EvalJob", "JobSet", "Layout", "Selection", "load_jobs", "make_job"]


@dataclass(frozen=True)
class EvalJob:
    """One config on one pool.

    Attributes:
        id: "<suite>/<file stem>", unique in a run; the pytest id.
        suite: Folder name below `configs/`.
        path: The YAML file.
        config: Its content, command-line overrides applied.
        pool: The pool it is listed for, None for an unknown pool or a bare file.
        layout: TP/DP/PP/EP from the server arguments.
        skip_reason: Why it cannot run on this machine, "" if it can.
    """

    id: str
    suite: str
    path: Path
    config: EvalConfig
    pool: Pool | None
    layout: Layout
    skip_reason: str = ""


@dataclass(frozen=True)
class JobSet:
    """What a selection came to.

    Attributes:
        jobs: In the order of the lists.
        problems: Warnings and notes; errors are raised.
        sources: Job id -> top-level key -> where its value came from.
    """

    jobs: tuple[EvalJob, ...]
    problems: tuple[Problem, ...] = ()
    sources: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """What the command line asks for.

    Attributes:
        configs: `--config` values: lists, YAMLs, bare names.
        root: Folder of the suites, None to find it.
        overrides: Top-level config keys set on the command line (engine, num_questions, ...).
        pool: Run every job as one of this pool, "" for the lists' own.
        only: Job ids or file stems to keep, () for all.
    """

    configs: tuple[str, ...]
    root: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    pool: str = ""
    only: tuple[str, ...] = ()


def load_jobs(selection: Selection, machine: Machine) -> JobSet:
    """Read everything a selection names.

    Args:
        selection: What to read.
        machine: This machine, from `detect_machine`.

    Raises:
        ConfigError: With every fault of every list and file.
    """
    root = selection.root or configs_root()
    hardware = load_hardware(hardware_file(root))
    forced = _forced_pool(selection.pool, hardware)
    lists: list[ConfigList] = []
    problems: list[Problem] = []
    for value in selection.configs:
        try:
            lists += resolve_lists(value, root)
        except ConfigError as error:
            problems += error.problems
    if not selection.configs:
        problems.append(Problem("error", "no --config given; name a list such as config-cpu.txt"))
    builder = _Builder(hardware, machine, selection.overrides, forced, problems)
    for found in lists:
        builder.add_list(found)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    jobs = _keep(list(builder.jobs.values()), selection.only)
    return JobSet(tuple(jobs), tuple(problems), builder.sources)


def make_job(
    path: Path, config: EvalConfig, pool: Pool | None, suite: str = "", job_id: str = ""
) -> EvalJob:
    """Build a job from parts that are at hand, without lists; it is never skipped."""
    suite = suite or path.parent.name
    return EvalJob(
        id=job_id or f"{suite}/{path.stem}",
        suite=suite,
        path=path,
        config=config,
        pool=pool,
        layout=layout_of(config),
    )


def _forced_pool(name: str, hardware: Hardware) -> Pool | None:
    if not name:
        return None
    pool = hardware.find(name)
    if pool is None:
        known = ", ".join(hardware.pools)
        raise ConfigError(f"--pool {name!r} is no pool of hardware.yaml; known: {known}")
    return pool


def _keep(jobs: list[EvalJob], only: Sequence[str]) -> list[EvalJob]:
    if not only:
        return jobs
    kept = [job for job in jobs if job.id in only or job.path.stem in only]
    for name in only:
        if not any(name in (job.id, job.path.stem) for job in jobs):
            known = [job.id if "/" in name else job.path.stem for job in jobs]
            hint = suggestion(name, known)
            raise ConfigError(f"no job {name!r} in the selection{hint}")
    return kept


class _Builder:
    """Collects jobs by id, and faults, over several lists."""

    def __init__(
        self,
        hardware: Hardware,
        machine: Machine,
        overrides: Mapping[str, Any],
        forced: Pool | None,
        problems: list[Problem],
    ) -> None:
        self.hardware = hardware
        self.machine = machine
        self.overrides = overrides
        self.forced = forced
        self.problems = problems
        self.jobs: dict[str, EvalJob] = {}
        self.sources: dict[str, dict[str, str]] = {}
        self._loaded: dict[Path, LoadedConfig] = {}

    def add_list(self, found: ConfigList) -> None:
        self.problems += found.problems
        pool = self.forced or self.hardware.pool_of_list(found.path.name)
        if pool is None and not found.is_bare:
            known = ", ".join(self.hardware.pools)
            message = f"its name holds no pool of hardware.yaml ({known}); nothing is checked"
            self.problems.append(Problem("note", message, str(found.path)))
        for entry in found.entries:
            self._add_entry(entry, found, pool)

    def _add_entry(self, entry: Entry, found: ConfigList, pool: Pool | None) -> None:
        key = entry.path.resolve()
        if key not in self._loaded:
            self._loaded[key] = read_config(entry.path, self.overrides)
            self.problems += self._loaded[key].problems
        loaded = self._loaded[key]
        if loaded.config is None:
            return
        below = entry.path.relative_to(found.path.parent).with_suffix("").as_posix()
        job_id = f"{found.suite}/{below}"
        layout = layout_of(loaded.config)
        if job_id in self.jobs:
            self._report_twice(job_id, entry, found, pool)
            return
        if pool is not None:
            line = loaded.lines.get("server_args", 1)
            self.problems += check_capacity(loaded.config, layout, pool, str(entry.path), line)
        is_elsewhere = loaded.config.engine == "external"
        self.jobs[job_id] = EvalJob(
            id=job_id,
            suite=found.suite,
            path=entry.path,
            config=loaded.config,
            pool=pool,
            layout=layout,
            skip_reason=""
            if is_elsewhere
            else skip_reason(pool, layout.num_gpus, self.machine, self.hardware),
        )
        self.sources[job_id] = loaded.sources

    def _report_twice(
        self, job_id: str, entry: Entry, found: ConfigList, pool: Pool | None
    ) -> None:
        earlier = self.jobs[job_id]
        place = str(found.path), entry.line
        if earlier.path.resolve() == entry.path.resolve() and earlier.pool == pool:
            self.problems.append(
                Problem("note", f"{job_id} is selected twice; it runs once", *place)
            )
            return
        other = f"{earlier.path} (pool {earlier.pool.name if earlier.pool else 'unknown'})"
        message = f"{entry.path} has the id {job_id} of {other}; select them in separate runs"
        self.problems.append(Problem("error", message, *place))
