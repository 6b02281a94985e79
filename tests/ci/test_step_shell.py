"""The shell text of rendered steps, run by bash: exit codes, logs, retries, signals, limits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ci_helpers import rendered, scripts, write_configs

from evalsuite.ci.plan import PlanRequest

PROVIDERS = ("buildkite", "github")
# Plain bash, Buildkite's agent, GitHub's `shell: bash`.
SHELLS = (["bash"], ["bash", "-e"], ["bash", "--noprofile", "--norc", "-eo", "pipefail"])
FAKE = """\
#!/bin/bash
echo "evalsuite $*" >> calls
echo "said on stdout"
echo "said on stderr" >&2
{body}
"""
# A run that goes on until it is ended.
WAIT = "[ $1 = run ] && { sleep 60 > /dev/null 2>&1 & touch up; wait; }"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory whose `evalsuite`, `python3` and `.venv` are the test's own."""
    work = tmp_path / "work"
    for name in ("bin", ".venv/bin"):
        (work / name).mkdir(parents=True)
    executable(work / "bin" / "python3", "#!/bin/bash\nexit 0\n")
    executable(work / ".venv" / "bin" / "python", "#!/bin/bash\nexit 0\n")
    return work


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def fake_suite(folder: Path, body: str) -> None:
    executable(folder / "bin" / "evalsuite", FAKE.format(body=body))


def script_of(provider: str, tmp_path: Path, **options: object) -> str:
    root = write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a"]})
    document = rendered(provider, PlanRequest(root=root, **options))  # type: ignore[arg-type]
    return scripts(provider, document)["eval-h100"]


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}


def run(folder: Path, script: str, shell: list[str]) -> subprocess.CompletedProcess[str]:
    path = folder / "step.sh"
    path.write_text(script)
    return subprocess.run(
        [*shell, str(path)],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: " ".join(shell[:2]))
@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_exit_code_survives_and_the_log_is_kept(
    provider: str, shell: list[str], folder: Path, tmp_path: Path
) -> None:
    script = script_of(provider, tmp_path)
    for status in (0, 1, 2, 3, 4, 5, 75, 76, 130):
        for old in (folder / "results").glob("*.log"):
            old.unlink()
        fake_suite(folder, f"exit {status}")
        done = run(folder, script, shell)
        assert done.returncode == status, done.stderr
        log = (folder / "results" / "eval-h100.log").read_text()
        assert "said on stdout\n" in log
        assert "said on stderr\n" in log
        assert "said on stdout\n" in done.stdout


@pytest.mark.parametrize(("status", "num_runs"), [(75, 2), (1, 1), (4, 1), (76, 1), (130, 1)])
def test_github_repeats_an_infrastructure_error_and_nothing_else(
    status: int, num_runs: int, folder: Path, tmp_path: Path
) -> None:
    fake_suite(folder, f"exit {status}")
    done = run(folder, script_of("github", tmp_path), ["bash", "-e"])
    assert done.returncode == status
    assert (folder / "calls").read_text().count("evalsuite run") == num_runs
    assert ("attempt 1 ended in an infrastructure error" in done.stdout) == (status == 75)


def test_a_second_attempt_that_passes_is_a_pass_and_both_are_in_the_log(
    folder: Path, tmp_path: Path
) -> None:
    fake_suite(folder, "[ -e been ] && exit 0; touch been; exit 75")
    done = run(folder, script_of("github", tmp_path), ["bash"])
    assert done.returncode == 0
    assert (folder / "results" / "eval-h100.log").read_text().count("said on stdout") == 2


