"""The command line as a process: exit codes, signals, resume, and what it does not load."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import NUM_QUESTIONS, REPOSITORY, Suite, is_alive, pids_in, statuses, wait_until

from evalsuite import cli

RUN = ("run", "--configs-root", "configs", "--config", "config-cpu.txt", "--stop-grace", "0.5")


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    suite = Suite(tmp_path)
    yield suite
    pids = [pid for path in tmp_path.glob("*pids*") for pid in pids_in(path)]
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15.0)


def start_run(suite: Suite, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evalsuite.cli", *args],
        cwd=suite.folder,
        env=suite.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_pass_fail_and_error_have_their_exit_codes(suite: Suite) -> None:
    suite.add("right", suite.right())
    only = suite.run(*RUN, "right")
    assert (only.returncode, only.stderr) == (0, "")
    assert "s/right: PASS 1.0000" in only.stdout
    assert f"results: results/{suite.run_folder().name}" in only.stdout
    suite.add("broken", "--exit-code 3 --say 'no weights'")
    error = suite.run(*RUN, "broken")
    assert error.returncode == 75
    assert "| no weights" in error.stdout
    # The next two steps: start that server by hand, read all of its log.
    (command,) = re.findall(r"^  server command: (.*)$", error.stdout, re.MULTILINE)
    assert " stub --exit-code 3 --say 'no weights' " in command
    (log,) = re.findall(r"^  server log: (.*)$", error.stdout, re.MULTILINE)
    assert (suite.folder / log).read_text() == "no weights\n"
    suite.add("wrong")
    # A low score beats an error beside it.
    assert suite.run(*RUN, "wrong", "broken").returncode == 1
    suite.add("big", "-tp 2", pool="b200")
    skipped = suite.run("run", "--configs-root", "configs", "--config", "config-b200.txt")
    assert skipped.returncode == 5
    assert "needs pool b200" in skipped.stdout


TOO_LONG = (
    "This model's maximum context length is 16 tokens. However, you requested 300 tokens "
    "(44 in the messages, 256 in the completion)."
)


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (400, TOO_LONG, "do not fit the server's context by at least 284 tokens"),
        (404, "The model `other` does not exist.", "refuses every request: HTTP 404"),
        (401, "Unauthorized", "refuses every request: HTTP 401"),
    ],
)
@pytest.mark.parametrize("evaluator", ["builtin", pytest.param("lm-eval", marks=pytest.mark.slow)])
def test_what_only_the_user_can_mend_is_no_75_even_when_found_late(
    suite: Suite, status: int, message: str, reason: str, evaluator: str
) -> None:
    args = shlex.join(["--status", str(status), "--message", message])
    suite.add("refused", args, evaluator=evaluator)
    done = suite.run(*RUN)
    assert done.returncode == 4
    assert "s/refused: ERROR: ConfigError" in done.stdout
    assert reason in done.stdout
    results = json.loads((suite.run_folder() / "results.json").read_text())
    assert results["exit_code"] == 4
    assert results["verdicts"][0]["accuracy"] is None


def test_the_command_that_is_printed_runs_the_same_job_again(suite: Suite) -> None:
    suite.add("wrong")
    folders = ("--results", "else where", "--baselines", "base lines", "--limit", "7")
    done = suite.run(*RUN, *folders)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "reproduce: " in line]
    program, *again = shlex.split(line.partition("reproduce: ")[2])
    assert program == "evalsuite"
    assert suite.run(*again).returncode == 1
    runs = sorted((suite.folder / "else where").iterdir())
    first, second = (json.loads((run / "results.json").read_text()) for run in runs)
    for key in ("job_id", "accuracy", "reproduce"):
        assert first["verdicts"][0][key] == second["verdicts"][0][key]
    assert [run["verdicts"][0]["result"]["num_questions"] for run in (first, second)] == [7, 7]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--cnfig", "x"), "no such option: --cnfig; did you mean '--config'?"),
        (("rnu",), "Did you mean 'run'?"),
        (("run", "--limit", "many"), "--limit"),
        (("run", "--config", "config-cpu.txt", "--limit", "0"), "--limit 0"),
        (("run", "--config", "config-cpx.txt"), "config-cpx.txt"),
        (("run", "--config", "config-cpu.txt", "--shard", "5/4"), "5/4"),
        (("run", "--config", "config-cpu.txt", "nobody"), "no job 'nobody'"),
        (("run", "rigth"), "did you mean 'right'?"),
        (("run", "configs/s"), "is a folder; name one of its lists: config-cpu.txt"),
        (("run", "rigth.yaml"), "no file 'rigth.yaml' here, and no suite under"),
        (("run",), "no --config given"),
        (("run", "--resume", "nowhere"), "not the folder of a run, nor one below results"),
        (("run", "--resume", "x", "--limit", "3"), "give nothing else"),
        (("rerun", "nowhere"), "not the folder of a run"),
        (("rerun",), "Missing argument 'RUN'; see: evalsuite rerun --help"),
        (("baseline",), "Missing command; see: evalsuite baseline --help"),
        (("new", "m", "--backend", "x"), "Missing option '--layout'; see: evalsuite new --help"),
        (("run", "--config", "empty.txt"), "empty.txt"),
    ],
)
def test_what_the_user_must_mend_is_exit_4(
    suite: Suite,
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite.add("right", suite.right())
    (suite.root / "s" / "empty.txt").write_text("# nothing\n")
    monkeypatch.chdir(suite.folder)
    assert cli.main(args) == 4
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert not suite.results.exists()


INTERRUPTED_WHILE_LOADING = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "evalsuite.config":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
sys.argv = ["evalsuite", "ls"]
from evalsuite.__main__ import main
sys.exit(main())
"""


