"""A completion asked of a test's server and its stream taken apart; the answer they all get."""

from __future__ import annotations

import json

import httpx
from fake_engine import piece_tokenizer, pieces_then_eos

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


def post(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)
