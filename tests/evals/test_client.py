from __future__ import annotations

import asyncio
import json
import time

import pytest
from fake_server import Action, FakeServer, Request, error

from evalsuite.client import (
    KEEPALIVE_S,
    Client,
    ClientSettings,
    Reply,
    RequestFailure,
)
from evalsuite.retries import RetryPolicy
from evalsuite.wire import SamplingSettings, build_body, error_message

FAST = RetryPolicy(max_retries=2, base_s=0.01, cap_s=0.05)
SAMPLING = SamplingSettings("fake", 256, 0.0, 42, stop=("Question",))


def ask(
    server: FakeServer,
    *prompts: str,
    sampling: SamplingSettings = SAMPLING,
    timeout_s: float = 10.0,
    retry: RetryPolicy = FAST,
    api_key: str = "",
    url: str = "",
) -> tuple[Reply, ...] | RequestFailure:
    settings = ClientSettings(url or server.url, sampling, timeout_s, retry, api_key)

    async def run() -> tuple[Reply, ...] | RequestFailure:
        async with Client(settings) as client:
            return await client.ask(build_body(sampling, prompts or ("p",)), len(prompts or "p"))

    return asyncio.run(run())


def failure(outcome: tuple[Reply, ...] | RequestFailure) -> RequestFailure:
    assert isinstance(outcome, RequestFailure)
    return outcome


def replies(outcome: tuple[Reply, ...] | RequestFailure) -> tuple[Reply, ...]:
    assert isinstance(outcome, tuple), outcome
    return outcome


def test_the_body_has_exactly_the_fields_of_the_script_and_the_model() -> None:
    with FakeServer(lambda request: Action(("18",), usage=(11, 4))) as server:
        (reply,) = replies(ask(server, "Question: q\nAnswer:"))
    assert server.requests[0].route == "/v1/completions"
    assert server.requests[0].body == {
        "model": "fake",
        "prompt": "Question: q\nAnswer:",
        "max_tokens": 256,
        "temperature": 0.0,
        "seed": 42,
        "stop": ["Question"],
    }
    assert (reply.text, reply.finish_reason, reply.retries) == ("18", "stop", 0)
    assert (reply.prompt_tokens, reply.completion_tokens) == (11, 4)
    assert reply.latency_s > 0


def test_chat_sends_one_user_message() -> None:
    chat = SamplingSettings("fake", 8, 0.5, 1, is_chat=True)
    with FakeServer(lambda request: Action(("18",))) as server:
        (reply,) = replies(ask(server, "p", sampling=chat, url=server.url + "/v1/"))
    assert server.requests[0].route == "/v1/chat/completions"
    assert server.requests[0].body["messages"] == [{"role": "user", "content": "p"}]
    assert "prompt" not in server.requests[0].body
    assert reply.text == "18"


def test_chat_whose_content_went_to_the_reasoning_parser_is_an_empty_answer() -> None:
    message = {"content": None, "reasoning_content": "thinking on and on"}
    payload = json.dumps({"choices": [{"message": message, "finish_reason": "length"}]}).encode()
    chat = SamplingSettings("fake", 8, 0.0, 1, is_chat=True)
    with FakeServer(lambda request: Action(payload=payload)) as server:
        (reply,) = replies(ask(server, sampling=chat))
    assert (reply.text, reply.finish_reason) == ("", "length")


def test_choices_are_paired_by_index_not_by_their_order() -> None:
    with FakeServer(lambda r: Action(("zero", "one", "two"), order=(2, 0, 1))) as server:
        found = replies(ask(server, "a", "b", "c"))
    assert [reply.text for reply in found] == ["zero", "one", "two"]
    # Usage is the request's: it is counted once.
    assert [reply.prompt_tokens for reply in found] == [7, 0, 0]


def test_server_errors_are_retried_counted_and_listed() -> None:
    def script(request: Request) -> Action:
        return error(500, "out of luck") if request.attempt < 2 else Action(("18",))

    with FakeServer(script) as server:
        (reply,) = replies(ask(server))
    assert reply.text == "18"
    assert reply.retries == 2
    assert reply.retry_errors == ("HTTP 500: out of luck", "HTTP 500: out of luck")


