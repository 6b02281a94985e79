from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from fake_engine import (
    EOS,
    INFO,
    FakeEngine,
    config_for_tests,
    live_server,
    piece_tokenizer,
    pieces_then_eos,
    service_for,
)

from moeserve.engine.client import EngineInfo, EngineStats
from moeserve.engine.request import Request
from moeserve.errors import Unsupported
from moeserve.server.limits import Limits
from moeserve.server.service import Service

TOKENIZER = piece_tokenizer("Ans", "wer 18\nQue", "stion: next")
ANSWER = pieces_then_eos("Ans", "wer 18\nQue", "stion: next")


def events_of(response: httpx.Response) -> list[dict[str, object]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def texts(events: list[dict[str, object]], index: int = 0) -> str:
    found = ""
    for event in events:
        for choice in event["choices"]:  # type: ignore[attr-defined]
            found += choice["text"] if choice["index"] == index else ""
    return found


def wait_until(condition: object, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def url():
    with live_server(service_for(FakeEngine(respond=ANSWER), TOKENIZER)) as base:
        yield base


def post(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


def test_ids_batches_and_order_of_choices() -> None:
    engine = FakeEngine(
        respond=lambda request: [*request.prompt_ids, EOS],
        delay_s=lambda request: 0.2 if request.prompt_ids[0] == ord("b") else 0.0,
    )
    with live_server(service_for(engine, TOKENIZER)) as url:
        one = post(url, prompt=[65, 66, 67], temperature=0, max_tokens=1).json()
        assert [c["index"] for c in one["choices"]] == [0]
        assert one["usage"]["prompt_tokens"] == 3
        two = post(url, prompt=[[65, 66, 67], [68, 69]], max_tokens=1).json()
        assert [(c["index"], c["text"]) for c in two["choices"]] == [(0, "A"), (1, "D")]
        assert two["usage"]["prompt_tokens"] == 5
        three = post(url, prompt=["a", "b", "c"], max_tokens=1).json()
        assert [(c["index"], c["text"]) for c in three["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
        many = post(url, prompt=["a", "b"], n=2, max_tokens=1).json()
        assert [c["text"] for c in many["choices"]] == ["a", "a", "b", "b"]
        assert many["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@pytest.mark.parametrize("prompt", [[], [[5, 6], "a"], [300], [[]], "", None, 5, [True], {}, [1.0]])
def test_bad_prompts_are_400_by_name_and_the_server_serves_on(url: str, prompt: object) -> None:
    reply = post(url, prompt=prompt)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"
    assert post(url, prompt="a").status_code == 200


def test_stop_string_split_over_tokens_streamed_and_not() -> None:
    engine = FakeEngine(respond=ANSWER)
    with live_server(service_for(engine, TOKENIZER)) as url:
        plain = post(url, prompt="q", stop="Question:").json()["choices"][0]
        assert (plain["text"], plain["finish_reason"]) == ("Answer 18\n", "stop")
        assert plain["stop_reason"] == "Question:"
        events = events_of(post(url, prompt="q", stop=["Question:"], stream=True))
        assert [event["choices"][0]["text"] for event in events] == ["Ans", "wer 18\n", ""]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        # Both were ended in the engine before its own end-of-text.
        wait_until(lambda: len(engine.aborted) == 2)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], 5, {}])
def test_stops_that_cannot_be_are_400(url: str, stop: object) -> None:
    reply = post(url, prompt="q", stop=stop)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stop")


def test_end_of_text_counts_as_a_token_and_stop_ids_are_named(url: str) -> None:
    whole = post(url, prompt="q").json()
    assert whole["usage"]["completion_tokens"] == 4
    assert whole["choices"][0]["stop_reason"] is None
    by_id = post(url, prompt="q", stop_token_ids=[EOS + 2], return_token_ids=True).json()
    choice = by_id["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Ans", EOS + 2)
    assert choice["token_ids"] == [EOS + 1, EOS + 2]
    assert choice["prompt_token_ids"] == [ord("q")]
    cut = post(url, prompt="q", max_tokens=2).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("Answer 18\nQue", "length")


def test_context_limit_has_one_rule() -> None:
    info = EngineInfo(16, 300, (EOS,), 10, 16)
    engine = FakeEngine(respond=lambda request: [65] * 100, info=info)
    with live_server(service_for(engine, TOKENIZER)) as url:

        def ask(length: int, **body: object) -> httpx.Response:
            return post(url, prompt=[65] * length, **body)

        assert ask(15, max_tokens=1).status_code == 200
        for length, wanted in ((16, 1), (17, 1), (10, 7)):
            reply = ask(length, max_tokens=wanted)
            assert reply.status_code == 400
            message = reply.json()["error"]["message"]
            assert "16 tokens" in message
            assert str(length) in message
            assert httpx.get(f"{url}/health").status_code == 200
            assert ask(3, max_tokens=1).status_code == 200
        assert ask(10).json()["usage"]["completion_tokens"] == 6
        assert ask(16).status_code == 400
        assert ask(1).json()["usage"]["completion_tokens"] == 15
        assert ask(3, max_tokens=None).json()["usage"]["completion_tokens"] == 13
        assert ask(16, max_tokens=0, echo=True).status_code == 200
        assert ask(20, max_tokens=1, truncate_prompt_tokens=8).json()["usage"]["prompt_tokens"] == 8
        models = httpx.get(f"{url}/v1/models").json()
        assert models["data"][0]["max_model_len"] == 16
        long = post(url, prompt="a" * 100_000)
        assert "16 tokens" in long.json()["error"]["message"]


def test_seeds_follow_the_documented_rule() -> None:
    engine = FakeEngine()
    with live_server(service_for(engine, TOKENIZER)) as url:
        for seed in (42, -1, 0, 2**63 - 1, -(2**63), None):
            assert post(url, prompt="a", seed=seed).status_code == 200
        assert [r.sampling.seed for r in engine.seen] == [
            42,
            2**63 - 1,
            0,
            2**63 - 1,
            0,
            None,
        ]
        for seed in (2**63, "42", True, 1.5, 10**40):
            reply = post(url, prompt="a", seed=seed)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "seed")
        engine.seen.clear()
        post(url, prompt=["a", "b"], n=3, seed=7)
        seeds = [r.sampling.seed for r in engine.seen]
        assert seeds[:3] == seeds[3:]
        assert len(set(seeds)) == 3
        assert seeds[0] == 7


def test_echo_and_log_probabilities_in_the_legacy_form(url: str) -> None:
    reply = post(url, prompt="hi", echo=True, max_tokens=1, logprobs=2, temperature=0).json()
    choice = reply["choices"][0]
    assert choice["text"] == "hiAns"
    assert choice["logprobs"]["tokens"] == ["h", "i", "Ans"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.125, -0.125]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][2] == {"\0": -0.5, "\1": -1.0, "Ans": -0.125}
    assert "prompt_logprobs" not in choice
    scored = post(url, prompt="hi", echo=True, max_tokens=0, logprobs=0).json()
    assert scored["choices"][0]["text"] == "hi"
    assert scored["usage"]["completion_tokens"] == 0
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 2
    ours = post(url, prompt="hi", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    assert ours["prompt_logprobs"] == [
        None,
        {
            "105": {"logprob": -0.125, "rank": 2, "decoded_token": "i"},
            "0": {"logprob": -0.5, "rank": 1, "decoded_token": "\0"},
        },
    ]
    streamed = events_of(post(url, prompt="hi", echo=True, logprobs=1, stream=True, max_tokens=2))
    assert texts(streamed) == "hiAnswer 18\nQue"
    assert streamed[0]["choices"][0]["logprobs"]["tokens"] == ["h", "i"]
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in streamed]
    assert offsets == [[0, 1], [2], [5]]


def test_best_of_ranks_by_log_probability() -> None:
    # Candidate 0 of each prompt gets the worse tokens: log-probability falls with id modulo 8.
    engine = FakeEngine(respond=lambda r: [71 if r.id.endswith("-0") else 64, EOS])
    with live_server(service_for(engine, TOKENIZER)) as url:
        reply = post(url, prompt="a", best_of=3, n=1).json()
        assert [c["text"] for c in reply["choices"]] == ["@"]
        assert reply["choices"][0]["index"] == 0
        assert reply["usage"]["completion_tokens"] == 6
        refused = post(url, prompt="a", best_of=2, n=1, stream=True)
        assert refused.json()["error"]["param"] == "best_of"


def test_stream_of_many_choices_with_usage(url: str) -> None:
    options = {"include_usage": True}
    reply = post(url, prompt=["a", "b"], n=2, stream=True, stream_options=options)
    events = events_of(reply)
    assert [texts(events, index) for index in range(4)] == ["Answer 18\nQuestion: next"] * 4
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 16
    assert all(event["usage"] is None for event in events[:-1])
    running = {"continuous_usage_stats": True}
    events = events_of(post(url, prompt="a", stream=True, stream_options=running))
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4]