def test_an_interrupt_while_the_command_line_is_loaded_is_2_as_well(suite: Suite) -> None:
    done = suite.run(program=("-c", INTERRUPTED_WHILE_LOADING))
    assert (done.returncode, done.stderr) == (2, "interrupted\n")
    assert "evalsuite " in suite.run("--version", program=("-m", "evalsuite")).stdout


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param((signal.SIGINT,), id="int", marks=pytest.mark.slow),
        pytest.param((signal.SIGINT, signal.SIGINT), id="int-twice"),
        pytest.param((signal.SIGTERM,), id="term"),
        pytest.param((signal.SIGKILL,), id="kill", marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_leaves_nothing_and_resumes_to_the_same_verdict(
    suite: Suite, signals: tuple[int, ...]
) -> None:
    pids, count = suite.folder / "pids", suite.folder / "count"
    args = f"{suite.right()} --pids-file {pids} --count-file {count} --delay-s 0.1"
    suite.add("first", suite.right(), num_questions=5)
    suite.add("job", f"{args} --grandchildren 1 --ignore-term", max_concurrency=2)
    run = start_run(suite, *RUN)
    try:
        wait_until(lambda: count.exists() and len(count.read_text()) >= 6, 30.0)
        for number in signals:
            run.send_signal(number)
            time.sleep(0.2)
        output, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids_in(pids)), 15.0)
    assert run.returncode == (-9 if signals[0] == signal.SIGKILL else 2)
    folder = suite.run_folder()
    if len(signals) == 1 and signals[0] != signal.SIGKILL:
        assert f"evalsuite run --resume results/{folder.name}" in output
        assert statuses(folder) == {"s/first": "PASS"}
    asked = len(count.read_text())
    assert asked < NUM_QUESTIONS
    resumed = suite.run("run", "--resume", folder.name)
    assert resumed.returncode == 0, resumed.stdout
    assert statuses(folder) == {"s/first": "PASS", "s/job": "PASS"}
    # At most what was in flight is asked a second time.
    assert len(count.read_text()) <= NUM_QUESTIONS + 2
    data = json.loads((folder / "results.json").read_text())
    assert data["verdicts"][1]["accuracy"] == 1.0


def test_interrupt_during_start(suite: Suite) -> None:
    pids = suite.folder / "pids"
    suite.add("job", f"--never-listen --pids-file {pids}")
    run = start_run(suite, *RUN)
    try:
        wait_until(lambda: bool(pids_in(pids)), 20.0)
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=20)
    finally:
        run.kill()
    assert run.returncode == 2
    assert not any(is_alive(pid) for pid in pids_in(pids))


def test_rerun_failed_runs_only_what_failed_from_the_first_question(suite: Suite) -> None:
    count = suite.folder / "count"
    suite.add("right", suite.right())
    suite.add("wrong", f"--count-file {count}")
    assert suite.run(*RUN).returncode == 1
    name = suite.run_folder().name
    again = suite.run("rerun", "--failed", name)
    assert again.returncode == 1
    assert len(count.read_text()) == 2 * NUM_QUESTIONS
    (new,) = [path for path in suite.results.iterdir() if path.name != name]
    assert statuses(new) == {"s/wrong": "FAIL"}


def test_shards_are_all_jobs_once_and_an_empty_one_is_no_failure(suite: Suite) -> None:
    for name in ("a", "b", "c"):
        suite.add(name, suite.right(), num_questions=3)
    seen = []
    for shard in ("1/2", "2/2"):
        listed = suite.run(*RUN, "--shard", shard, "--dry-run").stdout
        seen += [line.split(":")[0] for line in listed.splitlines() if line.startswith("s/")]
    assert sorted(seen) == ["s/a", "s/b", "s/c"]
    empty = suite.run(*RUN, "--shard", "5/5")
    assert (empty.returncode, empty.stdout.strip()) == (
        0,
        "shard 5/5: nothing assigned of 3 jobs",
    )


