"""Runs of the embedded model that differ by rounding alone, and variants beside them: the files.

Receives a folder; reads and writes one JSON file a run (right or wrong answers, where replies part
from run 0's, log-probabilities of run 0's replies) and one a variant (the same under a fault or
another backend). Who makes them is `noise_measure.py`, what they show `noise_study.py`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

# Half a unit in the last place of bfloat16, which keeps 8 bits: what one rounding may move.
DITHER = 2.0**-8
NUM_SHOTS = 5
# Loads that runs take in turn: a run's number modulo this says which.
NUM_LOADS = 6


@dataclass(frozen=True)
class Reply:
    """One greedy answer.

    Attributes:
        ids: Its tokens, up to the stop string.
        text: Them as text.
        margins: Best minus second-best logit at each, () where they were not looked at.
    """

    ids: Sequence[int]
    text: str
    margins: Sequence[float] = ()


@dataclass(frozen=True)
class Score:
    """One teacher-forced answer.

    Attributes:
        logprobs: Of each token.
        margins: Best minus second-best log-probability at each, () where not looked at.
    """

    logprobs: Sequence[float]
    margins: Sequence[float] = ()


class Model(Protocol):
    """Who answers."""

    machine: str

    @property
    def questions(self) -> Sequence[Any]:
        """Test questions, by index."""

    def ask(self, order: Sequence[int], number: int) -> dict[int, Reply]:
        """Answer these questions in this order, under the load of this run."""

    def score(self, replies: Mapping[int, Sequence[int]], number: int) -> dict[int, Score]:
        """Teacher-force these answers under the load of this run."""


@dataclass(frozen=True)
class RunPlan:
    """What a folder of runs holds.

    Attributes:
        folder: One JSON file a run.
        num_questions: Asked in every run, from the first of the test set.
        num_asked_variants: Asked of a variant, from the first.
        num_replayed: Replies of run 0 that some runs and every variant teacher-force.
        dtype: "bfloat16" or "float32". In float32 two runs hardly ever differ.
        dither: Largest relative change of an output of a MoE layer (without an engine); 0 for none.
        num_full: Runs that ask everything; the later ones ask the questions that may turn.
        margin_cut: Those whose smallest margin in run 0 is below this, in logits. The full runs
            show whether others ever do.
        device: "cpu" or "cuda".
        has_engine: moeserve's engine answers; else the model in torch, in large batches.
        replay_every: Runs that teacher-force too: every so many.
    """

    folder: Path
    num_questions: int = 1319
    num_asked_variants: int = 1319
    num_replayed: int = 100
    dtype: str = "bfloat16"
    dither: float = DITHER
    num_full: int = 100
    margin_cut: float = 1.0
    device: str = "cpu"
    has_engine: bool = False
    replay_every: int = 5


@dataclass(frozen=True)
class Split:
    """Where a reply parts from that of run 0.

    Attributes:
        index: Question.
        position: First token that differs; the shorter length where one reply begins the other.
        margin: Best minus second-best logit there, None where a reply has ended.
    """

    index: int
    position: int
    margin: float | None


@dataclass(frozen=True)
class NoiseRun:
    """One run.

    Attributes:
        number: From 0 on; the seed of its order and load.
        num_asked: All, or those that may turn; the others' outcomes are run 0's.
        right: By question index.
        splits: Replies that differ from run 0's.
        logprobs: Of the tokens of run 0's first replies, in some runs.
        seconds: Wall time.
        cpu_seconds: Processor time.
        machine: Device, library, dtype.
        token_ids: Replies, of run 0 only.
        margins: Of each token of them, of run 0 only.
    """

    number: int
    num_asked: int
    right: list[bool]
    splits: list[Split]
    logprobs: list[list[float]]
    seconds: float
    cpu_seconds: float
    machine: str
    token_ids: list[list[int]] = field(default_factory=list)
    margins: list[list[float]] = field(default_factory=list)

    def least_margin(self, index: int) -> float:
        """Smallest margin of a reply of run 0."""
        return min(self.margins[index], default=0.0)


@dataclass(frozen=True)
class Variant:
    """A fault, or another way to compute the same.

    Attributes:
        name: "noise:0.03", "torch_grouped_mm", ...
        right: Of the first questions.
        splits: Replies that differ from the clean run 0's.
        replays: Log-probabilities of run 0's first replies, once for each replay.
        seconds: Wall time.
        machine: Device, library, dtype.
        loads: Numbers of the replays: equal ones modulo the loads there are had the same load.
    """

    name: str
    right: list[bool]
    splits: list[Split]
    replays: list[list[list[float]]]
    seconds: float = 0.0
    machine: str = ""
    loads: list[int] = field(default_factory=list)


def path_of(folder: Path, number: int) -> Path:
    """File of a run."""
    return folder / f"run-{number:03}.json.gz"


def variant_path(folder: Path, name: str) -> Path:
    """File of a variant."""
    return folder / f"variant-{name.replace(':', '-').replace('@', '-layer-')}.json.gz"


def write(path: Path, one: NoiseRun | Variant) -> None:
    """Put one file in its place, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(json.dumps(asdict(one)).encode("ascii"), mtime=0))
    part.replace(path)


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return {**data, "splits": [Split(**one) for one in data["splits"]]}


def load_run(path: Path) -> NoiseRun:
    """Read one run back."""
    return NoiseRun(**_read(path))


def load_runs(folder: Path) -> list[NoiseRun]:
    """Every run of a folder, by number."""
    return [load_run(path) for path in sorted(folder.glob("run-*.json.gz"))]


def load_variant(folder: Path, name: str) -> Variant | None:
    """Read a variant back, None where it was not measured."""
    path = variant_path(folder, name)
    return Variant(**_read(path)) if path.is_file() else None


def splits(
    found: Mapping[int, Reply],
    reference: Sequence[Sequence[int]],
    margins: Sequence[Sequence[float]],
) -> list[Split]:
    """Where replies part from the reference's.

    Args:
        found: Replies by question index.
        reference: Token ids of run 0, by question index.
        margins: Of run 0, used where a reply has none of its own.
    """
    made = []
    for index, reply in sorted(found.items()):
        ids, before = reply.ids, reference[index]
        if list(ids) == list(before):
            continue
        pairs = zip(ids, before, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(before)))
        known = reply.margins or margins[index]
        margin = round(known[position], 4) if position < len(known) else None
        made.append(Split(index, position, margin))
    return made