def test_characters_over_tokens_in_a_stream() -> None:
    text = "né 日本 🙂 done"
    engine = FakeEngine(respond=lambda request: [*text.encode(), EOS])
    with live_server(service_for(engine, TOKENIZER)) as url:
        events = events_of(post(url, prompt="a", stream=True, max_tokens=100))
        assert (
            texts(events)
            == text
            == post(url, prompt="a", max_tokens=100).json()["choices"][0]["text"]
        )
        assert all("�" not in e["choices"][0]["text"] for e in events)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_away_ends_its_sequences(is_streamed: bool) -> None:
    engine = FakeEngine(respond=lambda request: [65] * 4000, step_s=0.01)
    with live_server(service_for(engine, TOKENIZER)) as url:

        async def leave() -> None:
            async with httpx.AsyncClient() as client:
                body = {"prompt": ["a", "b"], "max_tokens": 4000, "stream": is_streamed}
                ask = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body))
                while len(engine.seen) < 2:  # noqa: ASYNC110 - a list in another thread
                    await asyncio.sleep(0.005)
                ask.cancel()
                await asyncio.gather(ask, return_exceptions=True)

        asyncio.run(leave())
        wait_until(lambda: len(engine.aborted) == 2)
        assert post(url, prompt="c", max_tokens=1).status_code == 200


