"""What `evalsuite run` and `pytest evalsuite` have in common: request -> jobs -> run folder.

Receives a `RunRequest` (the command line as data, kept in the run's folder so that it can be
resumed) and the environment; returns jobs that were checked as far as possible without starting
anything. The two entry files are `cli_run.py` and `plugin.py`.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evalsuite import names, pipeline, shards
from evalsuite.errors import ConfigError, Problem
from evalsuite.jobs import EvalJob, Selection, load_jobs
from evalsuite.lists import configs_root
from evalsuite.machine import Machine, detect_machine
from evalsuite.run_options import RunOptions
from evalsuite.verdict import Status, Verdict

# Where CI systems say what they test; asked before git, which may be absent or see a merge.
_COMMIT_VARIABLES = ("EVALSUITE_COMMIT", "BUILDKITE_COMMIT", "GITHUB_SHA")
DURATIONS_FILE = "durations.json"


@dataclass(frozen=True)
class RunRequest:
    """One command line, as plain values.

    Attributes:
        configs: Lists, YAMLs, bare names.
        root: Folder of the suites, "" to find it.
        only: Job ids or file stems to keep.
        engine: Engine in place of the files' own, "" for theirs.
        base_url: Server to evaluate; makes every job external.
        pool: Pool in place of the lists' own.
        limit: First questions only, None for all.
        shard: "i/n", "" for everything.
        durations: File of recorded durations for shards, "" for the one beside the configs.
        results: Folder that run folders go into.
        data_dir: Folder of data files, "" to look in the usual places.
        baselines: Folder of approved baselines.
        executor: "local" or "ray".
        stops_at_failure: Leave the rest after the first FAIL or ERROR.
        grace_s: Seconds from TERM to KILL of a server.
        recorded: File that this run's durations are added to, "" for none.
        ends_early: Whether jobs whose gate is sure to fail may end early.
        errors_first: Whether an ERROR beats a FAIL in the exit code.
    """

    configs: tuple[str, ...] = ()
    root: str = ""
    only: tuple[str, ...] = ()
    engine: str = ""
    base_url: str = ""
    pool: str = ""
    limit: int | None = None
    shard: str = ""
    durations: str = ""
    results: str = "results"
    data_dir: str = ""
    baselines: str = "baselines"
    executor: str = "local"
    stops_at_failure: bool = False
    grace_s: float = 10.0
    recorded: str = ""
    ends_early: bool = True
    errors_first: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values for `run.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRequest:
        """Read `run.json` back; keys of other versions are passed over.

        Raises:
            ConfigError: A value of another type than this version writes.
        """
        usual = cls()
        values: dict[str, Any] = {}
        for key in (item.name for item in fields(cls) if item.name in data):
            value = tuple(data[key]) if isinstance(data[key], list) else data[key]
            types = (int, type(None)) if key == "limit" else type(getattr(usual, key))
            if not isinstance(value, types):
                raise ConfigError(f"run.json: {key} {value!r} is not what this version writes")
            values[key] = value
        return cls(**values)


@dataclass(frozen=True)
class Prepared:
    """A request that can be run.

    Attributes:
        jobs: Those of this shard.
        options: Common to the run.
        problems: Warnings and notes.
        num_selected: Jobs of all shards.
    """

    jobs: tuple[EvalJob, ...]
    options: RunOptions
    problems: tuple[Problem, ...] = ()
    num_selected: int = 0
    machine: Machine = field(default_factory=Machine)


def prepare(
    request: RunRequest, environ: Mapping[str, str], *, has_checks: bool = True
) -> Prepared:
    """Find the jobs of a request and check everything that needs no server.

    Args:
        request: What is asked for.
        environ: The suite's environment.
        has_checks: Whether data, engines' flags and baselines are checked too.

    Raises:
        ConfigError: With every fault of every list, file and option; an empty selection too.
    """
    _check_options(request)
    machine = detect_machine(environ=environ)
    root = configs_root(request.root or None)
    overrides = names.engine_override(request.engine)
    if request.base_url:
        overrides = {"engine": "external"}
    found = load_jobs(
        Selection(request.configs, root, overrides, request.pool, request.only), machine
    )
    problems = list(found.problems)
    if not found.jobs:
        named = ", ".join(request.configs)
        raise ConfigError(f"{named}: nothing selected; the list has no jobs")
    jobs: Sequence[EvalJob] = found.jobs
    if request.executor == "ray":
        # Which machine a job fits is the cluster's to say, not this one's.
        jobs = [replace(job, skip_reason="") for job in jobs]
    if request.shard:
        path = Path(request.durations) if request.durations else root / DURATIONS_FILE
        durations, faults = shards.read_durations(path)
        problems += faults
        jobs = shards.take(jobs, durations, shards.parse_shard(request.shard))
    options = RunOptions(
        environ=environ,
        base_url=request.base_url,
        limit=request.limit,
        data_dir=Path(request.data_dir) if request.data_dir else None,
        baselines=Path(request.baselines),
        grace_s=request.grace_s,
        commit=commit_of(environ),
        hardware=hardware_name(machine),
        ends_early=request.ends_early,
        results=request.results,
        root=request.root,
    )
    if has_checks:
        pipeline.check(jobs, options)
    return Prepared(tuple(jobs), options, tuple(problems), len(found.jobs), machine)


def _check_options(request: RunRequest) -> None:
    problems = []
    if request.limit is not None and request.limit < 1:
        problems.append(f"--limit {request.limit}: at least one question has to be asked")
    if request.base_url and (fault := _url_fault(request.base_url)):
        problems.append(f"--base-url {request.base_url!r} {fault}, such as http://host:8000")
    if request.data_dir and not Path(request.data_dir).is_dir():
        problems.append(f"--data-dir {request.data_dir!r} is no folder")
    if request.recorded and (fault := _write_fault(Path(request.recorded))):
        problems.append(f"--record-durations {request.recorded!r} {fault}")
    if request.base_url and request.engine not in ("", "external"):
        problems.append(f"--base-url names a running server; --engine {request.engine} starts one")
    if not 0 <= request.grace_s <= 3600:
        problems.append(f"--stop-grace {request.grace_s:g}: 0 to 3600 seconds are possible")
    if request.executor not in ("local", "ray"):
        problems.append(f"--executor {request.executor!r}; known: local, ray")
    if problems:
        raise ConfigError([Problem("error", text) for text in problems])


def _url_fault(url: str) -> str:
    """Why a URL names no server, "" where it does."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        return f"is no URL ({error})"
    return "" if is_server else "is no URL of a server"


