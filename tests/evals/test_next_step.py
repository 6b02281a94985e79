"""What a user does after a verdict that is no PASS: compare, mend, go on; as processes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import NUM_QUESTIONS, Suite, wait_until

RUN = ("run", "--configs-root", "configs", "--config", "config-cpu.txt", "--stop-grace", "0.5")


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_a_fail_names_the_command_that_shows_what_changed_since_it_passed(suite: Suite) -> None:
    path = suite.add("job")
    wrong = suite.run(*RUN)
    assert wrong.returncode == 1
    # It never passed.
    assert "what changed" not in wrong.stdout
    asked = json.loads(path.read_text())
    path.write_text(json.dumps({**asked, "server_args": suite.right(), "num_questions": 5}))
    assert suite.run(*RUN).returncode == 0
    path.write_text(json.dumps(asked))
    # Other prompts cannot be compared.
    assert "what changed" not in suite.run(*RUN).stdout
    path.write_text(json.dumps({**asked, "server_args": suite.right()}))
    assert suite.run(*RUN).returncode == 0
    path.write_text(json.dumps(asked))
    failed = suite.run(*RUN)
    assert failed.returncode == 1
    (command,) = re.findall(r"^what changed .*: evalsuite (.*)$", failed.stdout, re.MULTILINE)
    shown = suite.run(*shlex.split(command))
    assert shown.returncode == 0
    assert f"{NUM_QUESTIONS} lost, 0 gained" in shown.stdout


def test_a_server_that_refuses_its_command_line_is_the_users_to_mend(suite: Suite) -> None:
    suite.add("typo", "--exit-code 2 --say 'unrecognized arguments: --max-modl-len'")
    suite.add("broken", "--exit-code 3")
    done = suite.run(*RUN, "typo")
    assert done.returncode == 4
    assert "the server process ended with exit code 2: it refuses its command line" in done.stdout
    assert "  | unrecognized arguments: --max-modl-len" in done.stdout
    # 75 would say that the same run may succeed.
    assert suite.run(*RUN).returncode == 4
    assert suite.run(*RUN, "broken").returncode == 75
    calibrated = suite.run("calibrate", "typo", "--configs-root", "configs", "--repeats", "2")
    assert calibrated.returncode == 4, calibrated.stdout + calibrated.stderr


def test_a_resumed_run_mixes_no_answers_of_two_servers_and_says_what_it_kept(
    suite: Suite,
) -> None:
    args = f"{suite.right()} --exit-after-requests 6"
    suite.add("job", args, max_concurrency=1, max_retries=0)
    assert suite.run(*RUN).returncode == 75
    name = suite.run_folder().name
    path = suite.root / "s" / "job.yaml"
    # Whatever the server is told otherwise may change its answers.
    asked = json.loads(path.read_text())
    path.write_text(json.dumps({**asked, "server_args": suite.right(), "env": {"B": "1"}}))
    other = suite.run("run", "--resume", name)
    assert other.returncode == 4
    assert "was begun with other settings: server 'vllm " in other.stdout
    assert "(now 'B=1 vllm " in other.stdout
    assert "Traceback" not in other.stdout + other.stderr
    near = suite.run("run", "--resume", name[:-1])
    assert near.returncode == 4
    assert f"; did you mean {name!r}?" in near.stderr
    # The same arguments; only the luck is better.
    path.write_text(json.dumps(asked))
    stub = suite.bin / "vllm"
    stub.write_text(stub.read_text().replace('"$@"', '"$@" --exit-after-requests 0'))
    resumed = suite.run("run", "--resume", name)
    assert resumed.returncode == 0, resumed.stdout
    assert "note: 6 answers are from before the run was resumed" in resumed.stdout


@pytest.mark.parametrize("is_pytest", [False, True])
def test_a_second_run_keeps_out_of_a_folder_that_is_being_written(
    suite: Suite, is_pytest: bool
) -> None:
    count = suite.folder / "count"
    args = f"{suite.right()} --delay-s 0.05 --count-file {count}"
    suite.add("job", args, max_concurrency=1)
    program = (
        (*("-m", "pytest", "evalsuite"), *RUN[1:]) if is_pytest else ("-m", "evalsuite.cli", *RUN)
    )
    first = subprocess.Popen(
        [sys.executable, *program],
        cwd=suite.folder,
        env=suite.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: count.exists() and len(count.read_text()) >= 2, 30.0)
        name = suite.run_folder().name
        second = suite.run("run", "--resume", name)
        assert second.returncode == 4
        assert f"results/{name}: another run is writing there" in second.stderr
        output, _ = first.communicate(timeout=30)
    finally:
        first.kill()
    assert first.returncode == 0, output
    # Nobody but the first has asked, and what it left is whole.
    assert len(count.read_text()) == NUM_QUESTIONS
    assert suite.run("run", "--resume", name).returncode == 0
    assert len(count.read_text()) == NUM_QUESTIONS
