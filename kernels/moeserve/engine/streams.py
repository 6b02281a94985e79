"""The asyncio end of the engine's socket: bytes to messages, messages to open requests.

`process.py` decides what a message means; this file holds what waits for a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from moeserve.engine.request import TokenEvent
from moeserve.engine.wire import Message, Unpacker, pack

if TYPE_CHECKING:
    from moeserve.engine.dp import Lane


class Connection(asyncio.Protocol):
    """Hands every batch of complete messages to `on_messages` at once."""

    def __init__(
        self, on_messages: Callable[[list[Message]], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._unpacker = Unpacker()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to write to."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass on what is complete."""
        messages = self._unpacker.feed(data)
        if messages:
            self._on_messages(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone, or `close` was called."""
        self._transport = None
        self._on_lost()

    def send(self, message: Message) -> None:
        """Queue one message; nothing where the connection is gone."""
        if self._transport is not None:
            self._transport.write(pack(message))

    def close(self) -> None:
        """Send what is queued, then close."""
        if self._transport is not None:
            self._transport.close()


class Stream:
    """Events of one open request that its reader has not taken yet."""

    __slots__ = ("events", "is_ended", "lane", "waiter")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.events: list[TokenEvent] = []
        self.waiter: asyncio.Future[None] | None = None
        self.is_ended = False

    def wake(self) -> None:
        """Let the reader run."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def merged(events: list[TokenEvent]) -> list[TokenEvent]:
    """Neighbouring plain tokens as one event; everything that says more stays as it is."""
    out: list[TokenEvent] = []
    run: list[int] = []
    for event in events:
        if event.token_ids and not event.logprobs and event.finish_reason is None and out:
            run.extend(event.token_ids)
            continue
        if run:
            out.append(TokenEvent(event.request_id, tuple(run)))
            run = []
        out.append(event)
    if run:
        out.append(TokenEvent(events[0].request_id, tuple(run)))
    return out
