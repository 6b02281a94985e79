"""Random hostile bodies at every route: no 5xx, no hang, and a normal client is served."""

from __future__ import annotations

import json
import random
import threading
import time

import httpx
import pytest
from fake_engine import EOS, FakeEngine, live_server, piece_tokenizer, service_for

from moeserve.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

ROUTES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
USUAL = {
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "tokens": [65],
}
PLAUSIBLE: dict[str, object] = {
    "n": 2, "best_of": 3, "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1,
    "stop": ["B"], "stream": True, "logprobs": 2, "echo": True, "min_tokens": 1, "user": "u",
    "logit_bias": {"65": 1}, "ignore_eos": True, "return_token_ids": True, "prompt_logprobs": 1,
}  # fmt: skip
ODD: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 10**9, 10**30, -(2**63), 2**64, 0.5, -0.0, 1e308, "", "a",
    "é🙂", "\u0000", "x" * 5000, "{{ 1/0 }}",
    [], [[]], {}, [None], [True], ["a", 1], [[1], [2]], [-1],
    [10**12], [1.5], [0] * 3000, {"a": 1}, {"1": 1}, {"": {}}, {"type": "text"}, ["stop"] * 70,
    [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "tool", "content": "x"}], {"include_usage": True}, {"include_usage": "yes"},
)  # fmt: skip


def hostile_body(rng: random.Random, path: str) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(200))
    names = [*ROUTES[path].model_fields, "suffix", "tools", "unknown_field", "max_token"]
    body = {name: USUAL[name] for name in USUAL if name in ROUTES[path].model_fields}
    for name in rng.sample(names, rng.randrange(4)):
        is_odd = rng.random() < 0.6 or name not in PLAUSIBLE
        body[name] = rng.choice(ODD) if is_odd else PLAUSIBLE[name]
    text = json.dumps(body)
    if kind < 0.2:  # cut or damaged
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", "}", "\x00", '"', "[", "NaN"]) + text[place + 1 :]
    return text.encode("utf-8", "surrogatepass")


def run_hostile(num_requests: int, seed: int) -> dict[int, int]:
    """Send them; return how often each status came."""
    rng = random.Random(seed)
    counts: dict[int, int] = {}
    engine = FakeEngine(respond=lambda request: [65, 66, EOS])
    done, wrong, waits = threading.Event(), [], []
    with live_server(service_for(engine, piece_tokenizer())) as url:

        def normal() -> None:
            with httpx.Client(timeout=20) as client:
                while not done.is_set():
                    start = time.monotonic()
                    reply = client.post(f"{url}/v1/completions", json={"prompt": "a"})
                    waits.append(time.monotonic() - start)
                    if reply.status_code != 200 or reply.json()["choices"][0]["text"] != "AB":
                        wrong.append(reply.text)
                    done.wait(0.02)

        thread = threading.Thread(target=normal)
        thread.start()
        try:
            with httpx.Client(timeout=20) as client:
                for _ in range(num_requests):
                    path = rng.choice(list(ROUTES))
                    body = hostile_body(rng, path)
                    reply = client.post(url + path, content=body)
                    assert reply.status_code < 500, (path, body[:300], reply.text)
                    if reply.status_code >= 400:
                        assert reply.json()["error"]["message"], (path, body[:300])
                    counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
        finally:
            done.set()
            thread.join()
    assert not wrong
    assert sorted(waits)[len(waits) // 2] < 2.0
    assert set(engine.finished) | set(engine.aborted) == {request.id for request in engine.seen}
    return counts


def test_hostile_bodies_never_give_a_5xx() -> None:
    counts = run_hostile(400, seed=1)
    # The generator must reach both sides, or it shows nothing.
    assert counts[400] > 150
    assert counts[200] > 20


@pytest.mark.slow
def test_five_thousand_hostile_bodies() -> None:
    counts = run_hostile(5000, seed=2)
    assert sum(counts.values()) == 5000
