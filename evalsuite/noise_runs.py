"""Runs of the embedded model that differ by rounding alone: the noise to study.

Receives a folder and a plan; fills the folder with one JSON file a run (right or wrong answers,
where replies part from run 0's, log-probabilities of run 0's replies) and goes on where an earlier
call was cut. Every run shuffles the questions anew and takes another batch size, as a server in
fast mode under another load would. On a CPU that changes no bit in bfloat16, so that the output of
every MoE layer can be dithered: rounded up or down at random, as sums in another order would be on
a GPU. What the runs show is `noise_study.py`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalsuite.files import write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from moeserve.tiny.decode import Replies
    from moeserve.tiny.model import TinyMoE

# Questions decoded at a time, run by run: a server's batch under different loads. The largest is
# what two gigabytes of scores allow during a prefill.
BATCH_SIZES = (330, 256, 192, 128)
# Half a unit in the last place of bfloat16, which keeps 8 bits: what one rounding may move.
DITHER = 2.0**-8
REPLAY_EVERY = 5
REPLAY_SIZES = (16, 24, 12, 20)
NUM_SHOTS = 5


@dataclass(frozen=True)
class RunPlan:
    """What a folder of runs holds.

    Attributes:
        folder: One JSON file a run.
        num_questions: Asked in every run, from the first of the test set.
        num_replayed: Replies of run 0 that every run teacher-forces.
        dtype: "bfloat16" or "float32". In float32 two runs hardly ever differ.
        dither: Largest relative change of an output of a MoE layer; 0 for none.
        num_full: Runs that ask everything; the later ones ask the questions that may turn.
        margin_cut: Those whose smallest margin in run 0 is below this, in logits. The full runs
            show whether others ever do.
        device: "cpu", where the server's router, dispatch and `cpu` backend compute the experts,
            or "cuda", where the trainer's own layers do.
    """

    folder: Path
    num_questions: int = 1319
    num_replayed: int = 100
    dtype: str = "bfloat16"
    dither: float = DITHER
    num_full: int = 100
    margin_cut: float = 1.0
    device: str = "cpu"


@dataclass(frozen=True)
class Split:
    """Where a reply parts from that of run 0.

    Attributes:
        index: Question.
        position: First token that differs; the shorter length where one reply begins the other.
        margin: Best minus second-best logit of this run there, None where it has ended.
    """

    index: int
    position: int
    margin: float | None


@dataclass(frozen=True)
class NoiseRun:
    """One run.

    Attributes:
        number: From 0 on; the seed of its order.
        batch_size: Questions decoded at a time.
        num_asked: All, or those that may turn; the others' outcomes are run 0's.
        right: By question index.
        splits: Replies that differ from run 0's.
        logprobs: Of the tokens of run 0's first replies, every `REPLAY_EVERY` runs.
        seconds: Wall time.
        cpu_seconds: Processor time.
        machine: Processor, threads, library; device and dtype.
        token_ids: Replies, of run 0 only.
        margins: Smallest margin of each reply, of run 0 only.
    """

    number: int
    batch_size: int
    num_asked: int
    right: list[bool]
    splits: list[Split]
    logprobs: list[list[float]]
    seconds: float
    cpu_seconds: float
    machine: str
    token_ids: list[list[int]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def path_of(folder: Path, number: int) -> Path:
    """File of a run."""
    return folder / f"run-{number:03}.json"


def load_run(path: Path) -> NoiseRun:
    """Read one run back."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return NoiseRun(**{**data, "splits": [Split(**one) for one in data["splits"]]})


def load_runs(folder: Path) -> list[NoiseRun]:
    """Every run of a folder, by number."""
    return [load_run(path) for path in sorted(folder.glob("run-*.json"))]


