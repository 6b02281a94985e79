"""A stream as it goes over the wire: whole chunks on HTTP/1.1, plain bytes on HTTP/1.0."""

from __future__ import annotations

import json
import socket

import pytest
from fake_engine import FakeEngine, live_server, piece_tokenizer, service_for

TOKENIZER = piece_tokenizer()
BODY = json.dumps({"prompt": "a", "max_tokens": 30, "stream": True, "temperature": 0}).encode()


def request(version: str, *headers: str) -> bytes:
    lines = [f"POST /v1/completions HTTP/{version}", "host: here", f"content-length: {len(BODY)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + BODY


def exchange(url: str, sent: bytes, end: bytes) -> bytes:
    """Send bytes; return what comes until the server closes or `end` is there."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(sent)
        while not (end and received.endswith(end)):
            part = sock.recv(65536)
            if not part:
                break
            received += part
    return received


def unchunked(body: bytes) -> tuple[bytes, bytes]:
    """The bytes of a chunked body by the letter of RFC 9112, and what comes after it."""
    out = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        out, rest = out + body[:length], body[length:]
        assert rest.startswith(b"\r\n")
        body = rest[2:]
        if length == 0:
            return out, body


def texts(events: bytes) -> str:
    parts = events.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("step_s", [0.0, 0.002])
def test_two_streams_on_one_connection_and_one_that_closes(step_s: float) -> None:
    engine = FakeEngine(respond=lambda request: [65 + i % 20 for i in range(30)], step_s=step_s)
    with live_server(service_for(engine, TOKENIZER)) as url:
        # The second request is sent before the first is answered.
        both = exchange(url, request("1.1") + request("1.1", "connection: close"), b"")
        plain = exchange(url, request("1.0"), b"")
    head, _, body = both.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    first, rest = unchunked(body)
    head, _, body = rest.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    second, rest = unchunked(body)
    assert rest == b""
    head, _, old = plain.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert texts(first) == texts(second) == texts(old)
    assert len(texts(first)) == 30