def test_a_repeat_goes_by_a_connection_of_its_own() -> None:
    """Kept connections may all be closed by now; repeats must not be spent on finding that out."""

    def script(request: Request) -> Action:
        return error(500, "x") if request.attempt < 2 else Action(("18",))

    with FakeServer(script) as server:
        assert replies(ask(server))[0].retries == 2
        assert server.connections == 3
    closing = [request.headers.get("connection") for request in server.requests]
    assert closing == [None, "close", "close"]


def test_first_attempts_share_a_connection() -> None:
    with FakeServer(lambda request: Action(("18",))) as server:
        settings = ClientSettings(server.url, SAMPLING, 10.0, FAST)

        async def run() -> None:
            async with Client(settings) as client:
                for prompt in ("a", "b", "c"):
                    replies(await client.ask(build_body(SAMPLING, [prompt])))

        asyncio.run(run())
        assert (len(server.requests), server.connections) == (3, 1)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again_and_then_given_up(status: int) -> None:
    with FakeServer(lambda request: error(status, "busy")) as server:
        found = failure(ask(server))
    assert (found.kind, found.status, found.retries) == ("http", status, 2)
    assert len(server.requests) == 3
    assert found.message == f"HTTP {status}: busy"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_refusal_is_final_and_carries_the_servers_words(status: int) -> None:
    with FakeServer(lambda request: error(status, "16 tokens, limit 8")) as server:
        found = failure(ask(server))
    assert len(server.requests) == 1
    assert (found.status, found.retries) == (status, 0)
    assert found.message == f"HTTP {status}: 16 tokens, limit 8"


def test_retry_after_is_honoured_up_to_a_cap() -> None:
    def script(request: Request) -> Action:
        return error(429, "slow", Retry_After="0.3") if not request.attempt else Action(("18",))

    with FakeServer(script) as server:
        started = time.perf_counter()
        replies(ask(server))
        assert time.perf_counter() - started >= 0.3
    policy = RetryPolicy(base_s=0.5, cap_s=8.0, retry_after_cap_s=30.0)
    assert policy.pause_s(0, 86400.0) == 30.0
    assert policy.pause_s(0, -5.0) == 0.0
    for attempt, most in enumerate((0.5, 1.0, 2.0, 4.0, 8.0, 8.0)):
        pauses = [policy.pause_s(attempt, None) for _ in range(50)]
        assert most / 2 <= min(pauses) <= max(pauses) <= most
        assert len(set(pauses)) > 1


def test_an_odd_retry_after_is_no_pause_for_ever() -> None:
    for value in ("soon", "nan", "Wed, 21 Oct 2026 07:28:00 GMT"):

        def script(request: Request, value: str = value) -> Action:
            return error(429, "x", Retry_After=value) if not request.attempt else Action(("18",))

        with FakeServer(script) as server:
            assert replies(ask(server))[0].text == "18"


def test_a_time_out_names_its_type_and_limit_and_is_not_repeated() -> None:
    with FakeServer(lambda request: Action(("18",), delay_s=30.0)) as server:
        found = failure(ask(server, timeout_s=0.25))
    assert found.kind == "timeout"
    assert found.message == "TimeoutError: no full reply within 0.25 s"
    assert len(server.requests) == 1


def test_time_spent_in_the_queue_is_not_the_requests_own() -> None:
    """Four requests of 0.3 s one after the other, each within its second."""
    with FakeServer(lambda request: Action(("18",), delay_s=0.3)) as server:
        settings = ClientSettings(server.url, SAMPLING, 1.0, FAST)

        async def run() -> list[tuple[Reply, ...] | RequestFailure]:
            gate = asyncio.Semaphore(1)

            async def one(client: Client) -> tuple[Reply, ...] | RequestFailure:
                async with gate:
                    return await client.ask(build_body(SAMPLING, ["p"]))

            async with Client(settings) as client:
                return await asyncio.gather(*(one(client) for _ in range(4)))

        assert all(isinstance(outcome, tuple) for outcome in asyncio.run(run()))


