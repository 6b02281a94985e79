"""Answers of the embedded model, clean and under each fault: what the reports are made of.

Receives a folder; fills it with one JSON file for each variant (replies, right or wrong, and
log-probabilities of the clean replies) and goes on where an earlier call was cut. `report` makes
a page of them, `evalsuite.dose_response` asks the gates.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from moeserve.moe.backends.cpu import CpuExperts
from moeserve.tiny import model_dir
from moeserve.tiny.checkpoint import load_model
from moeserve.tiny.decode import Replies, greedy_replies, reply_logprobs, run_prefix
from moeserve.tiny.evaluate import is_right, summarise
from moeserve.tiny.faults import FaultyExperts, parse_fault
from moeserve.tiny.layered import with_backend
from moeserve.tiny.minigsm import SPLIT_ROWS, Example, load_split

NUM_SHOTS = 5
CLEAN = "clean"
# The clean model once more in batches of another size: the noise of its own rounding.
AGAIN = "clean, other batches"
BFLOAT16 = "bfloat16"
GROSS = ("random-routing:1", "halves-swapped:32", "no-renormalisation:1", "slots-dropped:1")
GRADED = (
    *("experts-zeroed:1@2", "experts-zeroed:1", "experts-zeroed:2", "experts-zeroed:4"),
    *("experts-zeroed:8", "experts-swapped:2", "row-lost:64", "row-lost:16"),
    *("noise:0.001", "noise:0.003", "noise:0.01", "noise:0.03", "noise:0.1"),
)
PRECISION = (
    "narrow-sums:16",
    *("expert-scale:0.01", "expert-scale:0.1", "expert-scale:0.5", "expert-scale:1"),
    *("layer-scale:0.01@1", "layer-scale:0.1@1", "layer-scale:0.5@1", "layer-scale:1@1"),
)
FAULTS = (*GROSS, *GRADED, *PRECISION)
VARIANTS = (CLEAN, AGAIN, *FAULTS, BFLOAT16)
# These are asked all questions; the faults a part of them, which the report states.
WHOLE = frozenset({CLEAN, BFLOAT16})


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        folder: of the JSON files.
        num_questions: questions asked under each fault, from the first.
        num_whole: questions that the variants of `WHOLE` are asked.
        num_replayed: clean replies that are teacher-forced through each variant.
        batch_size: questions decoded at a time.
    """

    folder: Path
    num_questions: int = SPLIT_ROWS["test"]
    num_whole: int = SPLIT_ROWS["test"]
    num_replayed: int = 330
    batch_size: int = 330


@dataclass(frozen=True)
class Measured:
    """One variant's file.

    Attributes:
        name: `CLEAN`, `AGAIN`, `BFLOAT16` or a fault.
        texts: replies, from the first question on.
        right: whether each is.
        token_ids: of each reply; of the clean model only.
        logprobs: of the first clean replies' tokens under this variant.
        summary: of the clean model, `evaluate.summarise`.
        seconds: wall time.
        machine: processor, threads and library.
    """

    name: str
    texts: list[str]
    right: list[bool]
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    machine: str = ""

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(self.right) / len(self.right)


def file_of(folder: Path, name: str) -> Path:
    """Return the file of a variant."""
    return folder / (name.replace(":", "-").replace("@", "-layer-").replace(", ", "-") + ".json")


def load(folder: Path, name: str) -> Measured | None:
    """Read a variant, None where it was not measured yet."""
    path = file_of(folder, name)
    if not path.is_file():
        return None
    return Measured(**json.loads(path.read_text(encoding="utf-8")))


def measure(plan: Plan, names: Sequence[str] = VARIANTS) -> None:
    """Measure what is missing; the clean model comes first, the others need its replies."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys((CLEAN, *names)):
        if load(plan.folder, name) is None:
            found = measure_one(plan, name)
            path = file_of(plan.folder, name)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(asdict(found)), encoding="utf-8")
            part.replace(path)
            print(f"{name}: {found.accuracy:.4f} of {len(found.right)}", flush=True)


def measure_one(plan: Plan, name: str) -> Measured:
    """Ask one variant and replay the clean replies through it."""
    started = time.perf_counter()
    shots = load_split("train")[:NUM_SHOTS]
    asked = load_split("test")[: plan.num_whole if name in WHOLE else plan.num_questions]
    model, tokenizer = load_model(
        model_dir(), torch.bfloat16 if name == BFLOAT16 else torch.float32
    )
    real = CpuExperts()
    is_fault = name not in (CLEAN, AGAIN, BFLOAT16)
    with_backend(model, FaultyExperts(real, parse_fault(name)) if is_fault else real)
    size = plan.batch_size // 3 if name == AGAIN else plan.batch_size
    replies = greedy_replies(model, tokenizer, shots, asked, size)
    clean = load(plan.folder, CLEAN)
    targets = (replies.token_ids if clean is None else clean.token_ids)[: plan.num_replayed]
    prefix = run_prefix(model, tokenizer, shots)
    size = 12 if name == AGAIN else 16
    logprobs = reply_logprobs(model, tokenizer, prefix, asked[: len(targets)], targets, size)
    return Measured(
        name,
        replies.texts,
        rights(replies, asked),
        replies.token_ids if name == CLEAN else [],
        logprobs,
        summarise(replies, asked, tokenizer) if name == CLEAN else {},
        round(time.perf_counter() - started, 1),
        machine(),
    )


def rights(replies: Replies, asked: Sequence[Example]) -> list[bool]:
    """Return whether each reply is right."""
    return [is_right(text, e) for text, e in zip(replies.texts, asked, strict=True)]


def machine() -> str:
    """Name processor, threads used, vector width and torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return (
        f"{cpu}, {os.cpu_count()} cores ({torch.get_num_threads()} used), "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much to measure."""
    parser.add_argument("--work", type=Path, required=True, help="folder of the measured answers")
    add = parser.add_argument
    add("--questions", type=int, default=Plan.num_questions, help="asked under each fault")
    add("--replayed", type=int, default=Plan.num_replayed, help="clean replies teacher-forced")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan of a command line, and set torch's threads."""
    torch.set_num_threads(args.threads)
    return Plan(args.work, num_questions=args.questions, num_replayed=args.replayed)


def main() -> None:
    """Measure, all variants or those named."""
    parser = argparse.ArgumentParser(prog="python -m moeserve.tiny.measure", description=__doc__)
    add_options(parser)
    parser.add_argument("--only", nargs="+", default=VARIANTS, help="variants (all)")
    args = parser.parse_args()
    measure(plan_of(args), args.only)


if __name__ == "__main__":
    main()
