"""The engine's side of the socket to the API process: a reader that is busy stops no step."""

from __future__ import annotations

import socket
import threading

import pytest

from moeserve.engine.wire import Outbox, Unpacker, receive

MESSAGE = ("step", [f"request-{i:032}" for i in range(1000)], list(range(1000)))


def test_messages_that_nobody_reads_do_not_block_and_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    count = 60  # some 3 MB, many times what a socket holds
    # A `put` that waited for the reader would wait here for ever.
    for number in range(count):
        outbox.put((*MESSAGE, number))
    found = []

    def read() -> None:
        unpacker = Unpacker()
        while (messages := receive(theirs, unpacker)) is not None:
            found.extend(messages)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    outbox.put(("last",))
    outbox.flush()
    ours.close()
    reader.join(30)
    assert not reader.is_alive()
    assert found == [(*MESSAGE, number) for number in range(count)] + [("last",)]


def test_a_reader_that_is_gone_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    theirs.close()
    with pytest.raises(OSError, match="pipe"):
        outbox.put(MESSAGE)
