"""The contract of a task: questions, prompts, and what a reply is worth.

A task is one module of this folder, found by name. It reads its data, builds the prompts
byte for byte as its profile says, and scores a reply under one or more metrics ("readings").
It knows nothing of servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

Outcome = Literal["correct", "wrong", "no_answer"]


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        index: Position in the task's test set, 0-based; the pairing key between runs.
        question: The question's text.
        target: Gold answer in its canonical text form.
        prompt: The whole prompt, shots included, as sent to /v1/completions.
    """

    index: int
    question: str
    target: str
    prompt: str


@dataclass(frozen=True)
class Score:
    """What one metric reads in one reply.

    Attributes:
        outcome: "correct", "wrong" or "no_answer" (nothing to read; counts as not correct).
        extracted: The value read, "" for "no_answer".
    """

    outcome: Outcome
    extracted: str


@dataclass(frozen=True)
class TaskSettings:
    """What of a config changes the prompts or the reading of a reply."""

    num_questions: int
    num_fewshot: int
    gen_prefix: str = ""


class Task(Protocol):
    """A task module's `TASK` object."""

    name: str
    stop: tuple[str, ...]
    metrics: tuple[str, ...]
    default_metric: str

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """Build the first `num_questions` samples.

        Raises:
            DataMissing: A `ConfigError` that says which file is missing and how to get it.
        """
        ...

    def score(self, metric: str, sample: Sample, reply_text: str, finish_reason: str) -> Score:
        """Read `reply_text` under `metric`. Pure; never raises on any text."""
        ...


@dataclass(frozen=True)
class PromptProfile:
    """Identity of the prompts: two runs are comparable only where this is equal.

    Attributes:
        name: Task and profile, e.g. "gsm8k/script".
        prompt_hash: sha256 over all prompts in order, 16 hex digits.
        stop: Stop strings sent.
    """

    name: str
    prompt_hash: str
    stop: tuple[str, ...] = field(default=())
