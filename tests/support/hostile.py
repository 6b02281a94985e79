"""Requests that mean harm, made from a seed, and a program that floods a server with them.

`hostile_body` damages fields and JSON; `heavy_body` is valid and asks for as much as it may. Run as
`python hostile.py URL KEY SEED WORKERS`, it sends while its input says so: a line `go` starts, a
line `stop` ends after the open requests and prints what has happened so far as JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

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
# A heavy request is left when it is not answered by then, as a client does that only wants harm.
PATIENCE_S = 1.0
# Everything else has to be answered.
LIMIT_S = 60.0
HEAVY_SHARE = 0.04


def hostile_body(rng: random.Random, path: str) -> bytes:
    """A body for a route: usual fields with odd values, cut or damaged JSON, or noise."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(200))
    names = [*ROUTES[path].model_fields, "suffix", "tools", "unknown_field", "max_token"]
    body: dict[str, object] = {
        name: USUAL[name] for name in USUAL if name in ROUTES[path].model_fields
    }
    if "messages" in body and rng.random() < 0.9:
        body["max_tokens"] = 16  # absent, it is all that the context leaves: seconds of work
    for name in rng.sample(names, rng.randrange(4)):
        is_odd = rng.random() < 0.6 or name not in PLAUSIBLE
        body[name] = rng.choice(ODD) if is_odd else PLAUSIBLE[name]
    text = json.dumps(body)
    if kind < 0.2:  # cut or damaged
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", "}", "\x00", '"', "[", "NaN"]) + text[place + 1 :]
    return text.encode("utf-8", "surrogatepass")


def heavy_body(rng: random.Random) -> tuple[str, bytes]:
    """A route and a body that the server has to take, and that costs it much."""
    words = " ".join(rng.choices(["apples", "seven", "and", "Tom", "12", "é🙂"], k=600))
    long = {"max_tokens": 3000, "ignore_eos": True, "temperature": 1.0}
    completion = "/v1/completions"
    path, body = rng.choice(
        [
            (completion, {"prompt": words, "n": 128, **long}),
            (completion, {"prompt": "a", "best_of": 128, **long}),
            (completion, {"prompt": [words[i:] for i in range(200)], **long, "max_tokens": 8}),
            (completion, {"prompt": [[rng.randrange(300, 900)] * 40] * 1000, **long}),
            (completion, {"prompt": words, "n": 64, "stream": True, **long}),
            (completion, {"prompt": words * 3, "echo": True, "logprobs": 20, **long}),
            (completion, {"prompt": words, "n": 32, "logprobs": 20, **long, "max_tokens": 500}),
            (completion, {"prompt": words, "n": 32, "repetition_penalty": 1.2, **long}),
            (completion, {"prompt": "a" * 2_000_000}),
            (completion, {"prompt": [5] * 2_000_000}),
            (completion, {"prompt": "a", "stop": ["x" * i for i in range(900, 964)], **long}),
            (completion, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1000)}, **long}),
            ("/tokenize", {"prompt": words * 100}),
            ("/detokenize", {"tokens": [300] * 500_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 1000}),
        ]
    )
    return path, json.dumps(body).encode()


class Flood:
    """Sends from several connections while it is told to.

    Attributes:
        statuses: How often each status came; 0 counts heavy requests that were left.
        faults: What must not happen, in words.
    """

    def __init__(self, url: str, key: str, seed: int, num_workers: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self.may_send = threading.Event()
        self.num_open = 0
        self._lock = threading.Condition()
        self._address = urlsplit(url)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        for number in range(num_workers):
            rng = random.Random(f"{seed}:{number}")
            threading.Thread(target=self._work, args=(rng,), daemon=True).start()

    def stop(self) -> None:
        """Let open requests end."""
        self.may_send.clear()
        with self._lock:
            self._lock.wait_for(lambda: not self.num_open)

    def _work(self, rng: random.Random) -> None:
        connection = None
        while True:
            self.may_send.wait()
            with self._lock:
                self.num_open += 1
            is_heavy = rng.random() < HEAVY_SHARE
            if is_heavy:
                path, body = heavy_body(rng)
            else:
                path = rng.choice(list(ROUTES))
                body = hostile_body(rng, path)
            if connection is None:
                connection = http.client.HTTPConnection(
                    str(self._address.hostname), self._address.port
                )
            if not self._send(connection, path, body, is_heavy):
                connection.close()
                connection = None
            with self._lock:
                self.num_open -= 1
                self._lock.notify_all()

    def _send(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, is_heavy: bool
    ) -> bool:
        """Send one; whether the connection may be used again."""
        connection.timeout = PATIENCE_S if is_heavy else LIMIT_S
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        began = time.monotonic()
        try:
            connection.request("POST", path, body, self._headers)
            reply = connection.getresponse()
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            if is_heavy and time.monotonic() - began > PATIENCE_S / 2:
                self.statuses[0] += 1
            else:
                self.faults.append(f"{path} {body[:200]!r}: {type(error).__name__}: {error}")
            return False
        self.statuses[reply.status] += 1
        if reply.status >= 500 or (reply.status >= 400 and b'"message"' not in text):
            self.faults.append(f"{path} {body[:200]!r}: {reply.status} {text[:300]!r}")
        return not reply.will_close


def main() -> None:
    """Obey the lines of the input until it ends."""
    url, key, seed, num_workers = sys.argv[1:]
    os.nice(10)
    with contextlib.suppress(OSError):  # sessions are weighed against each other where it exists
        Path("/proc/self/autogroup").write_text("10")
    flood = Flood(url, key, int(seed), int(num_workers))
    for line in sys.stdin:
        if line.strip() == "go":
            flood.may_send.set()
            continue
        flood.stop()
        print(json.dumps({"statuses": flood.statuses, "faults": flood.faults[:5]}), flush=True)


if __name__ == "__main__":
    main()
