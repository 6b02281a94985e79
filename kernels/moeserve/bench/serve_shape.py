"""Random token ids, and prompts of GSM8K's shape made of them; no torch, no tokenizer.

Receives seeds and a vocabulary; returns ids. A preset with random weights has no tokenizer, and
text sent to it as bytes is four times as long, so a benchmark of GSM8K's lengths sends ids. Used
by `serve_load.py` over HTTP and by `engine_load.py` without.
"""

from __future__ import annotations

from random import Random

# Random ids come from here where the vocabulary is large enough: no special tokens.
ID_RANGE = (1000, 150_000)
# GSM8K with five shots: 1,860 characters that all prompts begin with, then a question.
NUM_GSM8K = 1319
SHOTS_LEN = 650
QUESTION_LEN = (60, 100)


def random_ids(count: int, seed: object, vocab_size: int) -> tuple[int, ...]:
    """Token ids that depend on the seed's text and the vocabulary alone."""
    low, high = min(ID_RANGE[0], vocab_size // 8), min(ID_RANGE[1], vocab_size)
    return tuple(Random(str(seed)).choices(range(low, high), k=count))


def gsm8k_shaped(count: int, seed: str, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts that begin alike for `SHOTS_LEN` tokens and then differ.

    Args:
        count: How many.
        seed: Of the questions' lengths; what their tokens are depends on their place alone.
        vocab_size: V.
    """
    shots = random_ids(SHOTS_LEN, "prefix", vocab_size)
    lengths = Random(seed)
    return [
        shots + random_ids(lengths.randint(*QUESTION_LEN), ("q", i), vocab_size)
        for i in range(count)
    ]
