"""A scripted OpenAI server on an ephemeral port: answers, delays, errors, dropped lines, death.

A test gives a function `Request -> Action`; the server does what it says and keeps count. It runs
in a thread (`FakeServer`) or as a process of its own (`python fake_server.py --help`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}


@dataclass(frozen=True)
class Request:
    """One POST.

    Attributes:
        number: 0-based, in order of arrival.
        attempt: 0 the first time this very body comes, then 1, 2, ...
        route: Path.
        body: The JSON body.
        headers: Lower-case names.
    """

    number: int
    attempt: int
    route: str
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def prompts(self) -> list[str]:
        """Every prompt (or message text) of the body."""
        if "messages" in self.body:
            return [self.body["messages"][-1]["content"]]
        prompt = self.body["prompt"]
        return [prompt] if isinstance(prompt, str) else prompt


@dataclass(frozen=True)
class Action:
    """What to do with a request.

    Attributes:
        texts: One reply per prompt.
        finish_reason: Of every choice, "" for a reply without it.
        status: HTTP status.
        payload: Sent in place of a well-formed body.
        headers: Added to the reply.
        delay_s: Before anything is sent.
        order: Order in which choices are listed.
        cut_after: Bytes of the body that are sent before the line is closed, None for all.
        is_dropped: Close the line without a word.
        is_death: Close everything and stop listening (a process exits with status 1).
        is_reset: Cut the line with a reset, after `cut_after` bytes of the body.
        raw: Sent as it is, head included; the line is closed then.
        usage: Prompt and completion tokens, None for a reply without them.
    """

    texts: tuple[str, ...] = ("",)
    finish_reason: str = "stop"
    status: int = 200
    payload: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    order: tuple[int, ...] | None = None
    cut_after: int | None = None
    is_dropped: bool = False
    is_death: bool = False
    is_reset: bool = False
    raw: bytes | None = None
    usage: tuple[int, int] | None = (7, 3)


def error(status: int, message: str, **headers: str) -> Action:
    """An error reply in the field's form."""
    payload = json.dumps({"error": {"message": message, "code": status}}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Action(status=status, payload=payload, headers=named)


def body(content: object) -> Action:
    """A reply of status 200 that is this JSON, whatever it says."""
    return Action(payload=json.dumps(content).encode())


Script = Callable[[Request], Action]


class FakeServer:
    """Context manager: `with FakeServer(script) as server: ... server.url`."""

    def __init__(
        self, script: Script, *, idle_close_s: float | None = None, has_stop: bool = True
    ) -> None:
        self.script = script
        self.idle_close_s = idle_close_s
        # Whether stop strings are obeyed, as real servers do.
        self.has_stop = has_stop
        self.requests: list[Request] = []
        self.open_now = 0
        self.most_open = 0
        self.connections = 0
        self.on_death: Callable[[], None] = lambda: None
        self.port = 0
        self._seen: Counter[bytes] = Counter()
        self._lines: set[_Line] = set()
        self._loop = asyncio.new_event_loop()
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        """Server root."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self.die()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def listen(self, port: int = 0) -> None:
        """Start to accept connections in the running loop."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: _Line(self), "127.0.0.1", port, backlog=4096
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    def die(self) -> None:
        """Stop listening and close every connection."""
        if self._listener:
            self._listener.close()
        for line in list(self._lines):
            line.close()

    def kill(self) -> None:
        """`die`, from another thread."""
        self._loop.call_soon_threadsafe(self.die)

    def handle(self, line: _Line, route: str, headers: dict[str, str], content: bytes) -> None:
        """Answer one POST as the script says."""
        attempt = self._seen[content]
        self._seen[content] += 1
        request = Request(len(self.requests), attempt, route, json.loads(content), headers)
        self.requests.append(request)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        action = self.script(request)
        if action.delay_s:
            asyncio.get_running_loop().call_later(action.delay_s, self._act, line, request, action)
        else:
            self._act(line, request, action)

    def _act(self, line: _Line, request: Request, action: Action) -> None:
        self.open_now -= 1
        if action.is_death:
            self.die()
            self.on_death()
        elif action.is_dropped:
            line.close()
        elif action.raw is not None:
            line.send_raw(action.raw)
        else:
            payload = action.payload
            if payload is None:
                payload = self._body(request, action)
            line.send(action.status, payload, action.headers, action.cut_after)
            if action.is_reset:
                line.reset()

    def _body(self, request: Request, action: Action) -> bytes:
        choices = []
        for index, text in enumerate(action.texts):
            reason = action.finish_reason
            if self.has_stop:
                text, was_stopped = cut(text, request.body.get("stop") or [])
                reason = "stop" if was_stopped else reason
            choice: dict[str, object] = {"index": index}
            if reason:
                choice["finish_reason"] = reason
            if "messages" in request.body:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append(choice)
        if action.order:
            choices = [choices[index] for index in action.order]
        body: dict[str, object] = {"id": "x", "choices": choices}
        if action.usage:
            names = ("prompt_tokens", "completion_tokens")
            body["usage"] = dict(zip(names, action.usage, strict=True))
        return json.dumps(body).encode()


def cut(text: str, stop: list[str] | str) -> tuple[str, bool]:
    """Cut a text at the earliest stop string."""
    stops = [stop] if isinstance(stop, str) else stop
    found = [at for at in (text.find(item) for item in stops) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


class _Line(asyncio.Protocol):
    """One connection; understands as much HTTP as clients of an API speak."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.buffer = b""
        self.transport: asyncio.Transport | None = None
        self.idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections += 1
        self.server._lines.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server._lines.discard(self)
        if self.idle:
            self.idle.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head_end = self.buffer.find(b"\r\n\r\n")
            if head_end < 0:
                return
            first, *lines = self.buffer[:head_end].decode("latin-1").split("\r\n")
            pairs = (line.split(":", 1) for line in lines)
            headers = {name.strip().lower(): value.strip() for name, value in pairs}
            length = int(headers.get("content-length", "0"))
            end = head_end + 4 + length
            if len(self.buffer) < end:
                return
            content, self.buffer = self.buffer[head_end + 4 : end], self.buffer[end:]
            if self.idle:
                self.idle.cancel()
            method, route, _ = first.split(" ", 2)
            if method == "GET":
                self._get(route)
            else:
                self.server.handle(self, route, headers, content)

    def _get(self, route: str) -> None:
        if route == "/health":
            self.send(200, b"{}", {}, None)
        elif route == "/v1/models":
            self.send(200, b'{"object":"list","data":[{"id":"fake","object":"model"}]}', {}, None)
        else:
            self.send(404, b'{"error":{"message":"not found"}}', {}, None)

    def send(
        self, status: int, payload: bytes, headers: dict[str, str], cut_after: int | None
    ) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n{extra}\r\n"
        )
        self.transport.write(head.encode("latin-1") + payload[:cut_after])
        if cut_after is not None:
            self.transport.close()
        elif self.server.idle_close_s is not None:
            loop = asyncio.get_running_loop()
            self.idle = loop.call_later(self.server.idle_close_s, self.close)

    def send_raw(self, content: bytes) -> None:
        if self.transport:
            self.transport.write(content)
            self.transport.close()

    def reset(self) -> None:
        """Close without the farewell: the other side gets ECONNRESET."""
        if self.transport:
            line = self.transport.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def close(self) -> None:
        if self.transport:
            self.transport.close()


def prompt_key(prompt: str) -> str:
    """Key of a prompt in an answers file."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def main() -> None:
    """Serve from an answers file, print the port, run until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, help='JSON object: prompt_key -> text; "*" default')
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--die-after", type=int, default=-1, help="exit with this request number")
    options, _ = parser.parse_known_args()
    answers = json.loads(options.answers.read_text()) if options.answers else {}

    def script(request: Request) -> Action:
        if request.number == options.die_after:
            return Action(is_death=True)
        texts = tuple(
            answers.get(prompt_key(p), answers.get("*", "#### 0")) for p in request.prompts
        )
        return Action(texts, delay_s=options.delay_s)

    async def serve() -> None:
        server = FakeServer(script)
        # The process ends as a killed server does: at once, with a status that is no success.
        server.on_death = lambda: os._exit(1)
        await server.listen(options.port)
        print(server.port, flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
