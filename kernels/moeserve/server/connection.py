"""One connection: what uvicorn lacks in time limits, and a short way for a stream's chunks.

Receives bytes of a socket; hands requests to the application as uvicorn does. A client may not
take for ever over its headers, nor leave an answer untaken: whoever does is cut off, and what its
requests held is free. Headers and bodies themselves are judged by `http_guard.py` and `turns.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import sys
import termios
from functools import partial
from http import HTTPStatus
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from moeserve.server.http_guard import Scope
from moeserve.server.limits import Limits
from moeserve.server.replies import error_body

logger = logging.getLogger("moeserve.server")
# Key of a request's scope: writes a part of its body at once, once the response has started.
CHUNK_WRITER = "moeserve.write_chunk"


def _write_chunk(cycle: RequestResponseCycle, part: bytes) -> bool:
    """Write one part of a chunked body past all layers; False where it has to be awaited.

    A stream sends one part a token, and the layers' checks of it cost more than all the rest.
    """
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
        return False
    if cycle.transport.is_closing():
        return True  # the client is gone and the request will be told; the loop warns of writes
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True


def _num_untaken(transport: asyncio.Transport) -> int:
    """Bytes that the client's machine has not acknowledged.

    Those in the kernel count too: it takes more from here only once a third of its own, which may
    be megabytes, has gone.
    """
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


def _refusal(status: int, message: str, kind: str) -> tuple[h11.Response, h11.Data]:
    """A whole answer to what is no request, after which the connection is closed."""
    body = json.dumps(error_body(message, kind, code=status), separators=(",", ":")).encode()
    headers = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    ]
    reason = HTTPStatus(status).phrase
    return h11.Response(status_code=status, headers=headers, reason=reason), h11.Data(data=body)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits on how long a client may take.

    Attributes:
        limits: Set by `bounded_protocol`.
    """

    limits: ClassVar[Limits]
    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def handle_events(self) -> None:
        """Hand requests on, each with the short way for its chunks."""
        super().handle_events()
        # The request's task is made but has not run yet.
        if self.cycle is not None and self.cycle.scope["http_version"] == "1.1":
            scope: Scope = self.cycle.scope  # type: ignore[assignment]
            scope.setdefault(CHUNK_WRITER, partial(_write_chunk, self.cycle))

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Begin; the first headers have their time from here."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the time for headers runs where none are complete."""
        super().data_received(data)
        is_waiting = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if not is_waiting:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def pause_writing(self) -> None:
        """The client takes less than is written: watch that it takes something."""
        super().pause_writing()
        self._watch_reader(None)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._stop_send_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request."""
        self._refuse(400, msg.removesuffix("."), "invalid_request_error")

    def _refuse(self, status: int, message: str, kind: str) -> None:
        """Answer what is no request, unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (*_refusal(status, message, kind), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_reader(self, num_before: int | None) -> None:
        """Cut off a client that has taken nothing since the last look."""
        num_left = _num_untaken(self.transport)
        if num_before is not None and num_left >= num_before:
            logger.info("a client has taken nothing for %g s: cut off", self.limits.send_timeout_s)
            self._send_timer = None
            self.transport.abort()
            return
        self._send_timer = self.loop.call_later(
            self.limits.send_timeout_s, self._watch_reader, num_left
        )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            text = f"the headers were not complete after {self.limits.header_timeout_s:g} s"
            self._refuse(408, text, "timeout_error")


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """Return the protocol of a server with these limits; uvicorn makes one for each connection."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
