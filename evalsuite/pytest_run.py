"""A pytest run of the suite: options, one test per job, the run inside a fixture.

Receives pytest's options; parametrises `test_accuracy.py` with the jobs. Because the job runs in
the `verdict` fixture, an infrastructure fault is pytest's *error* and a low score its *failure*,
in every report format. Exit codes, reports and the table are those of `evalsuite run`; pytest's
own stay for usage errors, interrupts and internal errors.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalsuite import os_faults, pipeline
from evalsuite.errors import ConfigError, ServerError
from evalsuite.executors.local import group_by_launch
from evalsuite.jobs import EvalJob
from evalsuite.pipeline import Run
from evalsuite.progress import PlainDisplay
from evalsuite.pytest_options import request_of
from evalsuite.pytest_text import explain, unmatched, write_line, write_table
from evalsuite.report.json_report import verdict_from_dict, verdict_to_dict
from evalsuite.run_folder import RunFolder, new_folder
from evalsuite.session import (
    Prepared,
    RunRequest,
    interrupt_on_sigterm,
    prepare,
    record_durations,
)
from evalsuite.shared_server import SharedServer
from evalsuite.verdict import (
    EXIT_ACCURACY,
    EXIT_INFRASTRUCTURE,
    EXIT_NOTHING_RAN,
    EXIT_OK,
    EXIT_USAGE,
    Status,
    Verdict,
    exit_code,
)

_PREPARED = pytest.StashKey[Prepared]()
_FOLDER = pytest.StashKey[RunFolder]()
_VERDICT = pytest.StashKey[Verdict]()
# Attribute of a test report; it travels from a worker of pytest-xdist to the main process.
_ON_REPORT = "evalsuite_verdict"
_GREEN = (EXIT_OK, EXIT_NOTHING_RAN)
_REPLACED = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)


def _request_of_session(session: pytest.Session) -> RunRequest:
    """The request with what `-k` left of its jobs, so that `--resume` runs no others."""
    request, prepared = request_of(session.config), session.config.stash[_PREPARED]
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    ids = [one["job"].id for one in params if isinstance(one.get("job"), EvalJob)]
    if len(ids) == len(prepared.jobs):
        return request
    # The shard was cut from the whole list.
    return replace(request, only=tuple(ids), shard="")


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


class Plugin:
    """Hooks and fixtures of a run; registered by `plugin.py` for runs that are ours."""

    def __init__(self) -> None:
        self._verdicts: dict[str, Verdict] = {}
        self._began = time.monotonic()
        self._unwritten = ""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Check everything before anything starts; every fault at once, exit 4."""
        if config.option.help:
            return
        try:
            prepared = prepare(request_of(config), dict(os.environ))
        except ConfigError as error:
            raise pytest.UsageError(f"evalsuite cannot run this:\n{error}") from error
        # Each test is decided by itself, so that the run's false-alarm rate is shared out in
        # advance (Bonferroni); `evalsuite run` sees all p-values first and uses Holm.
        paired = [j for j in prepared.jobs if j.config.gate.name == "paired" and not j.skip_reason]
        options = replace(prepared.options, family_size=max(1, len(paired)))
        config.stash[_PREPARED] = replace(prepared, options=options)
        if _is_worker(config):
            path = Path(config.workerinput["evalsuite_folder"])  # type: ignore[attr-defined]
            config.stash[_FOLDER] = RunFolder(path)
        else:
            config.stash[_FOLDER] = new_folder(Path(config.getoption("--results")).absolute())
        if not config.option.collectonly and not config.getoption("--dry-run"):
            try:
                config.stash[_FOLDER].check_writable()
            except ConfigError as error:
                raise pytest.UsageError(f"evalsuite cannot run this:\n{error}") from error
            interrupt_on_sigterm()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """pytest-xdist: every worker writes into the one run folder."""
        node.workerinput["evalsuite_folder"] = str(node.config.stash[_FOLDER].path)

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        """Warnings and notes of the configs."""
        prepared = config.stash[_PREPARED]
        return [f"evalsuite: {problem}" for problem in prepared.problems]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per job; jobs that share a launch are neighbours."""
        # Other people's tests may be beside ours, and call something of theirs a job.
        if not {"job", "verdict"} <= set(metafunc.fixturenames):
            return
        prepared = metafunc.config.stash[_PREPARED]
        groups = group_by_launch(prepared.jobs, prepared.options)
        jobs = [job for group in groups for job in group]
        metafunc.parametrize("job", jobs, ids=[job.id for job in jobs], scope="session")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """A job has its own limits: pytest-timeout must not cut it, nor leave a server behind."""
        for item in items:
            is_ours = "verdict" in getattr(item, "fixturenames", ())
            if is_ours and config.pluginmanager.has_plugin("timeout"):
                item.add_marker(pytest.mark.timeout(0))
            if config.getoption("--dry-run"):
                item.add_marker(pytest.mark.skip(reason="--dry-run"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Attach the verdict to the report of the phase in which it was reached."""
        report = yield
        verdict = item.stash.get(_VERDICT, None)
        if verdict is not None and report.when == "setup":
            setattr(report, _ON_REPORT, json.dumps(verdict_to_dict(verdict), default=str))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect verdicts, of this process or of a worker."""
        text = getattr(report, _ON_REPORT, None)
        if text is not None:
            verdict = verdict_from_dict(json.loads(text))
            self._verdicts[verdict.job_id] = verdict

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the reports and set the exit code of the verdicts."""
        config = session.config
        if _is_worker(config) or config.option.collectonly:
            return
        prepared = config.stash[_PREPARED]
        if self._verdicts:
            command = shlex.join(["pytest", *sys.argv[1:]])
            seconds = time.monotonic() - self._began
            verdicts = list(self._verdicts.values())
            try:
                config.stash[_FOLDER].finish(verdicts, command, seconds)
                record_durations(request_of(config), verdicts)
            except OSError as error:
                self._unwritten = f"the reports cannot be written: {error}"
        if exitstatus not in _REPLACED:
            return
        if self._verdicts:
            code = exit_code(list(self._verdicts.values()))
            is_unexplained = exitstatus == pytest.ExitCode.TESTS_FAILED and code in _GREEN
            # A test failed and no verdict says why: the suite itself is at fault.
            if self._unwritten and code not in (EXIT_ACCURACY, EXIT_USAGE):
                code = EXIT_INFRASTRUCTURE
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR if is_unexplained else code
        elif exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        elif config.getoption("--dry-run") or not prepared.jobs:
            session.exitstatus = EXIT_OK

    def pytest_terminal_summary(
        self, terminalreporter: Any, exitstatus: int, config: pytest.Config
    ) -> None:
        """The verdict table, the path of the results, and how to go on after an interrupt."""
        self._summarise(terminalreporter, config)
        folder = config.stash[_FOLDER]
        if exitstatus == pytest.ExitCode.INTERRUPTED and folder.is_begun:
            terminalreporter.write_line(folder.how_to_go_on())

    def _summarise(self, terminalreporter: Any, config: pytest.Config) -> None:
        prepared = config.stash[_PREPARED]
        if not prepared.jobs:
            shard = config.getoption("--shard")
            terminalreporter.write_line(
                f"shard {shard}: nothing assigned of {prepared.num_selected} jobs"
            )
        elif not terminalreporter._session.testscollected and config.option.keyword:
            terminalreporter.write_line(unmatched(config.option.keyword, prepared.jobs))
        if not self._verdicts:
            return
        write_table(terminalreporter, list(self._verdicts.values()))
        end = f"error: {self._unwritten}" if self._unwritten else "results"
        terminalreporter.write_line(f"{end}: {config.stash[_FOLDER].path}")
        for line in config.stash[_FOLDER].comparisons(list(self._verdicts.values())):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def shared_server(request: pytest.FixtureRequest) -> Iterator[SharedServer]:
    """The one server of the run; ended when the session ends, however it ends."""
    prepared = request.config.stash[_PREPARED]
    server = pipeline.open_server(prepared.options, _log_folder(request.config))
    try:
        yield server
    finally:
        try:
            server.close()
        except ServerError as error:
            write_line(request.config, f"evalsuite: {error}")


