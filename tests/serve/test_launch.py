"""The server as a process: port file, signals, exit status, an engine that dies or never loads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from moeserve.tiny import model_dir

SUPPORT = Path(__file__).parents[1] / "support"
# The model is the packaged one for its tokenizer; the engine is scripted: tokens of 10 ms.
SCRIPT = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from fake_engine import INFO, FakeEngine
from moeserve.args import parse
from moeserve.errors import Unsupported
from moeserve.server.launch import serve
mode = sys.argv[2]
async def start(config):
    if mode == "unsupported":
        raise Unsupported("no such architecture")
    if mode == "slow":
        await asyncio.sleep(60)
    info = replace(INFO, vocab_size=1024)
    engine = FakeEngine(respond=lambda request: [65] * 2000, step_s=0.01, info=info)
    engine.stopping = asyncio.Event()
    if mode == "dies":
        asyncio.get_running_loop().call_later(0.2, setattr, engine, "is_alive_now", False)
    return engine
sys.exit(serve(parse(sys.argv[3:]), start))
"""


class Running:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def wait_healthy(self) -> None:
        end = time.monotonic() + 60
        while httpx.get(f"{self.url}/health", timeout=30).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.02)

    def exit_status(self, limit_s: float = 60) -> int:
        return self.process.wait(limit_s)


@contextmanager
def running(
    tmp_path: Path, mode: str, *options: str, file_limits: tuple[int, int] | None = None
) -> Iterator[Running]:
    port_file = tmp_path / "port.json"
    argv = [sys.executable, "-c", SCRIPT, str(SUPPORT), mode, str(model_dir())]
    argv += ["--port", "0", "--port-file", str(port_file), *options]
    if file_limits is not None:
        limit = "ulimit -Sn {} && ulimit -Hn {}".format(*file_limits)
        argv = ["bash", "-c", f'{limit} && exec "$@"', "bash", *argv]
    process = subprocess.Popen(
        argv, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ}
    )
    try:
        end = time.monotonic() + 60
        while not port_file.exists() and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        port = json.loads(port_file.read_text())["port"]
        yield Running(process, f"http://127.0.0.1:{port}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# Half a second of answer, for a wait to its end; twenty where the end comes before it.
SHORT = {"prompt": "a", "max_tokens": 50, "stream": True}
LONG = {**SHORT, "max_tokens": 2000}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_requests_finish_within_the_grace_and_the_exit_is_0(tmp_path: Path, number) -> None:
    with running(tmp_path, "serves", "--shutdown-grace-s", "20") as server:
        server.wait_healthy()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=SHORT, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(number)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.exit_status() == 0


def test_within_the_grace_the_server_says_that_it_is_stopping(tmp_path: Path) -> None:
    with running(tmp_path, "serves", "--shutdown-grace-s", "20") as server:
        server.wait_healthy()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=30) as reply:
            lines = reply.iter_lines()  # kept: dropping it would close the connection
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 15
            while (health := httpx.get(f"{server.url}/health", timeout=30)).status_code == 200:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert (health.status_code, health.json()) == (503, {"status": "stopping"})
            refused = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert refused.headers["connection"] == "close"
            assert httpx.get(f"{server.url}/metrics", timeout=30).status_code == 200
            assert server.process.poll() is None


def test_beyond_the_grace_open_requests_get_an_error(tmp_path: Path) -> None:
    with running(tmp_path, "serves", "--shutdown-grace-s", "0.2") as server:
        server.wait_healthy()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert "stopping" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert server.exit_status() == 0


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "serves", "--shutdown-grace-s", "60") as server:
        server.wait_healthy()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=30) as reply:
            lines = reply.iter_lines()  # kept: dropping it would close the connection
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.exit_status() == 0
            assert time.monotonic() - start < 10


def test_signal_while_loading_ends_with_0_and_health_was_503(tmp_path: Path) -> None:
    with running(tmp_path, "slow") as server:
        reply = httpx.get(f"{server.url}/health", timeout=30)
        assert (reply.status_code, reply.json()) == (503, {"status": "loading"})
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0


def test_model_that_cannot_be_loaded_exits_1_with_the_reason(tmp_path: Path) -> None:
    with running(tmp_path, "unsupported") as server:
        assert server.exit_status() == 1
        assert server.process.stderr is not None
        assert "no such architecture" in server.process.stderr.read()


def test_a_template_that_is_not_there_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    # The engine would take a minute.
    with running(tmp_path, "slow", "--chat-template", "/nowhere/t.jinja") as server:
        assert server.exit_status(40) == 1
        assert server.process.stderr is not None
        assert "--chat-template /nowhere/t.jinja: cannot be read" in server.process.stderr.read()


def test_engine_that_dies_ends_the_server_with_1(tmp_path: Path) -> None:
    with running(tmp_path, "dies") as server:
        assert server.exit_status() == 1
        assert server.process.stderr is not None
        assert "the engine has ended" in server.process.stderr.read()


def test_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with running(tmp_path, "serves") as server:
        port = server.url.rsplit(":", 1)[1]
        other = subprocess.run(
            [sys.executable, "-m", "moeserve", str(model_dir()), "--port", port],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert other.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in other.stderr


def test_without_a_file_left_for_a_connection_the_log_stays_short(tmp_path: Path) -> None:
    limits = (80, 160)  # the first is raised to the second
    with running(tmp_path, "serves", file_limits=limits) as server:
        server.wait_healthy()
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection(address, timeout=20))
            with pytest.raises(httpx.TimeoutException):
                httpx.get(f"{server.url}/health", timeout=1.5)
        end = time.monotonic() + 20
        while True:  # as soon as others have gone
            try:
                assert httpx.get(f"{server.url}/health", timeout=1).status_code == 200
                break
            except httpx.TimeoutException:
                assert time.monotonic() < end
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0
        assert server.process.stderr is not None
        log = server.process.stderr.read()
        assert "no further connection can be accepted: Too many open files (at most 160" in log
        assert len(log.splitlines()) < 30


def test_a_port_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "port.json"
    argv = [sys.executable, "-m", "moeserve", str(model_dir()), "--port", "0", "--port-file", path]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert f"--port-file {path}: cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr
