from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, config_for_tests, live_server, piece_tokenizer, service_for

from moeserve.server.folder import chat_template_of
from moeserve.server.limits import Limits

TOKENIZER = piece_tokenizer()
LOOPS = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
USER = [{"role": "user", "content": "hi"}]


def ask(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": USER, **body}, timeout=30)


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine):
    with live_server(service_for(engine, TOKENIZER)) as base:
        yield base


@pytest.fixture(scope="module")
def open_url():
    config = config_for_tests(
        has_request_templates=True, limits=Limits(template_timeout_s=1.0, max_template_chars=10_000)
    )
    with live_server(service_for(FakeEngine(), TOKENIZER, config)) as base:
        assert ask(base).status_code == 200  # the child process is up
        yield base


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.seen[-1].prompt_ids).decode()


def test_messages_become_the_template_s_prompt(url, engine) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    reply = ask(url, messages=messages, n=2)
    assert prompt_of(engine) == "[system]be brief[user]a\nb[assistant]"
    assert [c["message"]["content"] for c in reply.json()["choices"]] == ["Hi", "Hi"]
    assert ask(url, add_generation_prompt=False).status_code == 200
    assert prompt_of(engine) == "[user]hi"
    started = [*USER, {"role": "assistant", "content": "well "}]
    assert ask(url, messages=started, continue_final_message=True).status_code == 200
    assert prompt_of(engine) == "[user]hi[assistant]well"


def test_text_that_looks_like_a_template_stays_text(url, engine) -> None:
    text = "{{ 7 * 7 }}{% for x in range(9) %}{{ x }}{% endfor %}<eos>"
    assert ask(url, messages=[{"role": "user", "content": text}]).status_code == 200
    assert text in prompt_of(engine)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"prompt": "a"}, "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_named(url, body, param) -> None:
    reply = ask(url, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_endless_template_ends_at_its_limit_and_others_are_served(open_url) -> None:
    with ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        stuck = pool.submit(ask, open_url, chat_template=LOOPS)
        num_served = 0
        while not stuck.done():
            ok = httpx.post(f"{open_url}/v1/completions", json={"prompt": "a"}, timeout=30)
            assert ok.status_code == 200
            num_served += 1
        reply = stuck.result()
        assert 1.0 <= time.monotonic() - start < 20.0
    assert num_served > 3
    assert reply.status_code == 400
    assert "longer than 1 s" in reply.json()["error"]["message"]
    # The next conversation gets a fresh child process, whose start is outside its limit.
    assert ask(open_url).status_code == 200


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ 'x' * 20000 }}", "more than 10000 characters"),
        ("{% for a in range(9999) %}xx{% endfor %}", "more than 10000 characters"),
        ("{{ 'x' * 100000000000 }}", "out of memory"),
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ undefined.attribute }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for a in range(10000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_template_faults_are_400_with_their_message(open_url, template, part) -> None:
    reply = ask(open_url, chat_template=template)
    assert reply.status_code == 400
    assert part in reply.json()["error"]["message"]
    assert ask(open_url).status_code == 200


def test_templates_cannot_reach_the_interpreter(open_url, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{{ self.__init__.__globals__['__builtins__']['open']('MARKER', 'w') }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ lipsum.__globals__ }}",
    ):
        reply = ask(open_url, chat_template=template.replace("MARKER", str(marker)))
        assert reply.status_code in (200, 400)
        assert "subclasses" not in reply.text
    assert not marker.exists()


def test_model_without_a_template_says_so() -> None:
    from dataclasses import replace

    with live_server(service_for(FakeEngine(), replace(TOKENIZER, chat_template=""))) as url:
        reply = ask(url)
        assert reply.status_code == 400
        assert "no chat template" in reply.json()["error"]["message"]


def test_template_of_the_command_line_is_a_file_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    for given in (str(path), "{{ messages }}"):
        config = config_for_tests(chat_template=given)
        assert chat_template_of(config, TOKENIZER) == "{{ messages }}"
    assert chat_template_of(config_for_tests(), TOKENIZER) == TOKENIZER.chat_template
