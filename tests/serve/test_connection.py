"""Connections that misbehave below HTTP: an answer nobody takes, bytes that are no request."""

from __future__ import annotations

import json
import socket
import struct
import time

import httpx
from fake_engine import FakeEngine, config_for_tests, live_server, service_for
from http_helpers import TOKENIZER, post
from run_helpers import wait_until

from moeserve.server.limits import Limits


def connect(url: str, receive_buffer: int = 0) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    sock.connect((host, int(port)))
    return sock


def request_bytes(**body: object) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def read_reply(sock: socket.socket) -> httpx.Response:
    raw = b""
    while chunk := sock.recv(65536):
        raw += chunk
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


def test_a_client_that_never_reads_is_cut_off_and_its_places_are_free() -> None:
    # As many places as it asks for: while it holds them everyone else gets 429.
    limits = Limits(max_queue=32, send_timeout_s=0.5)
    engine = FakeEngine(respond=lambda request: [65] * 3000)
    service = service_for(engine, TOKENIZER, config_for_tests(limits=limits))
    with live_server(service) as url, connect(url, receive_buffer=4096) as hung:
        hung.sendall(request_bytes(prompt="a", n=32, max_tokens=3000, stream=True))
        wait_until(lambda: len(engine.seen) == 32)
        assert post(url, prompt="b", max_tokens=1).status_code == 429
        wait_until(lambda: service.num_open == 0, limit_s=20)
        assert len(engine.aborted) == 32
        assert post(url, prompt="b", max_tokens=1).status_code == 200


def test_a_client_that_reads_slowly_but_steadily_gets_all_of_its_answer() -> None:
    limits = Limits(send_timeout_s=0.5)
    engine = FakeEngine(respond=lambda request: [65] * 3000)
    service = service_for(engine, TOKENIZER, config_for_tests(limits=limits))
    with live_server(service) as url, connect(url, receive_buffer=4096) as slow:
        slow.sendall(request_bytes(prompt="a", n=8, max_tokens=3000, stream=True))
        answer = b""
        end = time.monotonic() + 2  # four times the limit
        while time.monotonic() < end:
            answer += slow.recv(2048)
            time.sleep(0.05)  # how slow it is, not a wait
        assert len(answer) < 200_000
        while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            answer += slow.recv(1 << 19)
        assert answer.count(b'"finish_reason":"length"') == 8


def test_many_choices_for_a_client_that_is_gone_leave_no_trace_in_the_log(caplog) -> None:
    engine = FakeEngine(respond=lambda request: [65] * 200)
    service = service_for(engine, TOKENIZER)
    with live_server(service) as url:
        for _ in range(20):
            with connect(url) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.sendall(request_bytes(prompt="a", n=64, max_tokens=200, stream=True))
                sock.recv(100)
        wait_until(lambda: service.num_open == 0)
        assert post(url, prompt="b", max_tokens=1).status_code == 200
    assert [record.getMessage() for record in caplog.records] == []


def test_what_is_no_request_is_refused_in_the_usual_form() -> None:
    limits = Limits(header_timeout_s=0.3)
    service = service_for(FakeEngine(), TOKENIZER, config_for_tests(limits=limits))
    with live_server(service) as url:
        for sent, status in (
            (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
            (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
            (b"GET /health HTTP/1.1\r\nhost: x\r\n", 408),  # and then nothing
            (request_bytes(prompt="a").replace(b"content-length: 15", b"content-length: -1"), 400),
        ):
            with connect(url) as sock:
                sock.sendall(sent)
                reply = read_reply(sock)
            assert reply.status_code == status
            error = reply.json()["error"]
            assert error["code"] == status
            assert error["message"]
            assert reply.headers["connection"] == "close"
