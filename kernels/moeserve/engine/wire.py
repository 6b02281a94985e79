"""Messages between the API process and the engine process: a length, then a pickle.

Both ends are this package and the socket has no name, so a pickle is safe here. At most one
message a step goes each way; what happened in a step travels together.

To the engine: `("start", EngineConfig, sockets of other DP ranks)`,
`("work", [Request], [id to abort])`, `("profile",)`, `("end",)`. From it: `("ready", EngineInfo)`,
`("failed", kind, text)`, `("step", ids, tokens, events, EngineStats)`, `("profile", result)`. What
ranks say to each other is in `team.py` and `ranks.py`.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<Q")
Message = tuple[Any, ...]


def pack(message: Message) -> bytes:
    """One message as bytes, header included."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes; return the messages that are now complete."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            messages.append(pickle.loads(memoryview(buffer)[start + _HEADER.size : end]))
            start = end
        if start:
            del buffer[:start]
        return messages


class Outbox:
    """Sends messages without waiting for their reader: what does not fit yet stays here.

    A step must not wait because the API process is busy with a thousand prompts.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = bytearray()

    def put(self, message: Message) -> None:
        """Send as much as the socket takes at once.

        Raises:
            OSError: Nobody is there.
        """
        self._rest += pack(message)
        with contextlib.suppress(BlockingIOError):
            self._send(socket.MSG_DONTWAIT)

    def flush(self) -> None:
        """Wait until everything is sent.

        Raises:
            OSError: Nobody is there.
        """
        while self._rest:
            self._send(0)

    def _send(self, flags: int) -> None:
        with memoryview(self._rest) as view:
            num_sent = self._sock.send(view, flags)
        del self._rest[:num_sent]


def receive(sock: socket.socket, unpacker: Unpacker) -> list[Message] | None:
    """Block for the next messages; None where the other end is gone."""
    while True:
        try:
            data = sock.recv(1 << 18)
        except OSError:
            return None
        if not data:
            return None
        messages = unpacker.feed(data)
        if messages:
            return messages
