"""Hostile requests over raw sockets: each is refused in time, and a normal client is served."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time

import httpx
import pytest
from fake_engine import (
    EOS,
    FakeEngine,
    config_for_tests,
    live_server,
    piece_tokenizer,
    service_for,
)

from moeserve.server.limits import Limits

LIMITS = Limits(max_body_bytes=1 << 20, body_timeout_s=1.0, header_timeout_s=1.0)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def url():
    engine = FakeEngine(respond=lambda request: [65, 66, EOS])
    config = config_for_tests(limits=LIMITS)
    with live_server(service_for(engine, piece_tokenizer(), config)) as base:
        yield base


@pytest.fixture(autouse=True)
def normal_client(url):
    """Asks all the while; every answer must be right and none may be slow."""
    done = threading.Event()
    slowest, wrong = [0.0], []

    def ask() -> None:
        with httpx.Client(timeout=20) as client:
            while not done.is_set():
                start = time.monotonic()
                reply = client.post(f"{url}/v1/completions", json={"prompt": "a"})
                slowest[0] = max(slowest[0], time.monotonic() - start)
                if reply.status_code != 200 or reply.json()["choices"][0]["text"] != "AB":
                    wrong.append(reply.text)
                done.wait(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    done.set()
    thread.join()
    assert not wrong
    assert slowest[0] < 8.0  # a stall, as against a machine that is busy


def raw(url: str, *parts: bytes, wait_s: float = 12.0) -> bytes:
    """Send bytes as they are; return everything that comes back until the end or the wait."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server answered before it had read everything, and closed
        got = b""
        try:
            while chunk := sock.recv(65536):
                got += chunk
        except (TimeoutError, ConnectionResetError):
            return got
        return got


def statuses(answer: bytes) -> list[int]:
    found = answer.split(b"HTTP/1.1 ")[1:]
    return [int(part[:3]) for part in found]


def post(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**9),
        ("n", 0),
        ("n", -1),
        ("n", True),
        ("best_of", 10**6),
        ("logprobs", 10**6),
        ("logprobs", -1),
        ("prompt_logprobs", 10**6),
        ("max_tokens", -5),
        ("max_tokens", 10**12),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(i): 0 for i in range(2000)}),
        ("stop", ["x"] * 1000),
        ("stop", "x" * 5000),
        ("stop_token_ids", [300]),
        ("stop_token_ids", [1] * 1000),
        ("stream_options", {"include_usage": True}),
        ("suffix", "end"),
        ("use_beam_search", True),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("tools", [{}]),
        ("echo", "yes"),
        ("user", 5),
        ("priority", 2**40),
        ("request_id", ""),
        ("truncate_prompt_tokens", 0),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(url: str, field: str, value: object) -> None:
    reply = post(url, **{"prompt": "a", field: value})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field
    assert field in reply.json()["error"]["message"]


def test_numbers_that_json_does_not_have(url: str) -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        raw_body = b'{"prompt":"a","temperature":' + text.encode() + b"}"
        reply = httpx.post(f"{url}/v1/completions", content=raw_body)
        assert reply.status_code == 400, text


def test_a_million_prompts_and_too_many_sequences(url: str) -> None:
    start = time.monotonic()
    many = httpx.post(
        f"{url}/v1/completions", content=b'{"prompt":[' + b"[5]," * 200_000 + b"[5]]}", timeout=20
    )
    assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")
    assert time.monotonic() - start < 8.0
    product = post(url, prompt=["a"] * 1000, n=100)
    assert (product.status_code, product.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"\xff\xfe",
        b'{"prompt":"\\ud800"}',
        b'{"n":' + b"1" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"a","\\u0000":1}',
    ],
)
def test_bodies_that_are_no_request(url: str, body: bytes) -> None:
    reply = httpx.post(f"{url}/v1/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_gibibyte_with_a_length_is_refused_before_it_is_sent(url: str) -> None:
    start = time.monotonic()
    answer = raw(url, HEAD + b"content-length: 1073741824\r\n\r\n")
    assert statuses(answer) == [413]
    assert time.monotonic() - start < 4.0


def test_a_gibibyte_without_a_length_is_refused_at_the_limit(url: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    answer = raw(url, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[piece] * 1024)
    assert statuses(answer) in ([413], [])  # [] where the reset overtakes the answer
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 32 * 1024


def test_more_than_was_announced_is_never_a_second_request(url: str) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    length = f"content-length: {len(body)}\r\n\r\n".encode()
    answer = raw(url, HEAD + length + body + b"x" * (1 << 20))
    assert statuses(answer) in ([200, 400], [200], [])


def test_length_with_chunked_is_400_and_the_connection_closed(url: str) -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = raw(
        url,
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
        wait_s=6.0,
    )
    assert statuses(answer) == [400]
    assert b"connection: close" in answer.lower()


def test_header_bounds(url: str) -> None:
    many = b"".join(b"x-%d: 1\r\n" % place for place in range(10_000))
    assert set(statuses(raw(url, b"GET /health HTTP/1.1\r\nhost: x\r\n" + many + b"\r\n"))) <= {
        400,
        431,
    }
    some = b"".join(b"x-%d: 1\r\n" % place for place in range(300))
    answer = raw(url, b"GET /health HTTP/1.1\r\nhost: x\r\n" + some + b"\r\n")
    assert statuses(answer) == [431]
    endless = b"GET /health HTTP/1.1\r\nx: " + b"a" * (1 << 20)
    assert statuses(raw(url, endless)) in ([400], [])


def test_slow_bodies_and_slow_headers_end_at_their_limits(url: str) -> None:
    start = time.monotonic()
    assert statuses(raw(url, HEAD + b"content-length: 100\r\n\r\n{")) == [408]
    assert 0.8 < time.monotonic() - start < 8.0
    start = time.monotonic()
    assert statuses(raw(url, HEAD)) == [408]
    assert 0.8 < time.monotonic() - start < 8.0
    assert statuses(raw(url)) == [408]


def test_a_byte_now_and_then_does_not_reset_the_limit(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=12) as sock:
        sock.sendall(HEAD + b"content-length: 100\r\n\r\n")
        start = time.monotonic()
        sock.settimeout(0.1)
        answer = b""
        while not answer and time.monotonic() - start < 10:
            sock.sendall(b"{")
            try:
                answer = sock.recv(4096)
            except TimeoutError:
                continue
        assert statuses(answer) == [408]


def test_bytes_that_are_not_http(url: str) -> None:
    assert statuses(raw(url, b"\x16\x03\x01\x02\x00" * 100)) == [400]
    assert statuses(raw(url, b"GET /health\r\n\r\n")) == [400]
    negative = raw(url, HEAD + b"content-length: -5\r\n\r\n")
    assert statuses(negative) == [400]


def test_log_probabilities_that_would_fill_the_memory(url: str) -> None:
    reply = post(url, prompt=["a"] * 100, n=40, logprobs=20, max_tokens=4000)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprobs")


def test_millions_of_ids_and_thousands_of_messages(url: str) -> None:
    start = time.monotonic()
    ids = httpx.post(
        f"{url}/v1/completions", content=b'{"prompt":[' + b"5," * 400_000 + b"5]}", timeout=20
    )
    assert "400001" in ids.json()["error"]["message"]
    message = b'{"role":"user","content":"a"}'
    body = b'{"messages":[' + (message + b",") * 20_000 + message + b"]}"
    chat = httpx.post(f"{url}/v1/chat/completions", content=body, timeout=20)
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "messages")
    assert time.monotonic() - start < 8.0
