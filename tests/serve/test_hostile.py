"""Random hostile bodies at every route: no 5xx, no hang, and a normal client is served."""

from __future__ import annotations

import random
import threading
import time

import httpx
from fake_engine import EOS, FakeEngine, live_server, piece_tokenizer, service_for
from hostile import ROUTES, hostile_body


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
