"""`pytest evalsuite`: ids, phases, exit codes, and silence in other people's runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_helpers import REPOSITORY, Suite, is_alive, pids_in, statuses, wait_until

from evalsuite.plugin import names_evalsuite

CLONE = str(REPOSITORY / "evalsuite")


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    suite = Suite(tmp_path)
    yield suite
    pids = [pid for path in tmp_path.glob("*pids*") for pid in pids_in(path)]
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15.0)


def run_pytest(
    suite: Suite, *args: str, target: str = CLONE, plugins: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return suite.run(
        *plugins,
        *(target, "--configs-root", "configs", "-q", "-p", "no:cacheprovider"),
        *("--config", "config-cpu.txt", "--stop-grace", "0.5", *args),
        program=("-m", "pytest"),
    )


def test_pass_fail_error_and_skip_are_what_pytest_calls_them(suite: Suite) -> None:
    suite.add("right", suite.right())
    suite.add("wrong")
    suite.add("broken", "--exit-code 3 --say 'no weights'")
    suite.add("big", "-tp 2", pool="b200")
    done = run_pytest(suite, "--config", "config-b200.txt", "--junitxml", "own.xml")
    assert done.returncode == 1
    assert "1 failed, 1 passed, 1 skipped, 1 error" in done.stdout
    assert "FAILED" in done.stdout
    assert "test_accuracy[s/wrong]" in done.stdout
    assert "  | no weights" in done.stdout
    assert "reproduce: evalsuite run --config" in done.stdout
    assert "Captured" not in done.stdout
    folder = suite.run_folder()
    assert f"results: {folder}" in done.stdout
    assert statuses(folder) == {
        "s/right": "PASS",
        "s/wrong": "FAIL",
        "s/broken": "ERROR",
        "s/big": "SKIP",
    }
    own = {
        case.get("name"): [child.tag for child in case]
        for case in ElementTree.parse(suite.folder / "own.xml").iter("testcase")
    }
    assert own == {
        "test_accuracy[s/right]": [],
        "test_accuracy[s/wrong]": ["failure"],
        "test_accuracy[s/broken]": ["error"],
        "test_accuracy[s/big]": ["skipped"],
    }


def test_exit_codes_without_a_low_score(suite: Suite) -> None:
    suite.add("right", suite.right())
    suite.add("broken", "--exit-code 3")
    assert run_pytest(suite).returncode == 75
    suite.add("big", "-tp 2", pool="b200")
    assert run_pytest(suite, "-k", "right").returncode == 0
    only_skips = suite.run(
        *(CLONE, "--configs-root", "configs", "--config", "config-b200.txt"),
        program=("-m", "pytest"),
    )
    assert only_skips.returncode == 5
    nobody = run_pytest(suite, "-k", "rihgt")
    assert nobody.returncode == 5
    assert "no job matches -k 'rihgt'; did you mean 's/right'?" in nobody.stdout


def test_a_fault_of_the_suite_itself_is_never_green(suite: Suite) -> None:
    suite.add("right", suite.right())
    (suite.folder / "broken_suite.py").write_text(
        "from evalsuite import pipeline\n"
        "def run(*_): raise RuntimeError('the suite is broken')\n"
        "pipeline.run = run\n"
    )
    done = run_pytest(suite, plugins=("-p", "broken_suite"))
    assert "RuntimeError: the suite is broken" in done.stdout
    assert done.returncode == 3


def test_results_that_cannot_be_written_are_found_before_anything_starts(suite: Suite) -> None:
    pids = suite.folder / "pids"
    suite.add("right", f"{suite.right()} --pids-file {pids}")
    suite.results.write_text("a file where the folder should be")
    for done in (run_pytest(suite), suite.run("run", "right", "--configs-root", "configs")):
        assert done.returncode == 4
        assert "results is no folder; name another folder by --results" in done.stderr
        assert "Traceback" not in done.stdout + done.stderr
    assert not pids.exists()


def test_usage_errors_come_first_all_at_once(suite: Suite) -> None:
    pids = suite.folder / "pids"
    suite.add("right", f"--pids-file {pids}")
    (suite.root / "s" / "bad.yaml").write_text("model_name: x\nnum_qestions: 3\n")
    with (suite.root / "s" / "config-cpu.txt").open("a") as file:
        file.write("bad.yaml\nmissing.yaml\n")
    done = run_pytest(suite)
    assert done.returncode == 4
    told = done.stdout + done.stderr
    assert "num_qestions" in told
    assert "did you mean" in told
    assert "missing.yaml" in told
    assert "Traceback" not in told
    assert not pids.exists()
    nothing = suite.run(CLONE, program=("-m", "pytest"))
    assert nothing.returncode == 4
    assert "no --config given" in nothing.stderr


def test_collect_only_and_dry_run_start_nothing(suite: Suite) -> None:
    pids = suite.folder / "pids"
    suite.add("a", f"{suite.right()} --pids-file {pids}")
    suite.add("b", f"{suite.right()} --pids-file {pids}")
    collected = run_pytest(suite, "--collect-only")
    assert collected.returncode == 0
    assert "test_accuracy[s/a]" in collected.stdout
    assert "test_accuracy[s/b]" in collected.stdout
    assert run_pytest(suite, "--dry-run").returncode == 0
    assert not pids.exists()
    assert not suite.results.exists()


def test_other_tests_may_be_beside_the_jobs(suite: Suite) -> None:
    suite.add("right", suite.right())
    (suite.folder / "test_other.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.parametrize('job', [1, 2])\n"
        "def test_job(job): assert job\n\n"
        "@pytest.mark.parametrize('x', [1])\n"
        "def test_x(x): assert x\n"
    )
    done = run_pytest(suite, "test_other.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    asked = json.loads((suite.run_folder() / "run.json").read_text())["asked"]
    assert asked["only"] == []


def test_stop_at_first_failure_and_limit(suite: Suite) -> None:
    pids, count = suite.folder / "pids", suite.folder / "count"
    suite.add("wrong", f"--count-file {count}")
    suite.add("right", f"{suite.right()} --pids-file {pids}")
    done = run_pytest(suite, "-x", "--limit", "4")
    # pytest's own code for "stopped"; the verdicts' code says why.
    assert done.returncode == 1
    assert len(count.read_text()) == 4
    assert not pids.exists()


def test_works_from_a_clone_without_the_entry_point(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.add("right", suite.right())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    done = run_pytest(suite)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("target", ["--pyargs evalsuite", "evalsuite"])
def test_works_by_name_away_from_a_clone(suite: Suite, target: str) -> None:
    suite.add("right", suite.right())
    *flags, name = target.split()
    done = run_pytest(suite, target=name, plugins=tuple(flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_xdist_workers_share_one_run_folder(suite: Suite) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    suite.add("right", suite.right())
    suite.add("wrong")
    done = run_pytest(suite, "-n", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert statuses(suite.run_folder()) == {"s/right": "PASS", "s/wrong": "FAIL"}


def test_other_runs_see_nothing_of_it(tmp_path: Path, suite: Suite) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_it():\n    assert True\n")
    theirs = suite.run("test_theirs.py", "-q", program=("-m", "pytest"))
    assert theirs.returncode == 0
    assert "evalsuite:" not in theirs.stdout
    named = suite.run("test_theirs.py", "-k", "evalsuite", "--help", program=("-m", "pytest"))
    assert "--base-url" not in named.stdout
    helped = suite.run("--help", program=("-m", "pytest"))
    assert "--base-url" not in helped.stdout
    refused = suite.run("test_theirs.py", "--base-url", "x", program=("-m", "pytest"))
    assert refused.returncode == 4
    ours = suite.run(CLONE, "--help", program=("-m", "pytest"))
    assert ours.returncode == 0
    assert "--base-url" in ours.stdout


def test_naming_evalsuite(tmp_path: Path) -> None:
    (tmp_path / "evalsuite").mkdir()
    assert not names_evalsuite(["evalsuite"], tmp_path), "somebody else's folder of that name"
    assert not names_evalsuite(["tests", "evals", "evalsuite.txt"], REPOSITORY)
    assert not names_evalsuite(["."], REPOSITORY)
    assert names_evalsuite(["evalsuite"], REPOSITORY)
    assert names_evalsuite(["evalsuite/"], REPOSITORY)
    assert names_evalsuite([f"{CLONE}/test_accuracy.py::test_accuracy[s/a]"], tmp_path)
    assert names_evalsuite(["evalsuite"], tmp_path.parent)
    assert names_evalsuite(["evalsuite.test_accuracy"], tmp_path.parent, is_pyargs=True)


def test_interrupt_leaves_nothing_and_says_so(suite: Suite) -> None:
    import signal
    import sys

    pids = suite.folder / "pids"
    suite.add("job", f"{suite.right()} --pids-file {pids} --delay-s 0.1", max_concurrency=1)
    suite.add("wrong")
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", CLONE),
            *("--configs-root", "configs", "--config", "config-cpu.txt", "-k", "job"),
        ],
        cwd=suite.folder,
        env=suite.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: bool(pids_in(pids)) and bool(list(suite.results.rglob("ledger*"))), 30)
        run.send_signal(signal.SIGTERM)
        told, _ = run.communicate(timeout=20)
        assert run.returncode == 2
    finally:
        run.kill()
    assert not any(is_alive(pid) for pid in pids_in(pids))
    folder = suite.run_folder()
    assert f"interrupted; go on with: evalsuite run --resume {folder}" in told
    # What `-k` left out is not run when the rest is gone on with.
    resumed = suite.run("run", "--resume", str(folder), timeout_s=60)
    assert resumed.returncode == 0, resumed.stdout
    assert statuses(folder) == {"s/job": "PASS"}