def test_engine_errors_are_500_and_never_an_empty_answer() -> None:
    engine = FakeEngine(fail=lambda r: "out of luck" if r.prompt_ids == (ord("x"),) else "")
    with live_server(service_for(engine, TOKENIZER)) as url:
        reply = post(url, prompt=["a", "x"])
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "out of luck"
        events = events_of(post(url, prompt="x", stream=True))
        assert events[-1]["error"]["message"] == "out of luck"
        assert post(url, prompt="a").status_code == 200


def test_health_through_the_life_of_a_server() -> None:
    engine = FakeEngine()
    ready = service_for(engine, TOKENIZER)
    loading = Service(config_for_tests())
    with live_server(loading) as url:
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/health").json() == {"status": "loading"}
        reply = post(url, prompt="a")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert httpx.get(f"{url}/v1/models").status_code == 503
        assert "vllm:num_requests_running" in httpx.get(f"{url}/metrics").text
    with live_server(ready) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ping").status_code == 200
        engine.is_alive_now = False
        assert httpx.get(f"{url}/health").json() == {"status": "failed"}
        assert post(url, prompt="a").status_code == 503


def test_metrics_have_the_names_that_are_scraped(url: str) -> None:
    post(url, prompt="abc")
    text = httpx.get(f"{url}/metrics").text
    lines = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    label = '{model_name="fake"}'
    assert float(lines["vllm:num_requests_running" + label]) == 3
    assert float(lines["vllm:num_requests_waiting" + label]) == 2
    assert float(lines["vllm:kv_cache_usage_perc" + label]) == 0.25
    assert float(lines["moeserve:padding_rows_total" + label]) == 7
    assert float(lines["moeserve:nan_rows_total" + label]) == 0
    assert float(lines["moeserve:steps_total" + label]) == 0
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        assert float(lines[f"vllm:{name}" + label]) >= 3
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
    ):
        assert float(lines[f"vllm:{name}_count" + label]) >= 1
    assert 'vllm:request_success_total{finished_reason="stop",model_name="fake"}' in text
    assert "vllm:prefix_cache_hits_total" in text


def test_api_key_guards_the_api_and_leaves_probes_open() -> None:
    config = config_for_tests(api_keys=("right", "other"))
    with live_server(service_for(FakeEngine(), TOKENIZER, config)) as url:
        for path in ("/v1/models", "/tokenizer_info", "/v1/backends"):
            assert httpx.get(url + path).status_code == 401
        bad = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer wröng".encode()})
        assert bad.json()["error"]["code"] == "invalid_api_key"
        for key in ("right", "other"):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert httpx.get(url + path).status_code == 200


def test_queue_full_is_429_with_retry_after_and_room_comes_back() -> None:
    engine = FakeEngine(respond=lambda request: [65] * 50, step_s=0.01)
    config = config_for_tests(limits=Limits(max_queue=4))
    with live_server(service_for(engine, TOKENIZER, config)) as url:
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(post, url, prompt="a", n=4, max_tokens=50)
            wait_until(lambda: len(engine.seen) == 4)
            full = post(url, prompt="b")
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            assert busy.result().status_code == 200
        assert post(url, prompt="b", max_tokens=1).status_code == 200


