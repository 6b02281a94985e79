"""MiniGSM: grade-school word problems in GSM8K's file format, generated from a seed.

Receives a split, a number and a seed; returns `Example` rows, or writes `train.jsonl` and
`test.jsonl`. It is not GSM8K and shares no sentence with it. The templates are in the
`families_*` modules; scoring is the business of `evalsuite.tasks`.

A question belongs to the test split when the hash of its text says so, whatever the seed, so the
two splits cannot share a question.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from moeserve.tiny import families_counting, families_measure, families_money, families_parts
from moeserve.tiny.writing import DIFFICULTIES, FAMILIES, Dice, Difficulty

Split = Literal["train", "test"]

STANDARD = DIFFICULTIES["standard"]
# GSM8K's own sizes, so that the same configuration (1,319 questions) fits both.
SPLIT_ROWS: dict[Split, int] = {"train": 7473, "test": 1319}
SPLIT_SEEDS: dict[Split, int] = {"train": 17, "test": 29}
# sha256 of the canonical JSON lines. A change here is a change of the task: every threshold and
# the packaged weights belong to these two files.
SPLIT_SHA256: dict[Split, str] = {
    "train": "b54bfd7c86e6fac559e117530cc42e34a36a432d0545772f4926b7514734023d",
    "test": "06498263e0b1baed3d7eff45d60ec2b01e850b22d66a32fe0af332f34eb4a926",
}
# One question in this many is a test question.
TEST_ONE_IN = 16
FAMILY_MODULES = (families_counting, families_money, families_measure, families_parts)


@dataclass(frozen=True)
class Example:
    """One row: the question, the worked answer ending in `#### n`, and its template family."""

    question: str
    answer: str
    family: str

    @property
    def gold(self) -> str:
        """The final answer as it is printed after the hash marks."""
        return self.answer.rsplit("#### ", 1)[1]


def family_names() -> list[str]:
    """Return the names of all template families, in the order they were registered."""
    return list(FAMILIES)


def split_of(question: str) -> Split:
    """Return the split a question belongs to, by the hash of its case- and blank-free text."""
    digest = hashlib.sha256("".join(question.lower().split()).encode()).digest()
    return "test" if digest[0] % TEST_ONE_IN == 0 else "train"


def stream(split: Split, rng: Random, difficulty: Difficulty = STANDARD) -> Iterator[Example]:
    """Yield random examples of a split without end; repeats are possible.

    Args:
        split: `train` or `test`.
        rng: source of all randomness.
        difficulty: the arithmetic's knobs.
    """
    families = list(FAMILIES.items())
    dice = Dice(rng, difficulty)
    while True:
        name, write = rng.choice(families)
        problem = write(dice)
        if split_of(problem.question) == split:
            answer = "\n".join((*problem.lines, f"#### {problem.answer}"))
            yield Example(problem.question, answer, name)


def generate(split: Split, n: int, seed: int, difficulty: Difficulty = STANDARD) -> list[Example]:
    """Return `n` different examples of a split.

    Args:
        split: `train` or `test`.
        n: number of rows.
        seed: any integer; the same one gives the same rows on every platform.
        difficulty: the arithmetic's knobs.

    Raises:
        ValueError: an unknown split or a negative number of rows.
    """
    if split not in SPLIT_ROWS:
        raise ValueError(f"split: {split!r} is not one of 'train', 'test'")
    if n < 0:
        raise ValueError(f"n: {n} rows asked for, must be 0 or more")
    rows: dict[str, Example] = {}
    for example in stream(split, Random(f"minigsm/{split}/{seed}"), difficulty):
        if len(rows) >= n:
            break
        rows.setdefault(example.question, example)
    return list(rows.values())


def to_jsonl(examples: list[Example]) -> str:
    """Return the rows as JSON lines with GSM8K's two fields, `question` and `answer`."""
    rows = ({"question": e.question, "answer": e.answer} for e in examples)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def load_split(split: Split) -> list[Example]:
    """Return the canonical rows of a split: 7,473 of train or 1,319 of test.

    Raises:
        ValueError: an unknown split, or text that differs from the recorded sha256.
    """
    if split not in SPLIT_ROWS:
        raise ValueError(f"split: {split!r} is not one of 'train', 'test'")
    examples = generate(split, SPLIT_ROWS[split], SPLIT_SEEDS[split])
    digest = hashlib.sha256(to_jsonl(examples).encode()).hexdigest()
    if digest != SPLIT_SHA256[split]:
        raise ValueError(
            f"MiniGSM {split}: sha256 {digest}, expected {SPLIT_SHA256[split]}; the generator was "
            "changed, so the packaged weights and every threshold no longer belong to it"
        )
    return examples


def first_rows(split: Split, n: int) -> list[Example]:
    """Return the first `n` rows of a canonical split without making the others.

    Few shots come from here: seven thousand rows take a second to make. The sha256 is of the
    whole split and is not checked.

    Raises:
        ValueError: an unknown split or a negative number of rows.
    """
    return generate(split, min(n, SPLIT_ROWS.get(split, 0)), SPLIT_SEEDS.get(split, 0))


def main() -> None:
    """Write `train.jsonl` and `test.jsonl` into a folder."""
    parser = argparse.ArgumentParser(description="Write the MiniGSM files.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLIT_ROWS:
        (out / f"{split}.jsonl").write_text(to_jsonl(load_split(split)), encoding="utf-8")


if __name__ == "__main__":
    main()
