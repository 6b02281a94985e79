"""Lists -> jobs -> shards -> steps: what the pipelines of a repository hold.

Receives a `PlanRequest`, returns `Pipeline`s. What a step is, and its limits, is `model.py`;
how shards are cut is `evalsuite/shards.py`, so that a step's limit is that of the jobs which the
same `--shard i/n` takes later.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evalsuite import shards
from evalsuite.ci.model import Pipeline, Step, run_limit_s, step_key, timeout_minutes
from evalsuite.ci.steps_cpu import (
    RESULTS,
    check_steps,
    cpu_pool,
    install_commands,
    nothing_to_do,
    select_step,
)
from evalsuite.errors import ConfigError
from evalsuite.hardware import Hardware, Pool, load_hardware
from evalsuite.jobs import EvalJob, Selection, load_jobs
from evalsuite.lists import configs_root, hardware_file, list_files, resolve_lists, suite_folders
from evalsuite.machine import Machine
from evalsuite.verdict import EXIT_ACCURACY

PIPELINES = ("ci", "nightly", "changes")
DURATIONS_FILE = "durations.json"
# What a run of this repository installs; torch and the libraries of a GPU image are kept.
_EXTRAS = {"nvidia": "server,cuda,lm-eval", "amd": "server,lm-eval"}
# What `evalsuite data get` fetches; a task that reads one of them bears its name in front.
_DATA_SETS = ("gsm8k",)


@dataclass(frozen=True)
class PlanRequest:
    """What to put into the pipelines.

    Attributes:
        configs: `--config` values of the nightly; () for every `config-<GPU pool>.txt`.
        root: Folder of the suites, None to find it.
        setup: Commands that install the suite; () for this repository's own.
        run_args: More arguments of `evalsuite run`.
        num_retries: Further attempts after an infrastructure error.
        is_accuracy_soft: Whether a missed threshold is shown without failing the pipeline.
        pipelines: Which pipelines.
        only: Job ids to keep, None for all.
        select_args: Options by which `ci select` makes the same steps again.
    """

    configs: tuple[str, ...] = ()
    root: Path | None = None
    setup: tuple[str, ...] = ()
    run_args: tuple[str, ...] = ()
    num_retries: int = 1
    is_accuracy_soft: bool = False
    pipelines: tuple[str, ...] = PIPELINES
    only: Collection[str] | None = None
    select_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """The jobs of one `--config` value on one pool.

    Attributes:
        value: The `--config` value.
        pool: Their pool.
        jobs: In the order of the lists.
        lists: Job id -> the list that names it.
        hardware: The file that describes the pools.
    """

    value: str
    pool: Pool
    jobs: tuple[EvalJob, ...]
    lists: Mapping[str, Path]
    hardware: Path


def planned_jobs(configs: Sequence[str], root: Path | None = None) -> list[Planned]:
    """Read what the nightly runs.

    Args:
        configs: `--config` values; none for every `config-<GPU pool>.txt`.
        root: Folder of the suites.

    Raises:
        ConfigError: Faults of the files; a list of no pool, which no machine could run.
    """
    folder = root or configs_root()
    hardware = load_hardware(hardware_file(folder))
    return [_planned(value, folder) for value in configs or _pool_lists(folder, hardware)]


def _pool_lists(root: Path, hardware: Hardware) -> list[str]:
    """Names `config-<pool>.txt` of pools with accelerators, in the order of the pools."""
    names = {path.name for folder in suite_folders(root) for path in list_files(folder)}
    words = [
        word
        for pool in hardware.pools.values()
        if pool.num_gpus
        for word in (pool.name, *pool.aliases)
    ]
    found = [f"config-{word}.txt" for word in words if f"config-{word}.txt" in names]
    if not found:
        raise ConfigError(f"no list config-<pool>.txt of a GPU pool below {root}; name --config")
    return found


def _planned(value: str, root: Path) -> Planned:
    lists: dict[str, Path] = {}
    jobs: dict[str, EvalJob] = {}
    for found in resolve_lists(value, root):
        # One list at a time, which keeps the list of each job; which machine this is, matters not.
        for job in load_jobs(Selection((str(found.path),), root), Machine()).jobs:
            jobs[job.id] = job
            lists[job.id] = found.path
    pools = {job.pool.name if job.pool else "": job.pool for job in jobs.values()}
    if len(pools) != 1 or None in pools.values():
        known = ", ".join(sorted(pools)) if "" not in pools else "none"
        raise ConfigError(
            f"--config {value}: a CI step needs one pool, this has {known}; name the list "
            "config-<pool>.txt, with the pool of hardware.yaml"
        )
    (pool,) = (pool for pool in pools.values() if pool)
    return Planned(value, pool, tuple(jobs.values()), lists, hardware_file(root))


def pipelines(request: PlanRequest) -> list[Pipeline]:
    """Build the pipelines that a request asks for.

    Raises:
        ConfigError: An unknown pipeline, a faulty config, or a job that fits no step.
    """
    for name in request.pipelines:
        if name not in PIPELINES:
            raise ConfigError(f"--pipeline {name!r}; known: {', '.join(PIPELINES)}")
    root = request.root or configs_root()
    cpu = cpu_pool(load_hardware(hardware_file(root)))
    built = []
    if "ci" in request.pipelines:
        built.append(Pipeline("ci", "Checks and tests", check_steps(cpu)))
    if "nightly" in request.pipelines:
        steps = [
            step
            for planned in planned_jobs(request.configs, root)
            for step in _steps_of(planned, request, root)
        ]
        title = "Accuracy, every pool" if request.only is None else "Accuracy, what was changed"
        built.append(Pipeline("nightly", title, tuple(steps) or (nothing_to_do(cpu),)))
    if "changes" in request.pipelines:
        # Read now, so that a fault of the lists is found here and not by a pull request.
        planned_jobs(request.configs, root)
        title = "Accuracy, what a change touches"
        built.append(
            Pipeline(
                "changes",
                title,
                (select_step(cpu, request.setup, request.select_args, request.num_retries),),
            )
        )
    return built


def _steps_of(planned: Planned, request: PlanRequest, root: Path) -> list[Step]:
    """The steps of one `--config` value: as many shards as its pool's time limit needs."""
    only = request.only
    jobs = [job for job in planned.jobs if only is None or job.id in only]
    if not jobs:
        return []
    durations, _ = shards.read_durations(root / DURATIONS_FILE)
    parts = _parts(jobs, planned.pool, durations)
    steps = []
    for number, part in enumerate(parts, start=1):
        limit_s = run_limit_s(part, planned.pool, durations)
        name = PurePosixPath(planned.value).with_suffix("").as_posix().removeprefix("config-")
        words = [name] if len(parts) == 1 else [name, str(number), "of", str(len(parts))]
        key = step_key("eval", *words)
        num_gpus = max(job.layout.num_gpus for job in part) if planned.pool.num_gpus else 0
        devices = f", {num_gpus} GPU{'s' if num_gpus > 1 else ''}" if num_gpus else ""
        share = f" {number}/{len(parts)}" if len(parts) > 1 else ""
        which = [f"--shard={number}/{len(parts)}"] if len(parts) > 1 else []
        if only is not None:
            which = [job.id for job in part]
        steps.append(
            Step(
                key=key,
                label=f"{name}{share} ({len(part)} job{'s' if len(part) > 1 else ''}{devices})",
                pool=planned.pool,
                command=_run_command(planned, which, request),
                timeout_minutes=timeout_minutes(limit_s),
                setup=_setup(part, planned.pool, request),
                run_limit_s=limit_s,
                num_gpus=num_gpus,
                log=f"{RESULTS}/{key}.log",
                artifact_paths=(f"{RESULTS}/**/*",),
                summary=f"{RESULTS}/*/summary.md",
                env={"PYTHONUNBUFFERED": "1"},
                secrets=("HF_TOKEN",),
                num_retries=request.num_retries,
                soft_fail=(EXIT_ACCURACY,) if request.is_accuracy_soft else (),
                concurrency=_concurrency(planned.pool),
                job_ids=tuple(job.id for job in part),
            )
        )
    return steps


