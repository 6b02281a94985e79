"""A streaming OpenAI server that answers by the clock, for tests of what measures latency.

Receives a `Schedule`; every request gets its chunks at fixed times after it arrived, however many
are open. It runs as a process of its own and keeps the moments at which it really sent (`sent()`),
on the clock that `time.perf_counter` reads in every process of a machine: what a client says can
be held against what happened. Scripted faults are `fake_server.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: {}\r\n{}\r\n"


@dataclass(frozen=True)
class Schedule:
    r"""When what is sent; seconds from the arrival of a request's last byte.

    Attributes:
        ttft_s: To the first chunk with tokens.
        itl_s: From one chunk to the next.
        num_chunks: With tokens.
        tokens_per_chunk: As the usage says, which is all that tells.
        role_s: To the chat route's chunk with the role and no token.
        end_s: From the last token to the usage.
        is_closing: A new connection for every request.
        line_end: Of the events; "\r\n" is as good as "\n".
    """

    ttft_s: float = 0.12
    itl_s: float = 0.015
    num_chunks: int = 20
    tokens_per_chunk: int = 1
    role_s: float = 0.04
    end_s: float = 0.0
    is_closing: bool = False
    line_end: str = "\n"

    @property
    def tpot_s(self) -> float:
        """From the first chunk to the last, over all tokens but one, as the field counts."""
        num_tokens = self.num_chunks * self.tokens_per_chunk
        return self.itl_s * (self.num_chunks - 1) / (num_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """Seconds to the last token."""
        return self.ttft_s + self.itl_s * (self.num_chunks - 1)


@dataclass(frozen=True)
class Sent:
    """One request as it was: when it was complete, and when each chunk with tokens left."""

    arrived: float
    moments: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.moments[0] - self.arrived

    @property
    def e2el_s(self) -> float:
        """To the last."""
        return self.moments[-1] - self.arrived


@dataclass(frozen=True)
class PacedServer:
    """A running server.

    Attributes:
        url: Root.
        schedule: What it keeps to.
    """

    url: str
    schedule: Schedule

    def sent(self) -> list[Sent]:
        """All requests that were answered so far, in order of arrival."""
        with urllib.request.urlopen(f"{self.url}/sent", timeout=30) as reply:
            return [Sent(arrived, tuple(moments)) for arrived, moments in json.load(reply)]


@contextmanager
def paced_server(schedule: Schedule) -> Iterator[PacedServer]:
    """Start the server as a process, end it afterwards."""
    command = [sys.executable, "-P", __file__, json.dumps(asdict(schedule))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield PacedServer(f"http://127.0.0.1:{int(process.stdout.readline())}", schedule)
        finally:
            process.terminate()


class _Line(asyncio.Protocol):
    """One connection; a request at a time, as clients of an API send them."""

    def __init__(self, schedule: Schedule, log: list[tuple[float, list[float]]]) -> None:
        self.schedule = schedule
        self.log = log
        self.buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").lower().split("\r\n")
        lengths = [line.split(":")[1] for line in lines if line.startswith("content-length:")]
        if len(rest) < int(lengths[0] if lengths else 0):
            return
        self.buffer = b""
        if lines[0].startswith("get"):
            self._get(lines[0].split()[1])
        else:
            self._answer(perf_counter(), is_chat="/chat/" in lines[0])

    def _get(self, path: str) -> None:
        values: dict[str, object] = {
            "/sent": [row for row in self.log if len(row[1]) == self.schedule.num_chunks],
            "/v1/models": {"data": [{"id": "paced", "root": "paced"}]},
        }
        body = json.dumps(values.get(path, {})).encode()
        head = HEAD.format("application/json", f"content-length: {len(body)}\r\n")
        self._write(head.encode() + body)

    def _answer(self, arrived: float, *, is_chat: bool) -> None:
        loop, plan = asyncio.get_running_loop(), self.schedule
        # The loop's clock is `time.monotonic`: the same one on Linux, told apart elsewhere.
        zero = loop.time() - (perf_counter() - arrived)
        extra = "connection: close\r\n" if plan.is_closing else ""
        head = HEAD.format("text/event-stream", extra + "transfer-encoding: chunked\r\n")
        moments: list[float] = []
        self.log.append((arrived, moments))
        self._write(head.encode())
        if is_chat:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            loop.call_at(zero + plan.role_s, self._event, role)
        text: dict[str, object] = {"delta": {"content": "x "}} if is_chat else {"text": "x "}
        token = {"choices": [{"index": 0, **text}]}
        for place in range(plan.num_chunks):
            moment = zero + plan.ttft_s + place * plan.itl_s
            loop.call_at(moment, self._event, token, moments)
        loop.call_at(zero + plan.e2el_s + plan.end_s, self._end, moments)

    def _end(self, moments: list[float]) -> None:
        if len(moments) < self.schedule.num_chunks:
            # Timers of one moment have no order, and the usage comes last.
            asyncio.get_running_loop().call_soon(self._end, moments)
            return
        num_tokens = self.schedule.num_chunks * self.schedule.tokens_per_chunk
        counts = {"prompt_tokens": 8, "completion_tokens": num_tokens}
        self._event({"choices": [], "usage": counts})
        self._event("[DONE]")
        self._write(b"0\r\n\r\n")
        if self.schedule.is_closing and self.transport:
            self.transport.close()

    def _event(self, value: dict[str, Any] | str, moments: list[float] | None = None) -> None:
        payload = value if isinstance(value, str) else json.dumps(value)
        event = f"data: {payload}{self.schedule.line_end * 2}"
        if moments is not None:
            moments.append(perf_counter())
        self._write(f"{len(event):x}\r\n{event}\r\n".encode())

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


async def _serve(schedule: Schedule) -> None:
    log: list[tuple[float, list[float]]] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Line(schedule, log), "127.0.0.1", backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve the schedule given as JSON, print the port, run until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", type=json.loads, help="JSON object: fields of `Schedule`")
    asyncio.run(_serve(Schedule(**parser.parse_args().schedule)))


if __name__ == "__main__":
    main()
