"""Servers that misbehave under a whole run: ports, limits, floods of log, memory, leftovers."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import NUM_QUESTIONS, Suite, is_alive, pids_in, statuses, wait_until

from evalsuite import pipeline, session
from evalsuite.engines.base import LaunchSpec
from evalsuite.executors import local
from evalsuite.gpu_memory import GpuMemory
from evalsuite.progress import PlainDisplay
from evalsuite.run_folder import RunFolder
from evalsuite.server import RunningServer, StartSettings, start
from evalsuite.verdict import Status, Verdict

STUB = Path(__file__).with_name("stub_servers.py")
RUN = ("run", "--configs-root", "configs", "--config", "config-cpu.txt", "--stop-grace", "0.5")

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="process trees are read from /proc"
)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    suite = Suite(tmp_path)
    monkeypatch.setenv("PATH", suite.environ["PATH"])
    yield suite
    left = [pid for path in tmp_path.glob("*pids*") for pid in pids_in(path) if is_alive(pid)]
    assert not left, f"processes {left} outlived their run"


def execute(suite: Suite) -> dict[str, Verdict]:
    request = session.RunRequest(configs=("config-cpu.txt",), root=str(suite.root), grace_s=0.5)
    prepared = session.prepare(request, suite.environ)
    folder = RunFolder(suite.results / "run")
    folder.begin(request.to_json())
    verdicts = local.execute(prepared.jobs, prepared.options, folder, PlainDisplay(print))
    return {verdict.job_id.removeprefix("s/"): verdict for verdict in verdicts}


@pytest.mark.parametrize(
    "port_args", [("--port", "0", "--port-file", "{port_file}"), ("--port", "{port}")]
)
def test_servers_that_start_at_the_same_moment_all_run(
    tmp_path: Path, port_args: tuple[str, ...]
) -> None:
    barrier = threading.Barrier(5)
    running: list[RunningServer] = []

    def begin(number: int) -> None:
        spec = LaunchSpec((sys.executable, str(STUB)), served_model="stub", port_args=port_args)
        barrier.wait()
        log = tmp_path / str(number) / "log"
        running.append(start(spec, StartSettings(log, 30, dict(os.environ), 0.5)))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(5)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({server.base_url for server in running}) == 5
    finally:
        for server in running:
            server.stop()


def test_each_file_has_its_own_limit_and_a_default(suite: Suite) -> None:
    for limit in (0.5, 1.5):
        pids = suite.folder / f"pids-{limit}"
        args = f"--never-listen --pids-file {pids} --grandchildren 1"
        suite.add(f"limit-{limit}", args, startup_max_wait_seconds=limit)
    path = suite.add("default", suite.right())
    values = json.loads(path.read_text())
    del values["startup_max_wait_seconds"]
    path.write_text(json.dumps(values))
    began = time.monotonic()
    verdicts = execute(suite)
    assert 2.0 <= time.monotonic() - began < 20
    for limit in (0.5, 1.5):
        verdict = verdicts[f"limit-{limit}"]
        assert verdict.status is Status.ERROR
        assert f"not ready within startup_max_wait_seconds {limit:g}: " in verdict.reason
        assert limit <= verdict.duration_s < limit + 3
    assert verdicts["default"].status is Status.PASS


def test_a_start_that_fails_says_so_with_code_and_last_lines(suite: Suite) -> None:
    for code in (0, 1):
        suite.add(f"code-{code}", f"--exit-code {code} --exit-after-s 0.5 --say 'last words'")
    for code, verdict in enumerate(execute(suite).values()):
        assert verdict.status is Status.ERROR
        assert f"start: the server process ended with exit code {code}" in verdict.reason
        assert verdict.log_tail == ("last words",)
        assert verdict.accuracy is None


def test_another_model_is_the_users_to_mend_and_none_yet_is_waited_for(suite: Suite) -> None:
    for name, data in {"other": [{"id": "other"}], "none": []}.items():
        routes = suite.folder / f"{name}.json"
        routes.write_text(json.dumps({"/v1/models": {"object": "list", "data": data}}))
        suite.add(name, f"--routes {routes}", startup_max_wait_seconds=2 if data else 1)
    verdicts = execute(suite)
    assert verdicts["other"].reason == "ServerError: start: it serves other, not stub"
    assert verdicts["other"].is_config_fault
    assert "not ready within startup_max_wait_seconds 1: /v1/models" in verdicts["none"].reason
    assert "lists nothing" in verdicts["none"].reason
    assert not verdicts["none"].is_config_fault


def test_memory_that_stays_in_use_is_named_in_place_of_the_next_start(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = suite.folder / "pids"
    tool = suite.bin / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"  *uuid,memory.used) [ -e '{pids}' ] && echo 'GPU-a, 9000' || echo 'GPU-a, 100';;\n"
        "  *index,uuid) echo '3, GPU-a';;\n"
        "  *compute-apps*) echo 'GPU-a, 4711';;\n"
        "esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(pipeline, "GpuMemory", lambda: GpuMemory(wait_s=0.3))
    suite.add("first", f"--exit-code 3 --pids-file {pids}")
    suite.add("second", f"{suite.right()} --pids-file {pids}")
    verdicts = execute(suite)
    assert [verdict.status for verdict in verdicts.values()] == [Status.ERROR, Status.ERROR]
    assert "GPU 3 still holds 9000 MiB (pid 4711)" in verdicts["second"].reason
    assert len(pids_in(pids)) == 1


class TestLog:
    def test_a_flood_before_and_during_the_questions_stops_nothing_and_is_all_there(
        self, suite: Suite
    ) -> None:
        flood, each = 10 * 2**20, 1024
        args = f"{suite.right()} --flood-bytes {flood} --log-per-request {each}"
        suite.add("flood", args)
        verdict = execute(suite)["flood"]
        assert verdict.status is Status.PASS
        (log,) = (suite.results / "run" / "servers").glob("*.log")
        data = log.read_bytes()
        assert data.count(b"x" * 99 + b"\n") == flood // 100
        assert data.count(b"r" * (each - 1) + b"\n") == NUM_QUESTIONS

    def test_what_a_server_logs_without_end_takes_no_memory_and_little_disk(
        self, tmp_path: Path
    ) -> None:
        limit, flood = 4 * 2**20, 300 * 2**20
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        spec = LaunchSpec(
            (sys.executable, str(STUB), "--say", "the head", "--flood-bytes", str(flood)),
            served_model="stub",
            port_args=("--port", "0", "--port-file", "{port_file}"),
        )
        log = tmp_path / "log"
        settings = StartSettings(log, 60, dict(os.environ), 0.5, log_limit_bytes=limit)
        with start(spec, settings) as server:
            wait_until(lambda: log.stat().st_size <= limit)
            assert log.read_bytes().startswith(b"the head")
            assert server.log_tail()[-1] == "x" * 99
            assert len(server.log_text()) < 10 * 2**20
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown * 1024 < 64 * 2**20

    def test_escapes_and_bad_bytes_reach_no_log_of_ci_and_the_tail_is_bounded(
        self, suite: Suite
    ) -> None:
        args = "--flood-bytes 20000 --line-bytes 2000000 --bad-bytes --exit-code 3"
        suite.add("noisy", args)
        done = suite.run(*RUN)
        assert done.returncode == 75
        assert "\x1b" not in done.stdout + done.stderr
        assert "\x07" not in done.stdout
        shown = [line for line in done.stdout.splitlines() if line.startswith("  | ")]
        assert shown[-1].endswith("bad red  bytes")
        assert 2 <= len(shown) <= 40
        assert max(map(len, shown)) < 600
        for path in suite.run_folder().glob("*.*"):
            assert b"\x1b" not in path.read_bytes(), path


@pytest.mark.parametrize("stage", ["start", "questions"])
def test_what_was_answered_before_an_interrupt_is_on_disk(suite: Suite, stage: str) -> None:
    pids, count = suite.folder / "pids", suite.folder / "count"
    args = f"{suite.right()} --pids-file {pids} --grandchildren 2 --ignore-term"
    suite.add("first", suite.right())
    more = "--never-listen" if stage == "start" else f"--delay-s 0.2 --count-file {count}"
    suite.add("second", f"{args} {more}", max_concurrency=2)
    run = subprocess.Popen(
        [sys.executable, "-m", "evalsuite.cli", *RUN],
        cwd=suite.folder,
        env=suite.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: len(pids_in(pids)) == 3, 30.0)
        if stage == "questions":
            wait_until(lambda: count.exists() and len(count.read_text()) >= 6, 30.0)
        run.send_signal(signal.SIGINT)
        began = time.monotonic()
        output, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    # Grace, and five seconds for what ignores it.
    assert time.monotonic() - began < 0.5 + 5 + 5
    assert run.returncode == 2
    assert not any(is_alive(pid) for pid in pids_in(pids))
    assert "interrupted; go on with" in output
    folder = suite.run_folder()
    assert statuses(folder) == {"s/first": "PASS"}
    ledger = folder / "jobs" / "s__second" / "ledger.jsonl"
    answered = len(re.findall('"status":', ledger.read_text())) if ledger.exists() else 0
    assert answered >= (4 if stage == "questions" else 0)
