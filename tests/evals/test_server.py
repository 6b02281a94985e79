"""Life of a server: start, readiness, death, log, stop; against scripted child processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import is_alive, pids_in, wait_until

from evalsuite.engines.base import LaunchSpec
from evalsuite.errors import ServerError
from evalsuite.readiness import get
from evalsuite.server import RunningServer, StartSettings, start

STUB = Path(__file__).with_name("stub_servers.py")
PORT_FILE = ("--port", "0", "--port-file", "{port_file}")
PORT = ("--port", "{port}")

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="process trees are read from /proc"
)


def spec(*options: str, port_args: tuple[str, ...] = PORT_FILE) -> LaunchSpec:
    return LaunchSpec(
        argv=(sys.executable, str(STUB), *options), served_model="stub", port_args=port_args
    )


def settings(tmp_path: Path, limit_s: float = 20.0, **more: object) -> StartSettings:
    return StartSettings(tmp_path / "server.log", limit_s, dict(os.environ), **more)  # type: ignore[arg-type]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with start(spec(), settings(tmp_path)) as running:
        yield running


@pytest.mark.parametrize("port_args", [PORT_FILE, PORT], ids=["child-binds", "reserved"])
def test_starts_serves_and_leaves_nothing(tmp_path: Path, port_args: tuple[str, ...]) -> None:
    with start(spec(port_args=port_args), settings(tmp_path)) as running:
        assert get(running.base_url, "/health")[0] == 200
        pid = running.leash.pid  # type: ignore[union-attr]
        assert is_alive(pid)
        assert 0 < running.startup_s < 10
    assert not is_alive(pid)
    assert running.leash.gone.is_set()  # type: ignore[union-attr]


@pytest.mark.parametrize("code", [1, 0, 7])
def test_death_at_start_names_code_and_last_lines(tmp_path: Path, code: int) -> None:
    with pytest.raises(ServerError) as caught:
        start(spec("--say", "no such weights", "--exit-code", str(code)), settings(tmp_path))
    # Counted from the server's last words, 0.3 s before its end: a busy machine starts it late.
    assert time.time() - (tmp_path / "server.log").stat().st_mtime < 2.0
    assert caught.value.exit_code == code
    assert caught.value.log_tail == ["no such weights"]
    assert str(STUB) in caught.value.command


def test_missing_program_is_a_server_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot run the server: FileNotFoundError"):
        start(LaunchSpec(argv=("no-such-program",), served_model="x"), settings(tmp_path))


def test_never_listening_fails_at_the_limit(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"startup_max_wait_seconds 1\.5") as caught:
        start(spec("--never-listen", "--pids-file", str(pids)), settings(tmp_path, 1.5))
    assert 1.5 <= time.monotonic() - began < 3.5
    assert "nothing listens" in caught.value.reason or "not listening" in caught.value.reason
    assert not any(is_alive(pid) for pid in pids_in(pids))


def test_503_then_200_runs(tmp_path: Path) -> None:
    seen: list[str] = []
    with start(
        spec("--unhealthy-s", "1.0"), settings(tmp_path, on_wait=lambda _, text: seen.append(text))
    ) as running:
        assert running.startup_s >= 0.9
    assert any("CPU time" in text for text in seen)


def test_daemonised_parent_is_an_error_and_its_child_ends(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(ServerError, match="stay in the foreground") as caught:
        start(spec("--daemonise", "--pids-file", str(pids), "--ignore-term"), settings(tmp_path))
    assert caught.value.exit_code == 0
    assert pids_in(pids)
    assert not any(is_alive(pid) for pid in pids_in(pids))


def test_another_model_is_never_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="serves other, not stub"):
        start(spec("--model", "other"), settings(tmp_path))


def test_foreign_server_on_the_port_is_never_evaluated(tmp_path: Path) -> None:
    with start(spec(), settings(tmp_path / "first")) as foreign:
        port = foreign.base_url.rpartition(":")[2]
        with pytest.raises(ServerError, match="in use by a process we did not start"):
            # Lists the right model, but the port is not ours: the child never binds it.
            start(
                spec("--never-listen", port_args=("--port", port, "--port-file", "{port_file}")),
                _with_port(settings(tmp_path / "second"), port),
            )
        with pytest.raises(ServerError) as caught:
            start(spec(port_args=("--port", port)), settings(tmp_path / "third", 5.0))
    assert any("ddress already in use" in line for line in caught.value.log_tail)


def _with_port(start_settings: StartSettings, port: str) -> StartSettings:
    """The port file appears at once, as if the child had claimed the foreign port."""
    path = start_settings.log_path.with_suffix(".port")
    path.parent.mkdir(parents=True)
    threading.Timer(0.3, lambda: path.write_text(f'{{"port": {port}}}')).start()
    return start_settings


def test_two_servers_at_once_and_again_at_once(tmp_path: Path) -> None:
    with start(spec(port_args=PORT), settings(tmp_path / "a")) as a:
        with start(spec(port_args=PORT), settings(tmp_path / "b")) as b:
            assert a.base_url != b.base_url
        port = b.base_url.rpartition(":")[2]
        # The port of a server that has just ended binds again at once.
        with start(
            spec(port_args=("--port", port, "--port-file", "{port_file}")), settings(tmp_path / "c")
        ) as c:
            assert c.base_url == b.base_url


def test_grandchildren_in_their_own_session_end_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with start(
        spec("--grandchildren", "2", "--pids-file", str(pids), "--ignore-term"),
        settings(tmp_path, grace_s=0.5),
    ):
        wait_until(lambda: len(pids_in(pids)) == 3)
        assert all(is_alive(pid) for pid in pids_in(pids))
    assert not any(is_alive(pid) for pid in pids_in(pids))


def test_failed_start_leaves_no_grandchildren(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(ServerError, match="not ready within"):
        start(
            spec("--grandchildren", "2", "--pids-file", str(pids), "--never-listen"),
            settings(tmp_path, 1.5, grace_s=0.5),
        )
    assert len(pids_in(pids)) == 3
    assert not any(is_alive(pid) for pid in pids_in(pids))


def test_death_while_serving_is_noticed_within_a_second(tmp_path: Path) -> None:
    ended = threading.Event()
    with start(spec(), settings(tmp_path)) as running:
        leash = running.leash
        assert leash is not None
        leash.on_end = ended.set
        os.kill(leash.pid, signal.SIGKILL)
        assert ended.wait(1.0)
        assert not running.is_alive
        error = running.died("evaluation")
        assert error.exit_code == -9
        assert "by signal 9" in error.reason


def test_log_flood_does_not_block(tmp_path: Path) -> None:
    options = ("--flood-bytes", str(10 * 2**20), "--line-bytes", str(50 * 2**20), "--bad-bytes")
    with start(spec(*options), settings(tmp_path)) as running:
        assert (tmp_path / "server.log").stat().st_size > 60 * 2**20 - 100
        tail = running.log_tail()
    assert tail[-1] == "\ufffd\ufffd bad red  bytes"
    assert all(len(line) < 600 for line in tail)
    assert "\x1b" not in running.log_text()


def test_log_is_capped_with_head_and_tail_kept(tmp_path: Path) -> None:
    options = ("--say", "the head", "--flood-bytes", str(12 * 2**20), "--bad-bytes")
    with start(spec(*options), settings(tmp_path, log_limit_bytes=2**20)) as running:
        log = tmp_path / "server.log"
        wait_until(lambda: log.stat().st_size < 2**20)
        assert log.read_bytes().startswith(b"the head")
        assert b"bytes of log dropped here" in log.read_bytes()
        assert running.log_tail()[-1].endswith("bad red  bytes")


def test_secrets_are_masked_and_inherited(tmp_path: Path) -> None:
    environ = {**os.environ, "HF_TOKEN": "hf_abcdefgh", "http_proxy": "http://u:hunter22@p:1"}
    launch = spec("--say", "token hf_abcdefgh and hunter22", "--exit-code", "3")
    with pytest.raises(ServerError) as caught:
        start(launch, StartSettings(tmp_path / "server.log", 5.0, environ))
    assert caught.value.log_tail == ["token *** and ***"]
    assert "hf_abcdefgh" not in str(caught.value)
    assert b"hf_abcdefgh" not in (tmp_path / "server.log").read_bytes()


SUITE = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from evalsuite.engines.base import LaunchSpec
    from evalsuite.server import StartSettings, start
    stub, out, *options = sys.argv[1:]
    launch = LaunchSpec((sys.executable, stub, *options), served_model="stub",
                        port_args=("--port", "0", "--port-file", "{port_file}"))
    try:
        with start(launch, StartSettings(Path(out) / "server.log", 60, dict(os.environ), 0.5)):
            Path(out, "ready").touch()
            time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(2)
    """
)