@pytest.mark.parametrize("cut_after", [0, 1, 30, 60])
def test_half_a_body_is_never_an_answer(cut_after: int) -> None:
    with FakeServer(lambda request: Action(("18",), cut_after=cut_after)) as server:
        found = failure(ask(server))
    assert found.kind == "connection"
    assert found.retries == 2
    assert len(server.requests) == 3
    assert all(message.strip() for message in found.retry_errors)


def test_a_dropped_line_has_a_message() -> None:
    with FakeServer(lambda request: Action(is_dropped=True)) as server:
        found = failure(ask(server))
    assert found.kind == "connection"
    assert "Disconnected" in found.message
    assert len(found.message) > len("ServerDisconnectedError: ")


def test_nobody_listening_is_a_connection_failure() -> None:
    with FakeServer(lambda request: Action()) as server:
        url = server.url
    found = failure(ask(server, url=url))
    assert found.kind == "connection"
    assert str(server.port) in found.message


CHOICE = {"index": 0, "text": "#### 18", "finish_reason": "stop"}
MALFORMED = {
    "no choices": {"choices": []},
    "choices null": {"choices": None},
    "no key": {"id": "x"},
    "text null": {"choices": [{"index": 0, "text": None}]},
    "text a number": {"choices": [{"index": 0, "text": 18}]},
    "no text": {"choices": [{"index": 0}]},
    "error with 200": {"error": {"message": "engine is gone", "code": 500}},
    "old error with 200": {"object": "error", "message": "engine is gone"},
    "choice no object": {"choices": ["#### 18"]},
    "choices an object": {"choices": {"0": CHOICE}},
    "aborted": {"choices": [{**CHOICE, "finish_reason": "abort"}]},
    "two choices": {"choices": [CHOICE, {**CHOICE, "index": 1}]},
    "index of another": {"choices": [{**CHOICE, "index": 3}]},
    "a list": [CHOICE],
    "a string": "#### 18",
}


@pytest.mark.parametrize("payload", [*MALFORMED.values()], ids=[*MALFORMED])
def test_a_malformed_reply_is_a_failure_never_an_answer(payload: object) -> None:
    with FakeServer(lambda request: Action(payload=json.dumps(payload).encode())) as server:
        found = failure(ask(server))
    assert (found.kind, found.status, found.retries) == ("malformed", 200, 2)
    assert found.message.startswith("Malformed: ")


@pytest.mark.parametrize(
    "payload", [b"", b"<html>", b'{"choices": [{"te', b"\xff\xfe", b"[" * 200_000]
)
def test_what_is_no_json_is_a_failure(payload: bytes) -> None:
    with FakeServer(lambda request: Action(payload=payload)) as server:
        found = failure(ask(server))
    assert found.kind == "malformed"
    assert f"{len(payload)} bytes" in found.message


def test_an_error_inside_200_is_quoted() -> None:
    payload = json.dumps(MALFORMED["error with 200"]).encode()
    with FakeServer(lambda request: Action(payload=payload)) as server:
        assert "engine is gone" in failure(ask(server)).message


def test_a_missing_or_double_index_is_refused() -> None:
    def choices(*indices: int) -> bytes:
        return json.dumps({"choices": [{**CHOICE, "index": i} for i in indices]}).encode()

    for indices in ((0, 0), (0,), (1, 2), (0, 1, 2)):
        payload = choices(*indices)
        with FakeServer(lambda request, payload=payload: Action(payload=payload)) as server:
            assert str(list(indices)) in failure(ask(server, "a", "b")).message


def test_the_key_is_sent_and_never_shown() -> None:
    key = "sk-secret-of-mine"
    with FakeServer(lambda request: error(401, f"Incorrect API key: {key}")) as server:
        found = failure(ask(server, api_key=key))
    assert server.requests[0].headers["authorization"] == f"Bearer {key}"
    assert key not in repr(found)
    assert found.message == "HTTP 401: Incorrect API key: ***"
    assert key not in repr(ClientSettings("", SAMPLING, api_key=key))