def measure(plan: RunPlan, num_runs: int) -> None:
    """Make the runs that the folder lacks, up to `num_runs` in all."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_runs):
        if not path_of(plan.folder, number).is_file():
            run = measure_one(plan, number)
            write_text(path_of(plan.folder, number), json.dumps(asdict(run)) + "\n")
            print(
                f"run {number}: {sum(run.right)} of {len(run.right)} right, {run.num_asked} asked, "
                f"{len(run.splits)} replies other than run 0's, {run.seconds:.0f} s",
                flush=True,
            )


def measure_one(plan: RunPlan, number: int) -> NoiseRun:
    """Ask the questions in the order and the batches of this run, and replay run 0's replies."""
    from moeserve.tiny.decode import greedy_replies, reply_logprobs, run_prefix
    from moeserve.tiny.evaluate import is_right
    from moeserve.tiny.minigsm import load_split

    began, cpu_began = time.perf_counter(), time.process_time()
    shots = load_split("train")[:NUM_SHOTS]
    questions = load_split("test")[: plan.num_questions]
    model, tokenizer, machine = _model(plan, number)
    base = load_run(path_of(plan.folder, 0)) if number else None
    chosen = list(range(len(questions)))
    if base is not None and number >= plan.num_full:
        chosen = [i for i in chosen if base.margins[i] < plan.margin_cut]
    order = random.Random(number).sample(chosen, len(chosen))
    batch_size = BATCH_SIZES[number % len(BATCH_SIZES)]
    found = greedy_replies(model, tokenizer, shots, [questions[i] for i in order], batch_size)
    right = list(base.right) if base is not None else [False] * len(questions)
    replies: list[list[int]] = [[] for _ in questions]
    margins = [0.0] * len(questions)
    for at, index in enumerate(order):
        right[index] = is_right(found.texts[at], questions[index])
        replies[index] = found.token_ids[at]
        margins[index] = round(min(found.margins[at], default=0.0), 4)
    reference = replies if base is None else base.token_ids
    scores: list[list[float]] = []
    if number % REPLAY_EVERY == 0:
        scores = reply_logprobs(
            model,
            tokenizer,
            run_prefix(model, tokenizer, shots),
            questions[: plan.num_replayed],
            reference[: plan.num_replayed],
            REPLAY_SIZES[number // REPLAY_EVERY % len(REPLAY_SIZES)],
        )
    return NoiseRun(
        number=number,
        batch_size=batch_size,
        num_asked=len(order),
        right=right,
        splits=splits(found, order, reference),
        logprobs=[[round(x, 6) for x in row] for row in scores],
        seconds=round(time.perf_counter() - began, 1),
        cpu_seconds=round(time.process_time() - cpu_began, 1),
        machine=machine,
        token_ids=replies if base is None else [],
        margins=margins if base is None else [],
    )


def _model(plan: RunPlan, seed: int, fault: str = "") -> tuple[TinyMoE, Tokenizer, str]:
    """The model of one run, its tokenizer, and what it runs on."""
    import torch

    from moeserve.moe.backends.cpu import CpuExperts
    from moeserve.tiny import model_dir
    from moeserve.tiny.checkpoint import load_model
    from moeserve.tiny.faults import FaultyExperts, parse_fault
    from moeserve.tiny.layered import with_backend
    from moeserve.tiny.measure import machine

    model, tokenizer = load_model(model_dir(), getattr(torch, plan.dtype))
    if plan.device == "cpu":
        experts = CpuExperts()
        with_backend(model, FaultyExperts(experts, parse_fault(fault)) if fault else experts)
    model.to(plan.device)
    generator = torch.Generator(plan.device).manual_seed(seed)

    def dithered(_: object, __: object, out: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(out.shape, generator=generator, device=out.device)
        return (out.float() * (1 + plan.dither * (2 * drawn - 1))).to(out.dtype)

    if plan.dither:
        for name, module in model.named_modules():
            if name.endswith(".moe"):
                module.register_forward_hook(dithered)
    where = machine() if plan.device == "cpu" else torch.cuda.get_device_name()
    return model, tokenizer, f"{where}, {plan.dtype}"


def measure_faults(plan: RunPlan, faults: Sequence[str]) -> None:
    """Teacher-force run 0's replies through faulty models, each with rounding of its own."""
    from moeserve.tiny.decode import reply_logprobs, run_prefix
    from moeserve.tiny.minigsm import load_split

    shots = load_split("train")[:NUM_SHOTS]
    questions = load_split("test")[: plan.num_replayed]
    replies = load_run(path_of(plan.folder, 0)).token_ids[: plan.num_replayed]
    for number, fault in enumerate(faults, start=1000):
        path = fault_path(plan.folder, fault)
        if path.is_file():
            continue
        model, tokenizer, _ = _model(plan, number, fault)
        prefix = run_prefix(model, tokenizer, shots)
        scores = reply_logprobs(model, tokenizer, prefix, questions, replies, REPLAY_SIZES[0])
        rounded = [[round(x, 6) for x in row] for row in scores]
        write_text(path, json.dumps({"fault": fault, "logprobs": rounded}) + "\n")
        print(f"replayed {fault}", flush=True)


def fault_path(folder: Path, fault: str) -> Path:
    """File of a fault's replay."""
    return folder / f"fault-{fault.replace(':', '-').replace('@', '-layer-')}.json"


def splits(found: Replies, order: list[int], reference: list[list[int]]) -> list[Split]:
    """Where replies part from the reference's.

    Args:
        found: Replies in the order they were asked.
        order: Question index of each.
        reference: Token ids of run 0, by question index.
    """
    made = []
    for at, index in enumerate(order):
        ids, before = found.token_ids[at], reference[index]
        if ids == before:
            continue
        pairs = zip(ids, before, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(before)))
        margins = found.margins[at]
        margin = round(margins[position], 4) if position < len(margins) else None
        made.append(Split(index, position, margin))
    return sorted(made, key=lambda split: split.index)
