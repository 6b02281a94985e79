"""HTTP around the answers: health, metrics, keys, the queue, clients that leave or dawdle."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_engine import INFO, FakeEngine, config_for_tests, live_server, service_for
from http_helpers import ANSWER, TOKENIZER, events_of, post
from prometheus_client.parser import text_string_to_metric_families
from run_helpers import wait_until

from moeserve.engine.client import EngineStats
from moeserve.errors import Unsupported
from moeserve.server.limits import Limits
from moeserve.server.service import Service


@pytest.fixture(scope="module")
def url():
    with live_server(service_for(FakeEngine(respond=ANSWER), TOKENIZER)) as base:
        yield base


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


def test_engine_errors_are_500_and_never_an_empty_answer(caplog) -> None:
    engine = FakeEngine(fail=lambda r: "out of luck" if r.prompt_ids == (ord("x"),) else "")
    with live_server(service_for(engine, TOKENIZER)) as url:
        reply = post(url, prompt=["a", "x"], request_id="whole")
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "out of luck"
        events = events_of(post(url, prompt="x", stream=True, request_id="stream"))
        assert events[-1]["error"]["message"] == "out of luck"
        assert post(url, prompt="a").status_code == 200
        # Whoever looks after the server finds them by the id that the client was given.
        lines = [record.getMessage() for record in caplog.records]
        assert lines == [f"cmpl-{name} failed: out of luck" for name in ("whole", "stream")]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_what_a_stopping_server_could_not_finish_is_503(is_streamed: bool) -> None:
    # As the real engine does beyond the grace and after a second signal.
    engine = FakeEngine(fail=lambda r: "the server is shutting down", delay_s=lambda r: 0.3)
    service = service_for(engine, TOKENIZER)
    with live_server(service) as url, ThreadPoolExecutor(1) as pool:
        cut = pool.submit(post, url, prompt="a", stream=is_streamed)
        wait_until(lambda: len(engine.seen) == 1)
        service.status = "stopping"
        reply = cut.result()
        error = (events_of(reply)[-1] if is_streamed else reply.json())["error"]
        assert (error["code"], error["message"]) == ("stopping", "the server is shutting down")
        if not is_streamed:
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


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


def figure(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name + "{"))


def test_tokens_are_counted_as_they_are_made_and_once() -> None:
    engine = FakeEngine(respond=lambda request: [65] * 4000, step_s=0.002)
    with live_server(service_for(engine, TOKENIZER)) as url:
        body = {"prompt": "abc", "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            parts = reply.iter_raw()  # kept: dropping it would close the connection
            next(parts)
            # It has not ended, and never will: its client goes away.
            wait_until(lambda: figure(url, "vllm:generation_tokens_total") > 10)
            assert figure(url, "vllm:prompt_tokens_total") == 3
            assert figure(url, "vllm:e2e_request_latency_seconds_count") == 0
        wait_until(lambda: len(engine.aborted) == 1)
        made = figure(url, "vllm:generation_tokens_total")
        used = post(url, prompt="abcd", max_tokens=7, n=2).json()["usage"]
        assert figure(url, "vllm:generation_tokens_total") - made == used["completion_tokens"] == 14
        assert figure(url, "vllm:prompt_tokens_total") == 3 + 2 * 4  # read by each candidate
        post(url, prompt="abcde", max_tokens=0, echo=True)  # no token at all
        assert figure(url, "vllm:prompt_tokens_total") == 16


def test_figures_are_explained_and_parse(url: str) -> None:
    post(url, prompt="abc")
    families = list(text_string_to_metric_families(httpx.get(f"{url}/metrics").text))
    assert len({family.name for family in families}) == len(families) > 20
    for family in families:
        assert family.documentation.endswith(".")
        assert "_" not in family.documentation


def test_probes_may_ask_for_the_head_alone(url: str) -> None:
    for path in ("/health", "/ping", "/v1/models", "/v1/models/fake", "/metrics"):
        head, whole = httpx.head(url + path), httpx.get(url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert httpx.head(f"{url}/v1/completions").headers["allow"] == "POST"
    assert httpx.put(f"{url}/health").headers["allow"] == "GET"


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
    assert httpx.get(f"{url}/v1/models/").json() == httpx.get(f"{url}/v1/models").json()
    assert post(url, prompt="a", model="nope").json()["error"]["code"] == "model_not_found"
    got = httpx.post(f"{url}/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert got["tokens"] == [104, 195, 169]
    assert (got["count"], got["max_model_len"]) == (3, INFO.max_model_len)
    back = httpx.post(f"{url}/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": "hé"}
    info = httpx.get(f"{url}/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<eos>", None)
    assert httpx.get(f"{url}/v1/evidence").json()["num_moe_layers"] == 4
    said = httpx.get(f"{url}/version").json()
    assert said["version"]
    assert len(said["source"]) == 16
    missing = httpx.get(f"{url}/v1/nope")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.get(f"{url}/v1/completions").status_code == 405


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


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/completion", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/embeddings", None),
    ],
)
def test_a_wrong_path_comes_with_the_closest(url: str, path: str, right: str | None) -> None:
    message = httpx.post(url + path, json={}).json()["error"]["message"]
    assert message == f"Not Found: POST {path}" + (f"; did you mean {right}?" if right else "")