def _write_fault(path: Path) -> str:
    """Why a file cannot be written there, "" where it can."""
    if path.is_dir():
        return "is a folder; name a file in it"
    if not path.absolute().parent.is_dir():
        return f"cannot be written: {path.parent} is no folder"
    place = path if path.exists() else path.absolute().parent
    return "" if os.access(place, os.W_OK) else f"cannot be written: {place} is read-only"


def with_new_configs(request: RunRequest, names: Sequence[str]) -> RunRequest:
    """Sort positional names into lists or files to read, and jobs to keep of them.

    A name with a known ending, or of an existing file, is one more `--config`. Beside a
    `--config` any other name keeps jobs; alone it is looked up among the files of all suites.
    """
    configs, only = list(request.configs), list(request.only)
    for name in names:
        # A folder, too: what it is asked for is one of its lists, and the error names them.
        if name.endswith((".txt", ".yaml", ".yml")) or Path(name).exists():
            configs.append(name)
        elif request.configs:
            only.append(name)
        else:
            configs += _files_of_job(name, request.root)
    return replace(request, configs=tuple(configs), only=tuple(only))


def _files_of_job(name: str, root: str) -> list[str]:
    folder = configs_root(root or None)
    suite, _, stem = name.rpartition("/")
    found = sorted(folder.glob(f"{suite or '**'}/{stem}.yaml"))
    if not found:
        from evalsuite.names import suggestion

        stems = sorted({path.stem for path in folder.glob("**/*.yaml")} - {"hardware"})
        raise ConfigError(f"no job {name!r} below {folder}{suggestion(stem, stems)}")
    if len(found) > 1:
        known = ", ".join(str(path.relative_to(folder).with_suffix("")) for path in found)
        raise ConfigError(f"{name!r} names several jobs: {known}")
    return [str(found[0])]


def record_durations(request: RunRequest, verdicts: Sequence[Verdict]) -> None:
    """Add the seconds of every decided, whole job to the file that shards are cut by."""
    decided = (Status.PASS, Status.FAIL, Status.INCONCLUSIVE)
    measured = {
        v.job_id: v.duration_s
        for v in verdicts
        if v.status in decided and not (v.result and v.result.stopped)
    }
    if request.recorded and measured:
        shards.record_durations(Path(request.recorded), measured)


def commit_of(environ: Mapping[str, str]) -> str:
    """Revision of the code under test: what CI says, else the working directory's."""
    for name in _COMMIT_VARIABLES:
        if environ.get(name):
            return environ[name]
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def hardware_name(machine: Machine) -> str:
    """The accelerators, or the processor where there are none."""
    if machine.num_gpus:
        return str(machine)
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no /proc: the platform's own word has to do
    return platform.processor() or platform.machine()


def interrupt_on_sigterm() -> None:
    """Let TERM end a run the way Ctrl-C does: servers stopped, reports written."""

    def raise_interrupt(signum: int, frame: object) -> None:
        # CI systems signal a whole group, and `timeout` passes it on once more: the second one
        # must not interrupt the clean-up that the first began.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, raise_interrupt)
