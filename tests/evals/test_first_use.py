"""What a new user types: a fault names itself and the nearest right thing; never a traceback."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_helpers import Suite, is_alive, pids_in, statuses

from evalsuite import cli, os_faults
from evalsuite.yaml_loader import read_text

RUN = ["run", "--configs-root", "configs", "--config", "config-cpu.txt"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    suite = Suite(tmp_path)
    suite.add("right", suite.right())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", suite.environ["PATH"])
    return suite


def told(capsys: Capture, argv: list[str]) -> str:
    """What is said about something that the user must mend."""
    assert cli.main(argv) == 4, capsys.readouterr()
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "error: " in err
    return err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--config", "configs"], "configs: error: is a folder; name one of its lists: s/config-"),
        (["--config", "configs/s"], "is a folder; name one of its lists: config-cpu.txt"),
        (["--config", "configs/s/"], "is a folder; name one of its lists: config-cpu.txt"),
        (["--config", r"configs\s\right.yaml"], "did you mean 'configs/s/right.yaml'?"),
        (["--config", r"C:\evals\right.yaml"], "did you mean 'right.yaml'?"),
        (["--config", "configs/s/right.yml"], "did you mean configs/s/right.yaml?"),
        (["--config", "configs/hardware.yaml"], "describes pools and is no job"),
        (["--config", "x" * 5000], "File name too long"),
        (["--config", ""], "--config is empty"),
        (["--configs-root", "config"], "config: error: --configs-root names no folder"),
        (["--engine", "vlm"], "error: --engine 'vlm' is no engine; did you mean 'vllm'?"),
        (["--pool", "cpus"], "--pool 'cpus' is no pool of hardware.yaml; known: cpu, b200"),
        (["--base-url", "host:8000"], "--base-url 'host:8000' is no URL of a server, such as http"),
        (["--base-url", "http://host:70000"], "is no URL (Port out of range 0-65535)"),
        (["--base-url", "http://host:0"], "is no URL of a server"),
        (["--base-url", "http://"], "is no URL of a server"),
        (["--base-url", "http://[::1"], "is no URL (Invalid IPv6 URL)"),
        (["--data-dir", "nowhere"], "--data-dir 'nowhere' is no folder"),
        (["--record-durations", "configs"], "'configs' is a folder; name a file in it"),
        (["--record-durations", "no/x.json"], "'no/x.json' cannot be written: no is no folder"),
        (["--results", "configs/hardware.yaml"], "is no folder; name another folder by --results"),
        (["--results", "x" * 300], "File name too long"),
        (["--shard", "1"], "--shard '1' is not of the form i/n"),
    ],
)
def test_an_option_that_cannot_be_meant_names_itself(
    options: list[str], part: str, suite: Suite, capsys: Capture
) -> None:
    argv = [*RUN, *options] if options[0] != "--config" else ["run", *options]
    said = told(capsys, argv)
    assert part in said
    assert len(said) < 1000
    assert not suite.results.exists()
    # Said once, and not once a job.
    assert said.count(part) == 1


class TestFiles:
    @pytest.mark.parametrize(
        ("kind", "part"),
        [
            ("folder", "is a folder"),
            ("pipe", "is not a regular file"),
            ("dangling", "is a link to nowhere.yaml, which is not there"),
            ("loop", "is a link to odd.yaml, which is not there"),
            ("absent", "no file 'odd.yaml' here; did you mean 'add.yaml'?"),
        ],
    )
    def test_what_stands_in_the_place_of_a_yaml_is_named(
        self, kind: str, part: str, suite: Suite, capsys: Capture
    ) -> None:
        suite.add("add")
        path = suite.root / "s" / "odd.yaml"
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind in ("dangling", "loop"):
            path.symlink_to("nowhere.yaml" if kind == "dangling" else "odd.yaml")
        with (suite.root / "s" / "config-cpu.txt").open("a") as file:
            file.write("odd.yaml\n")
        said = told(capsys, RUN)
        assert "configs/s/config-cpu.txt:3: error: " in said
        assert part in said
        alone = "no such file; did you mean" if kind == "absent" else part
        assert alone in told(capsys, ["run", "--config", "configs/s/odd.yaml"])
        if kind != "folder":  # one of these without a config in it
            assert alone in told(capsys, ["validate", "configs/s/odd.yaml"])

    def test_a_list_that_is_a_pipe_is_not_waited_for(self, suite: Suite, capsys: Capture) -> None:
        os.mkfifo(suite.root / "s" / "config-x-cpu.txt")
        assert "is not a regular file" in told(capsys, ["run", "--config", "config-x-cpu.txt"])

    def test_an_unreadable_file_is_named(
        self, suite: Suite, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> bytes:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        for path in ("configs/s/right.yaml", "configs/s/config-cpu.txt"):
            said = told(capsys, ["validate", path])
            assert f"{path}: error: cannot be read: [Errno 13] Permission denied" in said
        assert read_text(Path("configs/hardware.yaml"), "x")[1] is not None

    def test_windows_line_ends_a_mark_and_tabs_between_words_change_nothing(
        self, suite: Suite, capsys: Capture
    ) -> None:
        path = suite.root / "s" / "right.yaml"
        lines = "model_name:\tstub\naccuracy_threshold: 0.9 \ntolerance: 0.2\nnum_questions:\t30\n"
        lines += "num_fewshot: 1\ntask: minigsm\nengine: vllm\nmax_retries: 1\nserver_args: >-\n"
        lines += f"  {suite.right()}\n  --b '2'\n"
        path.write_bytes(b"\xef\xbb\xbf" + lines.replace("\n", "\r\n").encode())
        listed = suite.root / "s" / "config-cpu.txt"
        listed.write_bytes(b"\xef\xbb\xbf.\\right.yaml\t\r\n\r\n")
        assert cli.main(RUN) == 0
        assert "s/right: PASS 1.0000" in capsys.readouterr().out
        path.write_text("model_name: stub\n\taccuracy_threshold: 0.9\n")
        said = told(capsys, RUN)
        assert "right.yaml:2: error: is not YAML: " in said
        assert "YAML indents with blanks, not tabs" in said

    def test_a_huge_file_is_refused_without_being_read(self, suite: Suite, capsys: Capture) -> None:
        with (suite.root / "s" / "right.yaml").open("w") as file:
            file.truncate(1 << 34)
        began = time.process_time()
        assert "17179869184 bytes; the limit is 1048576" in told(capsys, RUN)
        assert time.process_time() - began < 2


@pytest.mark.parametrize("where", ["other", "other/deeper", "/"])
def test_run_from_another_directory(where: str, suite: Suite, capsys: Capture) -> None:
    folder = suite.folder / where
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    root = str(suite.root)
    out = ["--results", str(suite.results)]
    for argv in (
        ["--configs-root", root, "--config", "config-cpu.txt"],
        ["--config", f"{root}/s/config-cpu.txt", "--pool", "cpu"],
        ["--config", os.path.relpath(f"{root}/s/right.yaml")],
        ["--configs-root", root, "right"],
    ):
        assert cli.main(["run", *argv, *out, "--dry-run"]) == 0, argv
        assert capsys.readouterr().out.startswith("s/right: ")


class TestDisks:
    def test_reports_that_do_not_fit_leave_the_verdict_on_the_screen(
        self, suite: Suite, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("evalsuite.run_folder.write_all", full)
        assert cli.main(RUN) == 75
        out, err = capsys.readouterr()
        assert "s/right" in out
        assert "PASS" in out
        assert "the reports cannot be written: [Errno 28] No space left on device" in err
        assert "results: " not in out
        # A low score is one, written down or not.
        suite.add("wrong")
        assert cli.main(RUN) == 1
        assert "Traceback" not in capsys.readouterr().err

    def test_a_disk_that_is_full_before_the_first_word_is_75(
        self, suite: Suite, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "results/x/run.json")

        monkeypatch.setattr("evalsuite.run_folder.write_text", full)
        assert cli.main(RUN) == 75
        err = capsys.readouterr().err
        assert err == (
            "error: results/x/run.json: No space left on device; "
            "free some space, or name another folder by --results\n"
        )

    def test_the_same_under_pytest(self, suite: Suite) -> None:
        (suite.folder / "full.py").write_text(
            "import errno\n"
            "from evalsuite import run_folder\n"
            "def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
            "run_folder.write_all = full\n"
        )
        done = suite.run("-p", "full", "evalsuite", *RUN[1:], "-q", program=("-m", "pytest"))
        assert done.returncode == 75, done.stdout + done.stderr
        assert "1 passed" in done.stdout
        assert "error: the reports cannot be written: [Errno 28] No space left" in done.stdout
        assert "INTERNALERROR" not in done.stdout

    @pytest.mark.parametrize("is_pytest", [False, True])
    def test_a_low_score_that_cannot_be_written_down_is_one(
        self, suite: Suite, is_pytest: bool
    ) -> None:
        suite.add("wrong")
        done = self.without_room(suite, "verdict.json", is_pytest)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "s/wrong: its verdict.json cannot be written: [Errno 28] No space" in done.stdout
        assert "s/right: its verdict.json cannot be written: [Errno 28] No space" in done.stdout
        assert list(suite.run_folder().rglob("verdict.json")) == []
        assert statuses(suite.run_folder()) == {"s/right": "PASS", "s/wrong": "FAIL"}

    @pytest.mark.parametrize("is_pytest", [False, True])
    def test_no_room_for_the_first_word_is_75_whoever_runs(
        self, suite: Suite, is_pytest: bool
    ) -> None:
        done = self.without_room(suite, "run.json", is_pytest)
        assert done.returncode == 75, done.stdout + done.stderr
        assert "No space left on device; free some space" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr

    @pytest.mark.parametrize("is_pytest", [False, True])
    def test_no_room_for_a_servers_log_ends_the_job_and_not_the_run(
        self, suite: Suite, is_pytest: bool
    ) -> None:
        suite.add("again", suite.right(), env={"A": "1"})
        done = self.without_room(suite, "001.log", is_pytest)
        assert done.returncode == 75, done.stdout + done.stderr
        assert statuses(suite.run_folder()) == {"s/right": "ERROR", "s/again": "PASS"}
        assert "001.log: No space left on device; free some space" in done.stdout

    def without_room(
        self, suite: Suite, name: str, is_pytest: bool
    ) -> subprocess.CompletedProcess[str]:
        """A run on a disk that has no room for files of this name."""
        (suite.folder / "full.py").write_text(
            "import errno, pathlib\n"
            "opened = pathlib.Path.open\n"
            "def full(path, mode='r', *args, **more):\n"
            f"    if {name!r} in path.name and mode[0] in 'wa':\n"
            "        raise OSError(errno.ENOSPC, 'No space left on device', str(path))\n"
            "    return opened(path, mode, *args, **more)\n"
            "pathlib.Path.open = full\n"
        )
        if is_pytest:
            args = ("-p", "full", "evalsuite", *RUN[1:], "-q")
            return suite.run(*args, program=("-m", "pytest"))
        code = "import sys, full; from evalsuite import cli; sys.exit(cli.main(sys.argv[1:]))"
        return suite.run(*RUN, program=("-c", code))

    def test_a_real_full_device(self) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full on this system")
        with (
            pytest.raises(OSError, match="No space") as caught,
            Path("/dev/full").open("w") as file,
        ):
            file.write("x" * 100_000)
        explained = os_faults.explain(caught.value)
        assert explained is not None
        assert explained[1] == 75

    def test_what_only_a_traceback_explains_stays_one(self) -> None:
        assert os_faults.explain(ConnectionResetError(errno.ECONNRESET, "reset")) is None
        assert os_faults.explain(FileNotFoundError(errno.ENOENT, "no file")) is None

    def test_the_reader_of_the_output_may_go_away(self, suite: Suite) -> None:
        for number in range(300):
            suite.add(f"job-{number}", suite.right())
        command = f"{sys.executable} -m evalsuite.cli ls --configs-root configs | head -1"
        done = subprocess.run(
            ["bash", "-c", command],
            env=suite.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.startswith("configs/s/config-cpu.txt (cpu, 301 jobs)")
        assert done.stderr == ""


PREPARING = """
import os, signal, sys, time
from evalsuite import cli, session
stage, number = sys.argv[1], int(sys.argv[2])
def end(*args, **options):
    os.kill(os.getpid(), number)
    time.sleep(5)
if stage == "prepare":
    session.prepare = end
if stage == "report":
    from evalsuite import run_folder
    run_folder.write_all = end
if stage == "jobs":
    from evalsuite.executors import local
    local.execute = end
sys.exit(cli.main(["run", "--configs-root", "configs", "--config", "config-cpu.txt"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["prepare", "jobs", "report"])
def test_a_signal_ends_the_run_with_2_at_every_stage(
    stage: str, number: signal.Signals, suite: Suite
) -> None:
    pids = suite.folder / "pids"
    suite.add("second", f"{suite.right()} --pids-file {pids}")
    done = subprocess.run(
        [sys.executable, "-c", PREPARING, stage, str(int(number))],
        cwd=suite.folder,
        env=suite.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "interrupted" in done.stderr
    assert not any(is_alive(pid) for pid in pids_in(pids))
    if stage == "report":
        # Every verdict was kept as it came: the run can be gone on with to its reports.
        resumed = suite.run("run", "--resume", suite.run_folder().name)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert set(statuses(suite.run_folder()).values()) == {"PASS"}
