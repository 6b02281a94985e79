"""Two hundred greedy requests that use every field two OpenAI servers should agree on.

Receives the embedded model's tokenizer; returns the requests in a fixed order. They are generated
from the held-out MiniGSM questions, ten of each kind, so that a table can count by kind. Sending
and comparing is `compat.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.server.tokenizer import Tokenizer
from moeserve.tiny.minigsm import SPLIT_SEEDS, generate

PER_KIND = 10
_NUM_SHOTS = 2
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# The field's stops for GSM8K's script; with a fourth, as many as OpenAI allows.
_STOPS = ["Question", "Assistant:", "<|separator|>"]
_FOUR_STOPS = [*_STOPS[:2], "####", "are left"]
# Beyond that limit, as some evaluators send them.
_MANY_STOPS = [*_STOPS, "\n\nQ", "####", "</s>", "are left"]

Body = dict[str, object]


@dataclass(frozen=True)
class Probe:
    """One request.

    Attributes:
        kind: What it is about, the row of the table.
        path: Route.
        body: JSON without the model's name.
    """

    kind: str
    path: str
    body: Body


@dataclass(frozen=True)
class _Question:
    """One question in the forms that prompts may take."""

    number: int
    text: str
    ids: list[int]
    plain: str
    answered: str


def make_probes(tokenizer: Tokenizer) -> list[Probe]:
    """Return all requests, `PER_KIND` of each kind."""
    count = PER_KIND * len(_KINDS)
    rows = generate("test", count, SPLIT_SEEDS["test"])
    shots = "".join(
        f"Question: {row.question}\nAnswer: {row.answer}\n\n"
        for row in generate("train", _NUM_SHOTS, SPLIT_SEEDS["train"])
    )
    probes = []
    for index, row in enumerate(rows):
        kind, (path, make) = list(_KINDS.items())[index % len(_KINDS)]
        text = f"{shots}Question: {row.question}\nAnswer:"
        ids = tokenizer.encode(text, add_special_tokens=False)
        answered = f"Question: {row.question}\nAnswer: {row.answer}"
        question = _Question(index // len(_KINDS), text, ids, row.question, answered)
        probes.append(Probe(kind, path, {"temperature": 0, **make(question)}))
    return probes


def _messages(q: _Question) -> Body:
    messages = [{"role": "user", "content": q.plain}]
    if q.number % 2:
        messages.insert(0, {"role": "system", "content": "Work it out, step by step."})
    return {"messages": messages}


def _chat(q: _Question, **fields: object) -> Body:
    return {**_messages(q), "max_tokens": 40 + 10 * q.number, **fields}


def _text(q: _Question, **fields: object) -> Body:
    return {"prompt": q.text, "max_tokens": 48, **fields}


# Only ids: the same question may be asked of any server whatever its tokenizer does with text.
def _ids(q: _Question, **fields: object) -> Body:
    return {"prompt": q.ids, "max_tokens": 48, **fields}


# Fields that change the greedy choice and stay deterministic, one a request.
_ADJUSTMENTS: tuple[Body, ...] = (
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.5},
    {"logit_bias": {"14": 5.0, "300": -100}},
    {"logit_bias": {"0": 100}},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_k": 1, "seed": 7},
)
# vLLM refuses two equal answers where the temperature is 0; of one candidate there is no chance.
_TWO: Body = {"n": 2, "temperature": 1.0, "top_k": 1}
_LIMITS: tuple[Body, ...] = (
    {"max_tokens": 1},
    {},
    {"max_tokens": None, "stop": "\n\n"},
    {"max_tokens": 2},
    {"max_tokens": 3, "logprobs": 0},
    {"max_tokens": 5},
    {"max_tokens": 8},
    {"max_tokens": 13},
    {"max_tokens": 21},
    {"max_tokens": 300},
)
# What both must refuse, with the same status.
_REFUSED: tuple[Body, ...] = (
    {"max_tokens": -1},
    {"max_tokens": 100_000},
    {"temperature": -1},
    {"top_p": 0},
    {"top_k": -2},
    {"n": 0},
    {"logprobs": 1000},
    {"prompt": []},
    {"prompt": [1, "a"]},
    {"stop": 3},
)

_KINDS: dict[str, tuple[str, Callable[[_Question], Body]]] = {
    "text prompt, the field's stops": (COMPLETIONS, lambda q: _text(q, stop=_STOPS, max_tokens=96)),
    "token ids": (COMPLETIONS, _ids),
    "list of texts": (
        COMPLETIONS,
        lambda q: _text(q, prompt=[q.text, q.plain, q.answered][: 1 + q.number % 3]),
    ),
    "lists of token ids": (
        COMPLETIONS,
        lambda q: _ids(
            q, prompt=[q.ids, q.ids[-(20 + q.number) :]], **(_TWO if q.number % 2 else {})
        ),
    ),
    "lengths": (COMPLETIONS, lambda q: {"prompt": q.text, **_LIMITS[q.number]}),
    "one stop": (
        COMPLETIONS,
        lambda q: _text(q, stop=["####", ".", "\n", ">>", " is"][q.number % 5]),
    ),
    "several stops": (
        COMPLETIONS,
        lambda q: _text(q, stop=_FOUR_STOPS if q.number else _MANY_STOPS),
    ),
    "stop kept in the text": (
        COMPLETIONS,
        lambda q: _text(q, stop=["####", "\n"], include_stop_str_in_output=True),
    ),
    "stop token ids": (
        COMPLETIONS,
        lambda q: _ids(q, stop_token_ids=[q.ids[-3 - q.number], 14], ignore_eos=bool(q.number % 2)),
    ),
    "ignore_eos": (COMPLETIONS, lambda q: _text(q, ignore_eos=True, max_tokens=160)),
    "min_tokens": (
        COMPLETIONS,
        lambda q: _text(q, min_tokens=20 + q.number, stop=["\n"], max_tokens=120),
    ),
    "echo": (
        COMPLETIONS,
        lambda q: _text(q, prompt=q.answered, echo=True, max_tokens=4 + q.number),
    ),
    "echo with log-probabilities": (
        COMPLETIONS,
        lambda q: _ids(q, echo=True, logprobs=1 + q.number % 3, max_tokens=q.number % 2),
    ),
    "log-probabilities": (COMPLETIONS, lambda q: _text(q, logprobs=q.number % 6)),
    "prompt log-probabilities": (COMPLETIONS, lambda q: _text(q, prompt_logprobs=q.number % 3)),
    "penalties and biases": (COMPLETIONS, lambda q: _text(q, **_ADJUSTMENTS[q.number])),
    "streamed text": (
        COMPLETIONS,
        lambda q: _text(
            q,
            stream=True,
            stop=_STOPS,
            stream_options={"include_usage": True},
            **({"logprobs": 1} if q.number % 2 else {}),
        ),
    ),
    "chat": (
        CHAT,
        lambda q: _chat(q, **({"logprobs": True, "top_logprobs": 2} if q.number % 3 else {})),
    ),
    "streamed chat": (
        CHAT,
        lambda q: _chat(q, stream=True, stream_options={"include_usage": True}),
    ),
    "refused": (COMPLETIONS, lambda q: {"prompt": q.text, **_REFUSED[q.number]}),
}
