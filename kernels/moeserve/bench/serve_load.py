"""The prompts of a serving benchmark: random ids of exact length, or questions with shots.

Receives the options of `moeserve bench serve`; returns one `Ask` a request, the same ones for every
server that is measured. Sending them is `serve_client.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from moeserve.bench.serve_shape import gsm8k_shaped
from moeserve.errors import UsageError
from moeserve.server.tokenizer import Tokenizer
from moeserve.tiny.minigsm import SPLIT_SEEDS, Example, generate, load_split

# Of the field's GSM8K script: shots are the first rows of train, and these end an answer.
_STOPS = ("Question", "Assistant:", "<|separator|>")
DATASETS = ("random", "gsm8k", "minigsm", "gsm8k-shaped")


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        prompt: Text, or token ids.
        max_tokens: Tokens to generate at most.
        stops: Stop strings.
    """

    prompt: str | list[int]
    max_tokens: int
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadOptions:
    """What is asked of a server.

    Attributes:
        dataset: One of `DATASETS`.
        num_prompts: Requests.
        seed: Of everything random here.
        input_len: Tokens of a random prompt.
        output_len: Tokens to generate.
        range_ratio: Random lengths are drawn from (1 - r) to (1 + r) times the length.
        dataset_path: Folder with GSM8K's train.jsonl and test.jsonl.
        num_shots: Solved questions before each question.
        ignore_eos: Generate to the limit; no stop strings then.
        vocab_size: Random ids are below it.
        tokenizer: Turns random ids into text; None sends the ids.
    """

    dataset: str
    num_prompts: int
    seed: int = 0
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    dataset_path: str = ""
    num_shots: int = 5
    ignore_eos: bool = False
    vocab_size: int = 1000
    tokenizer: Tokenizer | None = None


def make_load(options: LoadOptions) -> list[Ask]:
    """Return the requests, in order.

    Raises:
        UsageError: A data set without its files.
    """
    if options.dataset == "random":
        return list(_random(options))
    if options.dataset == "gsm8k-shaped":
        prompts = gsm8k_shaped(options.num_prompts, f"gsm{options.seed}", options.vocab_size)
        return [Ask(list(prompt), options.output_len) for prompt in prompts]
    train, test = _rows(options)
    shots = "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
        for row in train[: options.num_shots]
    )
    stops = () if options.ignore_eos else _STOPS
    questions = [test[place % len(test)]["question"] for place in range(options.num_prompts)]
    return [
        Ask(f"{shots}Question: {question}\nAnswer:", options.output_len, stops)
        for question in questions
    ]


def _random(options: LoadOptions) -> Iterator[Ask]:
    rng = Random(options.seed)

    def length(mean: int) -> int:
        low, high = mean * (1 - options.range_ratio), mean * (1 + options.range_ratio)
        return max(1, rng.randint(round(low), round(high)))

    for _ in range(options.num_prompts):
        num_in, num_out = length(options.input_len), length(options.output_len)
        ids = [rng.randrange(options.vocab_size) for _ in range(num_in)]
        if options.tokenizer is None:
            yield Ask(ids, num_out)
        else:
            yield Ask(_text_of_length(options.tokenizer, ids), num_out)


def _text_of_length(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return a text of as many tokens as there are ids; other borders may fall on encoding."""
    text = tokenizer.decode(ids)
    for _ in range(8):
        again = tokenizer.encode(text, add_special_tokens=False)
        if len(again) == len(ids):
            break
        text = tokenizer.decode((again + ids)[: len(ids)])
    return text


def _rows(options: LoadOptions) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    if options.dataset == "minigsm":
        # The first rows of the stream are the first of the split; the rest takes seconds to make.
        train = generate("train", options.num_shots, SPLIT_SEEDS["train"])
        return _plain(train), _plain(load_split("test"))
    folder = Path(options.dataset_path)
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    if not options.dataset_path or not all(path.is_file() for path in files):
        raise UsageError(
            "--dataset-path: wants the folder with GSM8K's train.jsonl and test.jsonl "
            f"(got {options.dataset_path or 'nothing'!r})"
        )
    train_rows, test_rows = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in files
    )
    return train_rows, test_rows


def _plain(examples: list[Example]) -> list[dict[str, str]]:
    return [{"question": item.question, "answer": item.answer} for item in examples]