@pytest.mark.parametrize(
    ("signals", "during"),
    [
        ((signal.SIGKILL,), "ready"),
        ((signal.SIGTERM,), "ready"),
        ((signal.SIGINT,), "ready"),
        ((signal.SIGINT, signal.SIGINT), "ready"),
        ((signal.SIGINT,), "start"),
        ((signal.SIGKILL,), "start"),
    ],
)
def test_nothing_outlives_the_suite(tmp_path: Path, signals: tuple[int, ...], during: str) -> None:
    pids = tmp_path / "pids"
    options = ["--grandchildren", "1", "--pids-file", str(pids), "--ignore-term"]
    options += ["--never-listen"] if during == "start" else []
    suite = subprocess.Popen([sys.executable, "-c", SUITE, str(STUB), str(tmp_path), *options])
    try:
        wait_until(lambda: len(pids_in(pids)) == 2)
        if during == "ready":
            wait_until(lambda: (tmp_path / "ready").exists())
        for number in signals:
            suite.send_signal(number)
            time.sleep(0.1)
        suite.wait(10)
        wait_until(lambda: not any(is_alive(pid) for pid in pids_in(pids)), 6.0)
    finally:
        suite.kill()
        suite.wait()
    assert suite.returncode in (2, -signals[-1], 1)


def test_killed_supervisor_takes_its_server_along(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    options = ("--grandchildren", "1", "--pids-file", str(pids))
    with start(spec(*options), settings(tmp_path)) as running:
        wait_until(lambda: len(pids_in(pids)) == 2)
        leash = running.leash
        assert leash is not None
        supervisor = leash._supervisor
        assert supervisor is not None
        supervisor.kill()
        assert leash.gone.wait(5.0)
        assert not any(is_alive(pid) for pid in pids_in(pids))


def test_reserved_port_is_not_given_to_others(tmp_path: Path) -> None:
    from contextlib import ExitStack

    from evalsuite.launching import hold_port

    with ExitStack() as stack:
        held = hold_port(stack)
        others = [stack.enter_context(socket.socket()) for _ in range(200)]
        for other in others:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
        assert held not in {other.getsockname()[1] for other in others}