def _parts(
    jobs: Sequence[EvalJob], pool: Pool, durations: Mapping[str, float]
) -> list[list[EvalJob]]:
    """The fewest shards of which each ends within the pool's limit of a step.

    Raises:
        ConfigError: A job that is too long by itself.
    """

    def minutes(part: Sequence[EvalJob]) -> int:
        return timeout_minutes(run_limit_s(part, pool, durations))

    by_id = {job.id: job for job in jobs}
    for job in jobs:
        if minutes([job]) > pool.timeout_minutes:
            raise ConfigError(
                f"{job.path}: its limits (start {job.config.startup_max_wait_seconds:g} s, every "
                f"attempt of a request {job.config.timeout_for(pool.vendor):g} s) need a step of "
                f"{minutes([job])} min; pool {pool.name} allows {pool.timeout_minutes}: lower "
                "them, or raise timeout_minutes in hardware.yaml"
            )
    launches = shards.launch_keys(jobs)
    count = 1
    while True:
        split = shards.split(list(by_id), durations, count, launches)
        parts = [[by_id[name] for name in names] for names in split]
        if all(part and minutes(part) <= pool.timeout_minutes for part in parts):
            return parts
        count += 1  # ends: each job alone fits, and as many shards as jobs hold one each


def _run_command(planned: Planned, which: Sequence[str], request: PlanRequest) -> str:
    argv = ["evalsuite", "run", "--config", planned.value, *which]
    if request.root is not None:
        argv += ["--configs-root", request.root.as_posix()]
    if request.is_accuracy_soft:
        argv.append("--errors-first")  # a crash must not hide under a miss that is forgiven
    return shlex.join([*argv, *request.run_args])


def _setup(jobs: Sequence[EvalJob], pool: Pool, request: PlanRequest) -> tuple[str, ...]:
    install = request.setup or install_commands(f"[{_EXTRAS.get(pool.vendor, 'server')}]")
    tasks = {job.config.task for job in jobs}
    data = [name for name in _DATA_SETS if any(task.startswith(name) for task in tasks)]
    return (*install, *(f"evalsuite data get {name}" for name in data))


def _concurrency(pool: Pool) -> int | None:
    """Steps of the pool at a time, from `ci: {buildkite: {concurrency: N}}`."""
    value = pool.ci.get("buildkite", {}).get("concurrency")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"hardware.yaml: {pool.name}.ci.buildkite.concurrency: {value!r}")
    return value
