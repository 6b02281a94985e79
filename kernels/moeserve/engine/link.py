"""Messages between two ranks' processes over a socket, in the form of `wire.py`.

Receives connected sockets from `ranks.py`; `team.py` says what the messages mean.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque

from moeserve.engine.wire import Message, Outbox, Unpacker, receive

Inbox = queue.SimpleQueue[Message]


class LinkLost(Exception):
    """The process at the other end of a socket is gone."""


class Link:
    """Messages with one other process; safe to send on from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._outbox = Outbox(sock)
        self._unpacker = Unpacker()
        self._arrived: deque[Message] = deque()
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            LinkLost: Nobody is there.
        """
        self.put(message)
        self.flush()

    def put(self, message: Message) -> None:
        """Send what the socket takes at once; the rest goes with the next messages or `flush`.

        Raises:
            LinkLost: Nobody is there.
        """
        try:
            with self._lock:
                self._outbox.put(message)
        except OSError as error:
            raise LinkLost(str(error)) from None

    def flush(self) -> None:
        """Wait until everything is sent.

        Raises:
            LinkLost: Nobody is there.
        """
        try:
            with self._lock:
                self._outbox.flush()
        except OSError as error:
            raise LinkLost(str(error)) from None

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            LinkLost: Nobody is there.
        """
        if not self._arrived:
            messages = receive(self._sock, self._unpacker)
            if messages is None:
                raise LinkLost("the other end is closed")
            self._arrived.extend(messages)
        return self._arrived.popleft()

    def read_into(self, inbox: Inbox, at_end: Message | None = None) -> None:
        """Put every message into a queue from now on, in a thread of its own.

        Args:
            inbox: The queue.
            at_end: Put there once the other end is gone.
        """

        def read() -> None:
            while (messages := receive(self._sock, self._unpacker)) is not None:
                for message in messages:
                    inbox.put(message)
            if at_end is not None:
                inbox.put(at_end)

        threading.Thread(target=read, daemon=True).start()
