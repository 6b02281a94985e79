"""The contract of a task: questions, prompts, and what a reply is worth.

A task is one module of this folder, found by name. It reads its data, builds the prompts
byte for byte as its profile says, and scores a reply under one or more metrics ("readings").
It knows nothing of servers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

Outcome = Literal["correct", "wrong", "no_answer"]


@dataclass(frozen=True)
class Row:
    """One row of a data file.

    Attributes:
        question: The question's text.
        answer: The worked answer, ending in `#### n`.
    """

    question: str
    answer: str

    @property
    def gold(self) -> str:
        """What stands after the last `####`, commas removed."""
        return self.answer.rsplit("####", 1)[-1].strip().replace(",", "")


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


NO_ANSWER = Score("no_answer", "")


@dataclass(frozen=True)
class DataSource:
    """Where data files are looked for; built from the environment by `tasks/data.py`.

    Attributes:
        data_dir: Folder named by the user; nothing else is tried where it is set.
        cache_dir: Our own cache.
        hub_cache: The model hub's cache of data sets.
    """

    data_dir: Path | None = None
    cache_dir: Path | None = None
    hub_cache: Path | None = None


@dataclass(frozen=True)
class TaskSettings:
    """What of a config changes the prompts or the reading of a reply."""

    num_questions: int
    num_fewshot: int
    gen_prefix: str = ""
    data: DataSource = field(default_factory=DataSource)


class Task(Protocol):
    """A task module's entry in its `TASKS`."""

    @property
    def name(self) -> str:
        """What a config calls it."""
        ...

    @property
    def profile(self) -> str:
        """Name of the prompt profile, e.g. "gsm8k/script"."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings sent with each request."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Readings that `score` knows."""
        ...

    @property
    def default_metric(self) -> str:
        """The reading that gates where a config names none."""
        ...

    def rows(self, split: str, data: DataSource) -> list[Row]:
        """Read the split "train" or "test".

        Raises:
            ConfigError: A file is missing or is not what it should be, with the remedy.
        """
        ...

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """Build the first `num_questions` samples, fewer where the data has fewer.

        Raises:
            ConfigError: Missing data, or settings this task cannot follow.
        """
        ...

    def score(self, metric: str, target: str, reply_text: str, finish_reason: str) -> Score:
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


def hash_text(text: str) -> str:
    """sha256 of a text, 16 hex digits; lone surrogates are no obstacle."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def hash_prompts(prompts: Iterable[str]) -> str:
    """sha256 over prompts in order, 16 hex digits; the borders between them count."""
    digest = hashlib.sha256()
    for prompt in prompts:
        data = prompt.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:16]


def score_all(
    task: Task, target: str, reply_text: str, finish_reason: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Read a reply under every metric of a task.

    Returns:
        Outcomes by metric, and the values read by metric.
    """
    scores: dict[str, str] = {}
    extracted: dict[str, str] = {}
    for metric in task.metrics:
        score = task.score(metric, target, reply_text, finish_reason)
        scores[metric] = score.outcome
        extracted[metric] = score.extracted
    return scores, extracted


def profile_of(task: Task, samples: Iterable[Sample]) -> PromptProfile:
    """Identity of a task's prompts over these samples."""
    return PromptProfile(task.profile, hash_prompts(s.prompt for s in samples), task.stop)
