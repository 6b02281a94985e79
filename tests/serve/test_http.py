"""HTTP: prompts, stops, seeds, log-probabilities, streams, and what reaches the engine."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from fake_engine import EOS, FakeEngine, live_server, service_for
from http_helpers import ANSWER, TOKENIZER, events_of, post, texts
from run_helpers import wait_until

from moeserve.engine.client import EngineInfo
from moeserve.engine.request import Request


@pytest.fixture(scope="module")
def url():
    with live_server(service_for(FakeEngine(respond=ANSWER), TOKENIZER)) as base:
        yield base


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


def test_what_ends_a_sequence_is_kept_in_the_text_where_asked(url: str) -> None:
    kept = {"include_stop_str_in_output": True}
    by_id = {"prompt": "q", "stop_token_ids": [EOS + 2], "logprobs": 0}
    plain = post(url, **by_id).json()["choices"][0]
    whole = post(url, **by_id, **kept).json()["choices"][0]
    assert (plain["text"], whole["text"]) == ("Ans", "Answer 18\nQue")
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert whole["logprobs"][name] == plain["logprobs"][name]
    events = events_of(post(url, **by_id, **kept, stream=True))
    assert texts(events, 0) == whole["text"]
    # End of text is special, and shows only where special tokens do.
    assert post(url, prompt="q", **kept).json()["choices"][0]["text"] == "Answer 18\nQuestion: next"
    shown = post(url, prompt="q", **kept, skip_special_tokens=False).json()["choices"][0]
    assert shown["text"].endswith("next<eos>")
    assert shown["stop_reason"] is None


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
        # -1 keeps what `max_tokens` leaves, of ids and of any text.
        for prompt in ([65] * 20, "a" * 20, "b" * 100_000 + "a" * 16):
            cut = post(url, prompt=prompt, max_tokens=4, truncate_prompt_tokens=-1).json()
            assert (cut["usage"]["prompt_tokens"], cut["usage"]["completion_tokens"]) == (12, 4)
        assert engine.seen[-1].prompt_ids == (ord("a"),) * 12
        assert ask(20, max_tokens=16, truncate_prompt_tokens=-1).status_code == 400
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
    events = events_of(post(url, prompt="ab", echo=True, stream=True, stream_options=running))
    assert events[0]["choices"][0]["text"] == "ab"
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 4]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}


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