def test_models_tokens_and_other_short_routes(url: str) -> None:
    assert httpx.get(f"{url}/v1/models/fake").json()["id"] == "fake"
    assert httpx.get(f"{url}/v1/models/nope").status_code == 404
    assert post(url, prompt="a", model="nope").json()["error"]["code"] == "model_not_found"
    got = httpx.post(f"{url}/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert got["tokens"] == [104, 195, 169]
    assert (got["count"], got["max_model_len"]) == (3, INFO.max_model_len)
    back = httpx.post(f"{url}/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": "hé"}
    info = httpx.get(f"{url}/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<eos>", None)
    assert httpx.get(f"{url}/v1/evidence").json()["num_moe_layers"] == 4
    assert httpx.get(f"{url}/version").json()["version"]
    missing = httpx.get(f"{url}/v1/nope")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.get(f"{url}/v1/completions").status_code == 405


def test_openai_package_sync_stream_and_async(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["fake"]
    whole = client.completions.create(model="fake", prompt="q", max_tokens=8, logprobs=1)
    assert whole.choices[0].text == "Answer 18\nQuestion: next"
    stream = client.completions.create(model="fake", prompt="q", stream=True, stop=["Question:"])
    assert "".join(part.choices[0].text for part in stream) == "Answer 18\n"
    messages = [{"role": "user", "content": "q"}]
    chat = client.chat.completions.create(
        model="fake", messages=messages, logprobs=True, top_logprobs=2, max_completion_tokens=2
    )
    assert chat.choices[0].message.content == "Answer 18\nQue"
    assert chat.choices[0].finish_reason == "length"
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = client.chat.completions.create(
        model="fake", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    got = list(parts)
    assert got[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in got if p.choices) == (
        "Answer 18\nQuestion: next"
    )
    assert got[-1].usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError, match="n: want 1 to 128"):
        client.completions.create(model="fake", prompt="q", n=10**9)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="q")

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as many_client:
            asks = [many_client.completions.create(model="fake", prompt="q") for _ in range(64)]
            return [reply.choices[0].text for reply in await asyncio.gather(*asks)]

    assert asyncio.run(many()) == ["Answer 18\nQuestion: next"] * 64


def test_a_slow_reader_holds_nobody_up() -> None:
    engine = FakeEngine(respond=lambda request: [65] * 2000)
    with live_server(service_for(engine, TOKENIZER)) as url:
        started, done = threading.Event(), threading.Event()

        def dawdle() -> int:
            body = {"prompt": "a", "max_tokens": 2000, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
                parts = reply.iter_raw()
                size = len(next(parts))
                started.set()
                done.wait(20)
                return size + sum(len(part) for part in parts)

        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(dawdle)
            assert started.wait(10)
            for _ in range(20):
                assert post(url, prompt="b", max_tokens=1).status_code == 200
            done.set()
            assert slow.result() > 2000 * 50


def test_request_reaches_the_engine_as_asked() -> None:
    engine = FakeEngine()
    with live_server(service_for(engine, TOKENIZER)) as url:
        reply = post(
            url,
            prompt="ab",
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.2,
            logit_bias={"65": 5, "66": -100},
            stop_token_ids=[1, 2],
            ignore_eos=True,
            logprobs=3,
            priority=4,
            request_id="mine",
            user="someone",
            suffix=None,
            best_of=1,
            use_beam_search=False,
            response_format=None,
        )
        assert reply.json()["id"] == "cmpl-mine"
    request: Request = engine.seen[0]
    sampling = request.sampling
    assert request.prompt_ids == (97, 98)
    assert request.priority == 4
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -1)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == {65: 5.0, 66: -100.0}
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((1, 2), True)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (3, None)


def test_what_goes_wrong_inside_is_an_error_in_the_usual_form() -> None:
    class Broken(FakeEngine):
        async def profile(self) -> dict[str, object]:
            raise Unsupported("no profiler here")

        def stats(self) -> EngineStats:
            raise ZeroDivisionError("a fault of the server's own")

    with live_server(service_for(Broken(), TOKENIZER)) as url:
        known = httpx.get(f"{url}/v1/evidence")
        assert (known.status_code, known.json()["error"]["message"]) == (500, "no profiler here")
        unknown = httpx.get(f"{url}/metrics")
        assert unknown.status_code == 500
        assert "log" in unknown.json()["error"]["message"]
        assert "ZeroDivision" not in unknown.text
        assert post(url, prompt="a").status_code == 200
