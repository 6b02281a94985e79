"""The suite killed at random points: resumed runs give the uncut run's verdict, nothing is left."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_helpers import NUM_QUESTIONS, Suite, is_alive, pids_in, wait_until

RUN = ("run", "--configs-root", "configs", "--config", "config-cpu.txt", "--stop-grace", "0.5")
NUM_KILLS = 20
# Of one uncut run on two busy cores, its start included.
LONGEST_S = 8.0


def outcome(folder: Path) -> list[tuple[str, str, object]]:
    verdicts = json.loads((folder / "results.json").read_text())["verdicts"]
    return [(v["job_id"], v["status"], v["accuracy"]) for v in verdicts]


def build(folder: Path) -> Suite:
    suite = Suite(folder)
    slow = f"--pids-file {folder / 'pids'} --delay-s 0.1 --grandchildren 1"
    suite.add("right", f"{suite.right()} {slow}", max_concurrency=4)
    suite.add("wrong", slow, max_concurrency=4)
    return suite


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_killed_at_a_random_point(
    number: int, tmp_path_factory: pytest.TempPathFactory, uncut: list[tuple[str, str, object]]
) -> None:
    suite = build(tmp_path_factory.mktemp("cut"))
    choice = random.Random(number)
    pids = suite.folder / "pids"
    run = subprocess.Popen(
        [sys.executable, "-m", "evalsuite.cli", *RUN],
        cwd=suite.folder,
        env=suite.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(choice.uniform(0.0, LONGEST_S))
    run.send_signal(choice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    run.wait(30)
    wait_until(lambda: not any(is_alive(pid) for pid in pids_in(pids)), 10.0)
    folders = [path.parent for path in suite.results.glob("*/run.json")]
    if not folders:
        return  # killed before anything was begun: there is nothing to go on with
    done = suite.run("run", "--resume", folders[0].name, timeout_s=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcome(folders[0]) == uncut
    assert not any(is_alive(pid) for pid in pids_in(pids))


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, object]]:
    suite = build(tmp_path_factory.mktemp("uncut"))
    assert suite.run(*RUN, timeout_s=120).returncode == 1
    found = outcome(suite.run_folder())
    assert found == [("s/right", "PASS", 1.0), ("s/wrong", "FAIL", found[1][2])]
    assert NUM_QUESTIONS == 30
    return found
