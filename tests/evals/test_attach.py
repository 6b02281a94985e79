"""Servers that somebody else runs: waited for while they load, refused at once where it is vain.

The server is scripted, a path at a time; the whole line (`evalsuite run --base-url`) is asked where
the exit code or the file matters, `attach.wait_for` where only the look does.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evalsuite import attach, session
from evalsuite.attach import Patience, wait_for
from evalsuite.config import ABSENT_GRACE_S, EvalConfig
from evalsuite.engine_checks import call_rpc_checks, read_draft_counters
from evalsuite.engines.base import LaunchSpec
from evalsuite.errors import ConfigError, ServerError
from evalsuite.executors import local
from evalsuite.progress import PlainDisplay
from evalsuite.run_folder import RunFolder
from evalsuite.server import StartSettings
from evalsuite.shared_server import SharedServer
from evalsuite.verdict import Verdict, exit_code

Script = Callable[[str], bytes]


def reply(status: int, content: object = None) -> bytes:
    """An HTTP reply after which the connection is closed."""
    payload = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Scripted\r\nconnection: close\r\ncontent-length: {len(payload)}"
    return head.encode() + b"\r\n\r\n" + payload


def models(*names: str) -> bytes:
    return reply(200, {"data": [{"id": name} for name in names]})


def ready(path: str, health: int = 200) -> bytes:
    return reply(health) if path == "/health" else models("stub")


def loading(seconds: float, status: int = 503) -> Script:
    """`/health` answers `status` for some seconds after the first look."""
    first: list[float] = []

    def script(path: str) -> bytes:
        first.append(time.monotonic())
        is_over = first[-1] - first[0] >= seconds
        return ready(path, 200 if is_over else status)

    return script


class _Line(socketserver.StreamRequestHandler):
    server: Scripted

    def handle(self) -> None:
        first = self.rfile.readline() if self.rfile.peek(1)[:1] != b"\x16" else b"TLS hello -"
        path = first.decode().split()[1]
        length = 0
        while path != "hello" and (line := self.rfile.readline().strip().lower()):
            if line.startswith(b"authorization:"):
                self.server.keys.add(line.decode().partition(": ")[2])
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        self.rfile.read(length)
        self.server.paths.append(path)
        self.wfile.write(self.server.script(path))


class Scripted(socketserver.ThreadingTCPServer):
    """Answers each path as the script says; `with Scripted(script) as server: server.url`."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, script: Script, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Line)
        self.script = script
        self.paths: list[str] = []
        self.keys: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop listening; harmless when repeated."""
        self.shutdown()
        self.server_close()


def wait(url: str, limit_s: float = 5.0, absent_s: float = 0.3) -> list[str]:
    """What was seen while waiting."""
    seen: list[str] = []
    wait_for(url, "stub", Patience(limit_s, absent_s, lambda _, detail: seen.append(detail)))
    return seen


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that is bound and at which nobody listens: connections are refused."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_loading_server_is_waited_for(status: int) -> None:
    with Scripted(loading(0.4, status=status)) as server:
        seen = wait(server.url)
    assert seen
    assert set(seen) == {f"/health answers {status}"}


@pytest.mark.parametrize("status", [404, 405])
def test_without_a_health_route_the_models_decide(status: int) -> None:
    with Scripted(lambda path: ready(path, status)) as server:
        assert wait(server.url) == []
        assert server.paths == ["/health", "/v1/models"]


def test_a_list_that_is_still_empty_is_waited_for() -> None:
    replies = iter([models(), models("stub")])
    with Scripted(lambda path: reply(200) if path == "/health" else next(replies)) as server:
        assert wait(server.url) == ["/v1/models lists nothing"]


def test_the_limit_names_the_last_state() -> None:
    with Scripted(loading(60)) as server, pytest.raises(ServerError) as caught:
        wait(server.url, limit_s=0.4)
    assert caught.value.reason == (
        f"ready: the server at {server.url} cannot be evaluated: /health answers 503; "
        "waited for startup_max_wait_seconds 0.4"
    )


def test_a_refused_connection_has_a_short_grace(free_port: int) -> None:
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"ConnectionRefusedError.*names startup_max_wait_se"):
        wait(f"http://127.0.0.1:{free_port}", limit_s=60, absent_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5


def test_a_server_that_begins_to_listen_in_time_is_waited_for(free_port: int) -> None:
    seen: list[str] = []
    with contextlib.ExitStack() as stack:

        def on_wait(_: float, detail: str) -> None:
            seen.append(detail)
            if len(seen) == 2:
                stack.enter_context(Scripted(ready, free_port))

        wait_for(f"http://127.0.0.1:{free_port}", "stub", Patience(20, 20, on_wait))
    assert len(seen) == 2
    assert all("ConnectionRefusedError" in detail for detail in seen)


def test_the_grace_counts_from_the_last_answer() -> None:
    """A server that loads for longer than the grace and then restarts is not given up at once."""
    with Scripted(loading(60)) as server:
        threading.Timer(0.6, server.end).start()
        began = time.monotonic()
        with pytest.raises(ServerError, match="for something to listen"):
            wait(server.url, limit_s=60, absent_s=0.4)
    assert time.monotonic() - began >= 0.6


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda _: reply(401), "/health answers 401; its key is read from"),
        (lambda _: reply(400), "/health answers 400; is this the root"),
        (
            lambda path: reply(200 if path == "/health" else 404),
            "/v1/models answers 404; is this the root",
        ),
        (lambda _: b"220 mail.example ESMTP\r\n", "it does not speak HTTP"),
        (lambda _: reply(200, "<html>"), "/v1/models gave no model list"),
        (lambda _: models("a", "b"), "it serves a, b, not stub; name its model in `model_name`"),
    ],
    ids=["key", "400", "no models", "no HTTP", "a page", "another model"],
)
def test_what_no_wait_changes_is_said_at_once(script: Script, message: str) -> None:
    with Scripted(script) as server, pytest.raises(ConfigError) as caught:
        wait(server.url, limit_s=60, absent_s=60)
    assert message in str(caught.value)


def test_tls_with_a_server_that_has_none_is_said_at_once() -> None:
    with (
        Scripted(lambda _: reply(400)) as server,
        pytest.raises(ConfigError, match="no TLS with it"),
    ):
        wait(server.url.replace("http:", "https:"), limit_s=60, absent_s=60)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(socket.EAI_NONAME, ConfigError), (socket.EAI_AGAIN, ServerError)],
    ids=["no such host", "name service away"],
)
def test_an_unknown_host_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    def lookup(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "scripted")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(kind, match=r"http://gpu-7:8000 cannot be .* host name is not found"):
        wait("http://gpu-7:8000", limit_s=60, absent_s=60)


@pytest.mark.parametrize("url", ["http://a..b:1", f"http://{'a' * 70}.x:1"])
def test_a_host_that_is_none_is_said_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="host name is none"):
        wait(url, limit_s=60, absent_s=60)


def config(**keys: object) -> EvalConfig:
    values = {
        "model_name": "stub", "accuracy_threshold": 0.9, "num_questions": 5, "num_fewshot": 0,
        "tolerance": 0.1, "task": "minigsm", "engine": "external", "provenance": "test", **keys,
    }  # fmt: skip
    return EvalConfig.model_validate(values)


def test_a_file_that_names_the_wait_waits_for_absent_servers_too() -> None:
    assert config().absent_limit_s == ABSENT_GRACE_S
    assert config(startup_max_wait_seconds=900).absent_limit_s == 900


def run(folder: Path, url: str, **keys: object) -> tuple[Verdict, list[str]]:
    """One job by the whole line, and the lines of its display."""
    (folder / "job.yaml").write_text(config(**keys).model_dump_json(exclude_unset=True))
    request = session.RunRequest(
        configs=(str(folder / "job.yaml"),), base_url=url, root=str(folder)
    )
    prepared = session.prepare(request, {"HOME": str(folder)})
    results = RunFolder(folder / "run")
    results.begin(request.to_json())
    lines: list[str] = []
    display = PlainDisplay(lines.append, every_s=0.0)
    (verdict,) = local.execute(prepared.jobs, prepared.options, results, display)
    return verdict, lines


def test_a_run_waits_says_so_and_evaluates(tmp_path: Path) -> None:
    script = loading(0.5)

    def server_script(path: str) -> bytes:
        if path.startswith("/v1/completions"):
            choice = {"index": 0, "text": "#### 1", "finish_reason": "stop"}
            return reply(200, {"choices": [choice]})
        return script(path)

    with Scripted(server_script) as server:
        verdict, lines = run(tmp_path, server.url, startup_max_wait_seconds=20)
    assert verdict.status.name == "FAIL", verdict.reason
    assert any("server starting for" in x and "/health answers 503" in x for x in lines)


def test_a_run_ends_with_75_and_the_last_state(tmp_path: Path) -> None:
    with Scripted(loading(60)) as server:
        verdict, _ = run(tmp_path, server.url, startup_max_wait_seconds=0.3)
    assert exit_code([verdict]) == 75
    assert "/health answers 503; waited for startup_max_wait_seconds 0.3" in verdict.reason


def test_the_jobs_after_one_that_waited_in_vain_look_once(tmp_path: Path, free_port: int) -> None:
    spec = LaunchSpec((), {}, "stub", (), f"http://127.0.0.1:{free_port}")
    settings = StartSettings(tmp_path, 5.0, {}, absent_limit_s=0.2)
    with SharedServer(settings) as shared:
        with pytest.raises(ServerError, match="waited 0 s"):
            shared.acquire(spec, settings)
        began = time.monotonic()
        with pytest.raises(ServerError, match="an earlier job of this run has waited for it"):
            shared.acquire(spec, settings)
        assert time.monotonic() - began < attach._PAUSE_MIN_S


def test_every_question_to_the_server_has_its_key_and_the_path_of_its_address() -> None:
    """Health, models, RPC checks and metrics, of a server behind somebody's proxy."""

    def script(path: str) -> bytes:
        return ready(path.removeprefix("/team/llm"))

    with Scripted(script) as server:
        url = f"{server.url}/team/llm"
        wait_for(url, "stub", Patience(5, 1), "sk-1")
        call_rpc_checks(url, ("check",), "sk-1")
        read_draft_counters(url, "sk-1")
    parts = ("health", "v1/models", "collective_rpc", "metrics")
    assert server.paths == [f"/team/llm/{part}" for part in parts]
    assert server.keys == {"bearer sk-1"}