def test_any_text_gets_there_and_back() -> None:
    text = '\ud800 \x00 \x1b[31m \U0001f9ee \u2028 \\ " \n'
    with FakeServer(lambda request: Action(tuple(request.prompts)), has_stop=False) as server:
        (reply,) = replies(ask(server, text))
    assert reply.text == text


def test_logprobs_and_token_ids_are_kept() -> None:
    details = {"token_logprobs": [-0.5, -1], "tokens": ["a", "b"]}
    body = {"choices": [{**CHOICE, "logprobs": details, "token_ids": [5, 6]}]}
    sampling = SamplingSettings("fake", 8, 0.0, 1, has_logprobs=True)
    with FakeServer(lambda request: Action(payload=json.dumps(body).encode())) as server:
        (reply,) = replies(ask(server, sampling=sampling))
    assert server.requests[0].body["logprobs"] == 1
    assert reply.token_logprobs == (-0.5, -1.0)
    assert reply.token_ids == (5, 6)


def test_error_bodies_of_all_forms_are_read() -> None:
    assert error_message(b'{"error": {"message": "a"}}') == "a"
    assert error_message(b'{"error": "b"}') == "b"
    assert error_message(b'{"message": "c"}') == "c"
    assert error_message(b'{"detail": [{"loc": ["x"]}]}') == '[{"loc": ["x"]}]'
    assert error_message(b"plain") == "plain"
    assert len(error_message(b"x" * 10**6)) == 500


def test_our_keep_alive_is_shorter_than_the_servers() -> None:
    # uvicorn's `timeout_keep_alive`, which vLLM and SGLang leave as it is.
    assert KEEPALIVE_S < 5.0
    from moeserve import args

    parsed = args.parse(["qwen3-30b-a3b", "--load-format", "dummy"], {})
    assert parsed.keep_alive_s == args.ServeConfig.keep_alive_s > KEEPALIVE_S


def test_a_redirect_is_refused_with_where_it_leads_and_the_key_stays_here() -> None:
    with FakeServer(lambda request: Action(("18",))) as other:
        place = {"Location": f"{other.url}/v1/completions"}
        for status in (301, 302, 303, 307, 308):
            moved = Action(status=status, payload=b"", headers=place)
            with FakeServer(lambda request, moved=moved: moved) as server:
                found = failure(ask(server, api_key="sk-secret"))
            assert (found.kind, found.status, found.retries) == ("http", status, 0)
            assert found.message.startswith(f"HTTP {status}: redirected to {place['Location']}; ")
    assert not other.requests


def test_log_probabilities_nobody_asked_for_are_no_fault_and_asked_ones_must_be_numbers() -> None:
    odd = [{"token_logprobs": [None]}, {"token_logprobs": ["x"]}, {"token_logprobs": 5}]
    asked = SamplingSettings("fake", 8, 0.0, 1, has_logprobs=True)
    for details in odd:
        payload = json.dumps({"choices": [{**CHOICE, "logprobs": details}]}).encode()
        with FakeServer(lambda request, payload=payload: Action(payload=payload)) as server:
            assert replies(ask(server))[0].text == "#### 18"
            assert "log-probabilities" in failure(ask(server, sampling=asked)).message


def test_log_probabilities_of_the_chat_route() -> None:
    chat = SamplingSettings("fake", 8, 0.0, 1, is_chat=True, has_logprobs=True)
    message = {"role": "assistant", "content": "18"}
    for content, values in (([{"logprob": -0.5}, {"logprob": -1}], (-0.5, -1.0)), (None, ())):
        choice = {"index": 0, "message": message, "logprobs": {"content": content}}
        payload = json.dumps({"choices": [choice]}).encode()
        with FakeServer(lambda request, payload=payload: Action(payload=payload)) as server:
            assert replies(ask(server, sampling=chat))[0].token_logprobs == values
    for content in (5, ["x"], [{"logprob": None}]):
        choice = {"index": 0, "message": message, "logprobs": {"content": content}}
        payload = json.dumps({"choices": [choice]}).encode()
        with FakeServer(lambda request, payload=payload: Action(payload=payload)) as server:
            assert failure(ask(server, sampling=chat)).kind == "malformed"
