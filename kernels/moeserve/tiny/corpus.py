"""Training batches: few-shot documents of MiniGSM, packed into rows of equal length.

Receives a seed and a batch number; returns tokens and loss weights as arrays. Batches are made by
worker processes ahead of the training step, in a fixed order, so that a run depends on its seed
and not on its number of workers. No torch here: workers start fast. The step is in `train`.
"""

from __future__ import annotations

import multiprocessing
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from tokenizers import Tokenizer

from moeserve.tiny.minigsm import Example, stream
from moeserve.tiny.tokenizer import END_OF_TEXT_ID
from moeserve.tiny.writing import DIFFICULTIES

MAX_SHOTS = 7
# Share of documents in the "Q: / A: ... The answer is n." form beside the field's script form.
COT_SHARE = 0.1


@dataclass(frozen=True)
class CorpusSpec:
    """What a batch is made of. `tokenizer_json` is the tokenizer itself, not a path."""

    tokenizer_json: str
    seed: int
    difficulty: str
    num_rows: int
    row_tokens: int


@dataclass(frozen=True)
class Batch:
    """Packed rows.

    Attributes:
        tokens: num_rows * (row_tokens + 1) uint16 ids, row by row.
        is_answer: the same shape, uint8, 1 where the token belongs to an answer.
    """

    tokens: array[int]
    is_answer: bytearray


def prompt_of(example: Example, is_cot: bool = False) -> str:
    """Return the text before the answer, as the field's script (or the CoT task) writes it."""
    if is_cot:
        return f"Q: {example.question}\nA:"
    return f"Question: {example.question}\nAnswer:"


def reply_of(example: Example, is_cot: bool = False) -> str:
    """Return the answer as it follows the prompt, with its leading blank."""
    if is_cot:
        lines = example.answer.split("\n")[:-1]
        return f" {' '.join(lines)} The answer is {example.gold}."
    return f" {example.answer}"


def few_shot_prefix(shots: list[Example]) -> str:
    """Return the worked examples before a question, in the field's script form."""
    return "".join(f"{prompt_of(shot)}{reply_of(shot)}\n\n" for shot in shots)


@lru_cache(maxsize=1)
def _tokenizer(tokenizer_json: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json)


def make_batch(spec: CorpusSpec, number: int) -> Batch:
    """Return batch `number` of the training run that `spec` describes."""
    rng = Random(f"corpus/{spec.seed}/{number}")
    tokenizer = _tokenizer(spec.tokenizer_json)
    examples = stream("train", rng, DIFFICULTIES[spec.difficulty])
    tokens, is_answer = array("H"), bytearray()
    length = spec.row_tokens + 1
    for _ in range(spec.num_rows):
        row, flags = array("H"), bytearray()
        while len(row) < length:
            is_cot = rng.random() < COT_SHARE
            texts: list[str] = []
            for shot in range(rng.randint(1, MAX_SHOTS + 1)):
                example = next(examples)
                opening = "\n\n" if shot else ""
                texts += [opening + prompt_of(example, is_cot), reply_of(example, is_cot)]
            for index, piece in enumerate(tokenizer.encode_batch(texts)):
                row.extend(piece.ids)
                flags.extend(bytes([index % 2]) * len(piece.ids))
            row.append(END_OF_TEXT_ID)
            flags.append(1)
        tokens.extend(row[:length])
        is_answer.extend(flags[:length])
    return Batch(tokens, is_answer)


def batches(spec: CorpusSpec, num_batches: int, num_workers: int) -> Iterator[Batch]:
    """Yield batches 0 to `num_batches` - 1 in order.

    Args:
        spec: what the batches are made of.
        num_batches: how many.
        num_workers: processes that work ahead; 0 makes the batches in this process.
    """
    if num_workers == 0:
        for number in range(num_batches):
            yield make_batch(spec, number)
        return
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        ahead = deque(
            pool.apply_async(make_batch, (spec, number))
            for number in range(min(num_batches, 4 * num_workers))
        )
        number = len(ahead)
        while ahead:
            yield ahead.popleft().get()
            if number < num_batches:
                ahead.append(pool.apply_async(make_batch, (spec, number)))
                number += 1