def test_durations_are_recorded_and_cut_the_shards(suite: Suite) -> None:
    suite.add("slow", suite.right() + " --delay-s 0.5", max_concurrency=30)
    suite.add("quick", suite.right(), num_questions=3)
    suite.add("broken", "--exit-code 1")
    recorded = suite.folder / "durations.json"
    assert suite.run(*RUN, "--record-durations", str(recorded)).returncode == 75
    seconds = json.loads(recorded.read_text())
    assert set(seconds) == {"s/slow", "s/quick"}
    recorded.write_text('{"s/slow": 100, "s/quick": 1, "s/broken": 1}')
    listed = suite.run(*RUN, "--durations", str(recorded), "--shard", "1/2", "--dry-run").stdout
    assert [line.split(":")[0] for line in listed.splitlines()] == ["s/slow"]


def test_dry_run_shows_the_command_and_starts_nothing(suite: Suite) -> None:
    pids = suite.folder / "pids"
    suite.add("job", f"--pids-file {pids}", env={"HF_TOKEN": "hf_secret_value"})
    done = suite.run(*RUN, "--dry-run")
    assert done.returncode == 0
    assert "vllm serve stub --pids-file" in done.stdout
    assert "hf_secret_value" not in done.stdout + done.stderr
    assert not pids.exists()
    assert not suite.results.exists()


def test_fail_fast_leaves_the_rest(suite: Suite) -> None:
    suite.add("wrong")
    suite.add("right", suite.right())
    assert suite.run(*RUN, "--fail-fast").returncode == 1
    assert statuses(suite.run_folder()) == {"s/wrong": "FAIL"}


def test_external_server_is_used_and_left_alone(suite: Suite, tmp_path: Path) -> None:
    from evalsuite.engines.base import LaunchSpec
    from evalsuite.server import StartSettings, start

    suite.add("job", "--anything")
    spec = LaunchSpec(
        (str(suite.bin / "vllm"), "serve", "stub", *suite.right().split()),
        served_model="stub",
        port_args=("--port", "{port}"),
    )
    with start(spec, StartSettings(tmp_path / "own.log", 20, suite.environ)) as server:
        done = suite.run(*RUN, "--base-url", server.base_url + "/v1/")
        assert (done.returncode, done.stderr) == (0, "")
        assert server.is_alive
        folder = suite.run_folder()
        assert statuses(folder) == {"s/job": "PASS"}
        assert not (folder / "servers").exists()
        suite.add("other", model_name="another")
        other = suite.run(*RUN, "other", "--base-url", server.base_url)
        assert other.returncode == 4
        assert "it serves stub, not another" in other.stdout
    suite.add("impatient", startup_max_wait_seconds=0.5)
    gone = suite.run(*RUN, "impatient", "--base-url", server.base_url)
    assert gone.returncode == 75
    assert "cannot be evaluated" in gone.stdout


def test_secrets_are_in_no_file_of_the_run(suite: Suite) -> None:
    secret = "hf_0123456789abcdef"
    suite.add(
        "job",
        f"{suite.right()} --api-key sk-0123456789 --say 'args: {secret} sk-0123456789'",
        env={"HF_TOKEN": secret},
    )
    suite.add("dies", f"--exit-code 1 --say {secret}", env={"HF_TOKEN": secret})
    done = suite.run(*RUN)
    assert done.returncode == 75
    texts = [done.stdout, done.stderr]
    texts += [p.read_text() for p in suite.run_folder().rglob("*") if p.is_file()]
    assert len(texts) > 8
    assert not any(secret in text or "sk-0123456789" in text for text in texts)


# The command line as it is, but for lines that are a fifth of a second apart in place of five.
TALKATIVE = """
import sys
from evalsuite import cli, progress
progress.PlainDisplay.__init__.__defaults__ = (0.2,)
sys.exit(cli.main(sys.argv[1:]))
"""


def test_progress_lines_for_a_log(suite: Suite) -> None:
    suite.add("job", f"{suite.right()} --delay-s 0.05", max_concurrency=2)
    done = suite.run(*RUN, program=("-c", TALKATIVE))
    line = next(x for x in done.stdout.splitlines() if "accuracy so far" in x)
    assert line.startswith("s/job: ")
    for word in (f"/{NUM_QUESTIONS} questions", "/s", "accuracy so far 1.000", " left"):
        assert word in line
    assert "\x1b" not in done.stdout


def test_version_help_and_doctor(suite: Suite) -> None:
    assert suite.run("--version").stdout.startswith("evalsuite 0.")
    assert "Exit codes" in suite.run("--help").stdout
    assert suite.run().returncode == 4
    doctor = suite.run("doctor")
    assert doctor.returncode == 0
    for word in ("machine:", "pool: cpu", "ok      vllm", "missing sglang", "gsm8k test"):
        assert word in doctor.stdout


def test_commands_about_configs_load_no_server_and_no_torch() -> None:
    code = (
        "import sys; from evalsuite import cli; code = cli.main(['validate', 'configs']);"
        "heavy = {'torch', 'aiohttp', 'lm_eval', 'rich', 'moeserve.models'} & set(sys.modules);"
        "print(heavy); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "set()"
