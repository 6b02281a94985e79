"""The API field by field and the HTTP around it: each is honoured, or refused by name."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import (
    EOS,
    FakeEngine,
    config_for_tests,
    live_server,
    piece_tokenizer,
    pieces_then_eos,
    service_for,
)

from moeserve.engine.config import EngineConfig
from moeserve.server.http_guard import HttpError
from moeserve.server.limits import Limits
from moeserve.server.turns import LARGE_BODY_BYTES, HeldBytes, Turns

PIECES = ("Ans", "wer 18\nQue", "stion: next")
MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(respond=pieces_then_eos(*PIECES))


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with live_server(service_for(engine, piece_tokenizer(*PIECES))) as base:
        yield base


def chat(url: str, **fields: object) -> httpx.Response:
    return httpx.post(url + CHAT, json={"messages": MESSAGES, **fields}, timeout=20)


def post(url: str, **fields: object) -> httpx.Response:
    return httpx.post(url + COMPLETIONS, json={"prompt": "a", **fields}, timeout=20)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_a_wrong_method_is_405_as_json_and_names_the_right_one(url: str, method: str) -> None:
    reply = httpx.request(method, url + COMPLETIONS)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["code"] == 405
    assert f"{method} {COMPLETIONS}" in reply.json()["error"]["message"]
    # No page of another origin is let in.
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/responses", "/docs", "/%00"])
def test_a_wrong_path_is_404_as_json(url: str, path: str) -> None:
    reply = httpx.post(url + path, json={})
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-encoding": "identity"}, 200),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "br"}, 415),
    ],
)
def test_content_types_and_encodings(url: str, headers: dict[str, str], status: int) -> None:
    body = b'{"prompt":"a"}'
    if "gzip" in headers.values():
        body = gzip.compress(body)
    reply = httpx.post(url + COMPLETIONS, content=body, headers=headers)
    assert reply.status_code == status, reply.text
    if status == 415:
        assert next(iter(headers)) in reply.json()["error"]["message"]


def test_expect_100_continue_is_answered_before_the_body(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    body = b'{"prompt":"a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(head)
        assert sock.recv(4096).startswith(b"HTTP/1.1 100 ")
        sock.sendall(body)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Answer 18" in answer


def test_a_hundred_megabytes_that_are_announced_are_not_read(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(head + b"content-length: 104857600\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b'{"prompt":"a","temperature":NaN}', "finite"),
        (b'{"prompt":"a","temperature":-Infinity}', "temperature"),
        (b'{"prompt":"\\ud800"}', "JSON"),
        (b'{"prompt":"\xed\xa0\x80"}', "JSON"),
        (b'\xef\xbb\xbf{"prompt":"a"}', "JSON"),
        ('{"prompt":"a"}'.encode("utf-16"), "JSON"),
        (b'{"prompt":"a"} x', "trailing"),
        (b'{"prompt":"a",}', "trailing"),
        (b"{'prompt':'a'}", "JSON"),
        (b'{"prompt":' * 300 + b"1" + b"}" * 300, "recursion"),
        (b'{"prompt":"a","n":1,"n":0}', "n: want 1"),
    ],
)
def test_odd_json_is_400_with_the_place(url: str, body: bytes, part: str) -> None:
    reply = httpx.post(url + COMPLETIONS, content=body)
    assert reply.status_code == 400
    assert part in reply.json()["error"]["message"]


def test_of_a_key_given_twice_the_last_counts_and_nul_is_a_character(
    url: str, engine: FakeEngine
) -> None:
    body = b'{"prompt":"first","prompt":"\\u0000z"}'
    assert httpx.post(url + COMPLETIONS, content=body).status_code == 200
    assert engine.seen[-1].prompt_ids == (0, ord("z"))


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"metadata": None},
        {"service_tier": "auto"},
        {"user": "someone"},
        {"safety_identifier": "x"},
        {"prompt_cache_key": "x"},
        {"prompt_cache_retention": "24h"},
        {"stream_options": None},
        {"logprobs": False},
        {"tools": []},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"stop": None},
        {"stop": ["v", "b", "c", "d", "f"]},
        {"prompt_embeds": None},
        {"include_reasoning": True},
        {"thinking_token_budget": None},
        {"cache_salt": None},
        {"moderation": None},
        {"echo": False},
        {"best_of": 1},
        {"truncation_side": "left"},
        {"stream_interval": None},
        {"return_token_offsets": False},
        {"routed_experts_prompt_start": 0},
        {"media_io_kwargs": None},
        {"watermarking": None},
        {"session_id": "s-1"},
        {"prompt_cache_options": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_what_asks_for_nothing_is_accepted(url: str, fields: dict[str, object]) -> None:
    reply = chat(url, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"].startswith("Answer")


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"metadata": {"a": "b"}},
        {"service_tier": "flex"},
        {"stream_options": {"include_usage": True}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"response_format": {"type": "json_object"}},
        {"prediction": {"type": "content", "content": "x"}},
        {"web_search_options": {}},
        {"verbosity": "low"},
        {"reasoning_effort": "low"},
        {"cache_salt": "x"},
        {"structured_outputs": {"choice": ["a"]}},
        {"guided_regex": "a"},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
        {"best_of": 2},
        {"echo": True},
        {"truncation_side": "right"},
        {"return_token_offsets": True},
        {"max_completion_tokens": 0},
        {"frequency_penalty": 2.5},
        {"top_logprobs": 0},
        {"n": 2.0},
    ],
)
def test_what_cannot_be_done_is_refused_by_name(url: str, fields: dict[str, object]) -> None:
    reply = chat(url, **fields)
    (name,) = fields
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert name in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "developer", "content": "be brief"}, *MESSAGES], "[developer]be brief[user]hi"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "[user]a"),
        ([{"role": "assistant", "content": "a", "refusal": None}, *MESSAGES], "[assistant]a[user]"),
        ([{"role": "user", "content": "a", "name": "Ada"}], "[user]a"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], None),
        ([{"role": "tool", "content": "a", "tool_call_id": "x"}], None),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}], None),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], None),
    ],
)
def test_messages_of_every_kind(
    url: str, engine: FakeEngine, messages: list[dict[str, object]], prompt: str | None
) -> None:
    reply = chat(url, messages=messages)
    if prompt is None:
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    else:
        assert reply.status_code == 200
        assert bytes(engine.seen[-1].prompt_ids).decode().startswith(prompt)


def events(reply: httpx.Response) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_streamed_chat_of_two_choices_with_log_probabilities_and_usage(url: str) -> None:
    reply = chat(
        url, n=2, stream=True, logprobs=True, top_logprobs=2, max_completion_tokens=3,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *parts, last = events(reply)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6  # type: ignore[index]
    for index in (0, 1):
        own = [c for part in parts for c in part["choices"] if c["index"] == index]  # type: ignore[attr-defined]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == "".join(PIECES)
        assert own[-1]["finish_reason"] == "length"
        tokens = [t for c in own if c["logprobs"] for t in c["logprobs"]["content"]]
        assert [t["token"] for t in tokens] == list(PIECES)
        assert all(len(t["top_logprobs"]) == 2 for t in tokens)
        assert tokens[0]["bytes"] == list(b"Ans")


def test_a_stop_string_of_several_bytes_a_character_over_token_borders() -> None:
    # One byte a token: the stop begins and ends inside of characters' tokens.
    text = "né 🙂🙃 done"
    engine = FakeEngine(respond=lambda request: [*text.encode(), EOS])
    with live_server(service_for(engine, piece_tokenizer())) as url:
        for stop, kept in (("🙃", "né 🙂"), ("é 🙂", "n"), ("🙂🙃 d", "né "), ("🙂x", text)):
            plain = post(url, stop=stop, max_tokens=100).json()["choices"][0]
            assert plain["text"] == kept
            parts = events(post(url, stop=stop, max_tokens=100, stream=True))
            shown = [part["choices"][0]["text"] for part in parts]  # type: ignore[index]
            assert "".join(shown) == kept
            assert not any("�" in piece for piece in shown)


def test_a_million_prompts_are_refused_and_others_are_served_meanwhile(url: str) -> None:
    body = b'{"prompt":[' + b"[5]," * 999_999 + b"[5]]}"
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        huge = pool.submit(httpx.post, url + COMPLETIONS, content=body, timeout=30)
        num_served = 0
        while not huge.done():
            assert post(url).status_code == 200
            num_served += 1
        reply = huge.result()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert "at most 1024 prompts, got 1000000" in reply.json()["error"]["message"]
    assert num_served >= 1
    assert time.monotonic() - began < 8.0  # a second on a machine that does nothing else


def test_large_bodies_take_half_of_the_loop_at_most_and_hold_bounded_memory() -> None:
    async def take_turns() -> tuple[float, float]:
        turns = Turns()
        began = time.monotonic()
        worked = 0.0
        for _ in range(4):
            async with turns.taken(LARGE_BODY_BYTES):
                start = time.monotonic()
                time.sleep(0.05)  # noqa: ASYNC251 - as parsing does, it holds the loop
                worked += time.monotonic() - start
        async with turns.taken(LARGE_BODY_BYTES - 1):  # a small one waits for nobody
            return worked, time.monotonic() - began

    worked, whole = asyncio.run(take_turns())
    # Three rests as long as the work before them.
    assert whole >= 1.7 * worked
    held = HeldBytes(100)
    with held.counted() as count:
        count(60)
        with held.counted() as other, pytest.raises(HttpError, match="hold 60 bytes") as caught:
            other(41)
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        count(40)
    with held.counted() as count:
        count(100)


def test_bodies_beyond_what_may_be_held_are_429() -> None:
    config = config_for_tests(limits=Limits(max_held_bytes=1000))
    with live_server(service_for(FakeEngine(), piece_tokenizer(), config)) as url:
        reply = post(url, prompt="a" * 2000)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["code"] == "bodies_full"
        assert post(url).status_code == 200


def test_who_asks_is_told_from_the_key_where_there_are_several() -> None:
    for keys, names in (
        (("one", "two"), {"key 0", "key 1"}),
        (("one",), {"127.0.0.1"}),
        ((), {"127.0.0.1"}),
    ):
        engine = FakeEngine()
        config = config_for_tests(api_keys=keys)
        with live_server(service_for(engine, piece_tokenizer(), config)) as url:
            for key in keys or ("",):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                body = {"prompt": ["a", "b"], "n": 2}
                reply = httpx.post(url + COMPLETIONS, json=body, headers=headers)
                assert reply.status_code == 200
        assert {request.client for request in engine.seen} == names
        # All sequences of a request are one connection's.
        assert len({request.connection for request in engine.seen}) == max(len(keys), 1)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_many_sequences_enter_the_engine_a_batch_at_a_time(is_streamed: bool) -> None:
    engine = FakeEngine(step_s=0.001)
    most_open = 0

    def respond(request: object) -> list[int]:
        nonlocal most_open
        open_now = len(engine.seen) - len(engine.finished) - len(engine.aborted)
        most_open = max(most_open, open_now)
        return [65, EOS]

    engine.respond = respond
    config = config_for_tests(engine=EngineConfig("no-folder", max_num_seqs=4))
    with live_server(service_for(engine, piece_tokenizer(), config)) as url:
        reply = post(url, prompt=["a"] * 100, n=2, stream=is_streamed)
        assert reply.status_code == 200
    assert len(engine.seen) == 200
    assert most_open <= 4 + 32
    if is_streamed:
        parts = events(reply)
        ended = [c["index"] for p in parts for c in p["choices"] if c["finish_reason"]]  # type: ignore[attr-defined]
        assert sorted(ended) == list(range(200))
    else:
        assert [c["text"] for c in reply.json()["choices"]] == ["A"] * 200