@pytest.fixture(scope="session")
def run_folder(request: pytest.FixtureRequest) -> Iterator[RunFolder]:
    """The folder of the run, begun, and shared with workers of this run alone."""
    folder = request.config.stash[_FOLDER]
    try:
        folder.begin(_request_of_session(request.session).to_json())
    except OSError as error:
        explained = os_faults.explain(error)
        if explained is None:
            raise
        pytest.exit(explained[0], returncode=explained[1])
    with folder.held(is_shared=True):
        yield folder


@pytest.fixture
def verdict(
    request: pytest.FixtureRequest,
    job: EvalJob,
    run_folder: RunFolder,
    shared_server: SharedServer,
) -> Verdict:
    """Run the job. Errors and skips end here; what is left is PASS or FAIL."""
    config = request.config
    display = PlainDisplay(lambda line: write_line(config, line))
    run = Run(config.stash[_PREPARED].options, run_folder, shared_server, display)
    verdict = pipeline.run(job, run)
    if unkept := run_folder.keep(verdict):
        write_line(config, unkept)
    request.node.stash[_VERDICT] = verdict
    if verdict.status is Status.SKIP:
        pytest.skip(verdict.reason)
    if verdict.status in (Status.ERROR, Status.INCONCLUSIVE):
        pytest.fail(explain(verdict), pytrace=False)
    return verdict


def _log_folder(config: pytest.Config) -> RunFolder:
    """Run folder of this process; workers keep their servers' logs apart."""
    folder = config.stash[_FOLDER]
    if not _is_worker(config):
        return folder
    return RunFolder(folder.path / str(config.workerinput["workerid"]))  # type: ignore[attr-defined]
