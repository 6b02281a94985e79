"""What a ready server says of itself before the first question: its backend, and its build."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import Action, FakeServer
from run_helpers import NUM_QUESTIONS, STUB, Suite

from evalsuite import session
from evalsuite.engines.base import LaunchSpec
from evalsuite.executors import local
from evalsuite.progress import PlainDisplay
from evalsuite.run_folder import RunFolder
from evalsuite.server import StartSettings, start
from evalsuite.server_build import resumed_note, server_build
from evalsuite.verdict import Status, Verdict

KEY = "the-key"
CUTLASS = {
    "moe": {
        "backend": "flashinfer_cutlass",
        "ranges": [{"max_tokens": 1 << 30, "backend": "flashinfer_cutlass"}],
        "requested": "auto",
        "reason": "the first that can serve",
        "rejected": {"triton": "no Triton here"},
    }
}
SEEN = {
    "num_moe_layers": 1,
    "ranks": [
        {
            "rank": 0,
            "prefill": {"num_tokens": 9, "counts": {"MoeFCGemm": 2}},
            "decode": {"num_tokens": 1, "counts": {"MoeFCGemm": 2}},
        }
    ],
}


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    suite = Suite(tmp_path)
    monkeypatch.setenv("PATH", suite.environ["PATH"])
    return suite


@pytest.fixture
def routes(suite: Suite) -> Path:
    path = suite.folder / "routes.json"
    path.write_text("{}")
    return path


@pytest.fixture
def url(suite: Suite, routes: Path) -> Iterator[str]:
    """A server that runs already and counts its questions in `count`."""
    argv = (sys.executable, str(STUB), "--answers", str(suite.answers), "--routes", str(routes))
    count = ("--count-file", str(suite.folder / "count"), "--api-key", KEY)
    ports = ("--port", "0", "--port-file", "{port_file}")
    spec = LaunchSpec((*argv, *count), served_model="stub", port_args=ports)
    with start(spec, StartSettings(suite.folder / "log", 30, dict(os.environ), 0.5)) as server:
        yield server.base_url


def asked(suite: Suite) -> int:
    count = suite.folder / "count"
    return len(count.read_text()) if count.exists() else 0


def execute(suite: Suite, url: str) -> Verdict:
    request = session.RunRequest(configs=("config-cpu.txt",), root=str(suite.root), base_url=url)
    prepared = session.prepare(request, {**suite.environ, "OPENAI_API_KEY": KEY})
    folder = RunFolder(suite.results / "run")
    folder.begin(request.to_json())
    (verdict,) = local.execute(prepared.jobs, prepared.options, folder, PlainDisplay(print))
    return verdict


class TestBackend:
    @pytest.mark.parametrize("level", ["logged", "executed"])
    def test_another_one_ends_the_job_before_the_first_question(
        self, suite: Suite, routes: Path, url: str, level: str
    ) -> None:
        routes.write_text(json.dumps({"/v1/backends": CUTLASS, "/v1/evidence": SEEN}))
        suite.add("one", expect_backend={"name": "triton", "level": level}, engine="external")
        verdict = execute(suite, url)
        assert verdict.status is Status.ERROR
        assert verdict.reason.startswith(
            f"expect_backend names 'triton' and {level} is 'flashinfer_cutlass' "
        )
        assert "triton was refused: no Triton here" in verdict.reason
        assert verdict.result is None
        assert asked(suite) == 0

    def test_one_that_is_only_declared_ends_it_too(
        self, suite: Suite, routes: Path, url: str
    ) -> None:
        routes.write_text(json.dumps({"/v1/backends": CUTLASS}))
        suite.add("one", "--moe-backend triton", engine="external")
        verdict = execute(suite, url)
        assert "'triton' was declared and logged is 'flashinfer_cutlass'" in verdict.reason
        assert (verdict.status, asked(suite)) == (Status.ERROR, 0)

    @pytest.mark.parametrize("level", ["logged", "executed"])
    def test_the_right_one_is_asked_everything_and_proved_at_the_end(
        self, suite: Suite, routes: Path, url: str, level: str
    ) -> None:
        routes.write_text(json.dumps({"/v1/backends": CUTLASS, "/v1/evidence": SEEN}))
        expected = {"name": "flashinfer_cutlass", "level": level}
        suite.add("one", expect_backend=expected, engine="external")
        verdict = execute(suite, url)
        assert (verdict.status, asked(suite)) == (Status.PASS, NUM_QUESTIONS)
        assert verdict.evidence.executed == ("flashinfer_cutlass" if level == "executed" else "")

    def test_a_server_that_cannot_say_is_asked_everything_first(
        self, suite: Suite, url: str
    ) -> None:
        suite.add("one", expect_backend={"name": "triton", "level": "logged"}, engine="external")
        verdict = execute(suite, url)
        assert (verdict.status, asked(suite)) == (Status.ERROR, NUM_QUESTIONS)
        assert "level 'logged' and it is not known" in verdict.reason
        assert verdict.reason.endswith("; /v1/backends answers 404")

    @pytest.mark.parametrize(
        "command",
        [("calibrate", "one", "--repeats", "2"), ("baseline", "save", "one", "--repeats", "2")],
    )
    def test_what_is_no_run_measures_no_other_one_either(
        self, suite: Suite, command: tuple[str, ...]
    ) -> None:
        said = "Using TRITON Unquantized MoE backend out of potential backends: ['TRITON']."
        count = suite.folder / "count"
        args = f"{suite.right()} --count-file {count} --say {shlex.quote(said)}"
        suite.add("one", args, expect_backend="flashinfer_cutlass")
        done = suite.run(*command, "--configs-root", "configs")
        assert done.returncode == 75, done.stdout + done.stderr
        assert "expect_backend names 'flashinfer_cutlass' and logged is 'TRITON'" in done.stderr
        assert not count.exists()


class TestResume:
    def interrupted(self, suite: Suite, routes: Path, build: object) -> str:
        """A run that was left with ten questions to ask; the name of its folder."""
        routes.write_text(json.dumps(build))
        args = f"{suite.right()} --routes {routes} --count-file {suite.folder / 'count'}"
        suite.add("one", args)
        first = suite.run("run", "--configs-root", "configs", "--config", "config-cpu.txt")
        assert first.returncode == 0, first.stdout
        folder = suite.run_folder()
        job = folder / "jobs" / "s__one"
        (job / "verdict.json").unlink()
        lines = (job / "ledger.jsonl").read_text().splitlines(keepends=True)
        (job / "ledger.jsonl").write_text("".join(lines[:-10]))
        return folder.name

    @pytest.mark.parametrize(
        ("before", "now"),
        [
            ({"version": "1", "source": "aa"}, {"version": "1", "source": "bb"}),
            ({"version": "0.11.0"}, {"version": "0.11.1"}),
        ],
    )
    def test_a_rebuilt_server_adds_nothing_to_the_answers_of_the_old_one(
        self, suite: Suite, routes: Path, before: object, now: object
    ) -> None:
        name = self.interrupted(suite, routes, {"/version": before})
        routes.write_text(json.dumps({"/version": now}))
        resumed = suite.run("run", "--resume", name)
        assert resumed.returncode == 4, resumed.stdout
        told = " ".join(resumed.stdout.split())
        assert "holds answers of another build: the server had 'version" in told
        assert "evalsuite rerun RUN" in told
        assert asked(suite) == NUM_QUESTIONS
        again = suite.run("rerun", name)
        assert again.returncode == 0, again.stdout
        assert asked(suite) == 2 * NUM_QUESTIONS

    def test_a_job_that_an_earlier_build_has_decided_says_so_beside_the_others(
        self, suite: Suite, routes: Path
    ) -> None:
        suite.add("decided", f"{suite.right()} --routes {routes}")
        name = self.interrupted(suite, routes, {"/version": {"version": "1"}})
        shutil.rmtree(suite.results / name / "jobs" / "s__one")
        routes.write_text(json.dumps({"/version": {"version": "2"}}))
        resumed = suite.run("run", "--resume", name)
        assert resumed.returncode == 0, resumed.stdout
        told = " ".join(resumed.stdout.split())
        assert "s/decided: note: decided before the run was resumed, by another build" in told
        assert "(version 1; now version 2)" in told
        assert "s/one: note: decided before" not in told

    @pytest.mark.parametrize(
        ("before", "remark"),
        [
            ({"version": "1", "source": "aa"}, "by the same build of the server (version 1"),
            ({}, "nothing says whether the server was rebuilt since"),
        ],
    )
    def test_what_is_the_same_or_unknown_goes_on_with_a_remark(
        self, suite: Suite, routes: Path, before: object, remark: str
    ) -> None:
        name = self.interrupted(suite, routes, {"/version": before})
        routes.write_text(json.dumps({"/version": {"version": "1", "source": "aa"}}))
        resumed = suite.run("run", "--resume", name)
        assert resumed.returncode == 0, resumed.stdout
        told = " ".join(resumed.stdout.split())
        assert f"{NUM_QUESTIONS - 10} answers are from before the run was resumed" in told
        assert remark in told
        assert asked(suite) == NUM_QUESTIONS + 10


@pytest.mark.parametrize(
    ("before", "now", "end"),
    [
        ("", "", "; nothing says whether the server was rebuilt since"),
        ("version 1", "", "; nothing says whether the server was rebuilt since"),
        ("version 1", "version 1", ", by a server that said version 1, too; a rebuild need not "),
        ("version 1, source a", "version 1, source a", ", by the same build of the server (vers"),
    ],
)
def test_the_remark_claims_no_more_than_is_known(before: str, now: str, end: str) -> None:
    assert resumed_note(3, before, now).startswith(
        f"3 answers are from before the run was resumed{end}"
    )


@pytest.mark.parametrize(
    "body", [[], "x", {}, {"version": 3}, {"version": "a\nb"}, {"version": "9" * 101}]
)
def test_a_version_that_is_none_is_unknown(routes: Path, url: str, body: object) -> None:
    routes.write_text(json.dumps({"/version": body}))
    assert server_build(url) == ""
    routes.write_text(json.dumps({"/version": {"version": "9", "source": "f", "more": "x"}}))
    assert server_build(url) == "version 9, source f"


def test_a_server_that_is_gone_says_nothing() -> None:
    with FakeServer(lambda request: Action()) as server:
        url = server.url
    assert server_build(url) == ""