@pytest.mark.parametrize("status", [0, 1, 3, 4, 5, 75, 76])
def test_soft_failure_is_of_the_accuracy_code_only(
    status: int, folder: Path, tmp_path: Path
) -> None:
    fake_suite(folder, f"exit {status}")
    done = run(folder, script_of("github", tmp_path, is_accuracy_soft=True), ["bash", "-e"])
    assert done.returncode == (0 if status == 1 else status)
    assert ("::warning::soft failure, exit status 1" in done.stdout) == (status == 1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_failed_installation_is_no_accuracy_failure(
    provider: str, folder: Path, tmp_path: Path
) -> None:
    executable(folder / ".venv" / "bin" / "python", "#!/bin/bash\nexit 1\n")
    fake_suite(folder, "exit 0")
    assert run(folder, script_of(provider, tmp_path), ["bash", "-e"]).returncode == 75
    assert not (folder / "calls").exists()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_suite_is_ended_by_its_own_limit_and_cleans_up(
    provider: str, folder: Path, tmp_path: Path
) -> None:
    fake_suite(folder, "trap 'kill $!; echo stopped the server; exit 2' TERM\n" + WAIT)
    # The clock of the step stands just before its limits (setup 900 s, run 3660 s; twice that
    # where there are two attempts, of which the first is meant).
    script = "SECONDS=4559\n" + script_of(provider, tmp_path)
    done = run(folder, script, ["bash", "-e"])
    assert done.returncode == 124
    log = (folder / "results" / "eval-h100.log").read_text()
    assert "stopped the server" in log
    assert "ended by its own limit of 3660 s" in log


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_cancelled_step_lets_the_suite_finish_and_keeps_its_last_lines(
    provider: str, folder: Path, tmp_path: Path
) -> None:
    fake_suite(folder, "trap 'kill $!; sleep 0.3; echo cleaned up; exit 130' TERM\n" + WAIT)
    (folder / "step.sh").write_text(script_of(provider, tmp_path))
    process = subprocess.Popen(
        ["bash", "-e", "step.sh"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not (folder / "up").exists():
            assert time.monotonic() < deadline, "the step did not start the suite"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=30) == 130
        assert "cleaned up" in (folder / "results" / "eval-h100.log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_buildkite_shows_the_summary_and_still_ends_with_the_suites_status(
    folder: Path, tmp_path: Path
) -> None:
    executable(folder / "bin" / "buildkite-agent", '#!/bin/bash\necho "$*" > how; cat > shown\n')
    fake_suite(folder, "mkdir -p results/r1; echo '| job |' > results/r1/summary.md; exit 1")
    done = run(folder, script_of("buildkite", tmp_path), ["bash", "-e"])
    assert done.returncode == 1
    assert (folder / "shown").read_text() == "| job |\n"
    assert (folder / "how").read_text() == "annotate --context eval-h100\n"


def test_githubs_summary_is_written_after_a_failure_and_its_absence_is_none(
    folder: Path, tmp_path: Path
) -> None:
    root = write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a"]})
    steps = rendered("github", PlanRequest(root=root))["jobs"]["eval-h100"]["steps"]
    (summary,) = (step for step in steps if step.get("name") == "Summary")
    (upload,) = (step for step in steps if "upload-artifact" in step.get("uses", ""))
    assert summary["if"] == upload["if"] == "always()"
    script = f"export GITHUB_STEP_SUMMARY=out.md\n{summary['run']}"
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
    assert run(folder, script, shell).returncode == 0
    (folder / "results" / "r1").mkdir(parents=True)
    (folder / "results" / "r1" / "summary.md").write_text("| FAIL |\n")
    assert run(folder, script, shell).returncode == 0
    assert (folder / "out.md").read_text() == "| FAIL |\n"


@pytest.mark.parametrize(
    ("results", "status"),
    [("success success", 0), ("success failure", 1), ("success cancelled", 1), ("skipped", 1)],
)
def test_the_one_required_check_is_red_where_a_job_failed_or_never_ran(
    results: str, status: int, folder: Path, tmp_path: Path
) -> None:
    root = write_configs(tmp_path / "configs", {"suite/config-h100.txt": ["a"]})
    document = rendered("github", PlanRequest(root=root))
    job = document["jobs"]["all"]
    assert job["if"] == "always()"
    assert job["needs"] == [key for key in document["jobs"] if key != "all"]
    script = f"RESULTS='{results}'\n{job['steps'][0]['run']}"
    assert run(folder, script, ["bash", "-e"]).returncode == status
