"""Make the runs and variants of the noise study: `python -m evalsuite.noise_measure --work DIR`.

Receives a folder and a plan; fills the folder and goes on where an earlier call was cut, alone or
as one of several processes. Every run shuffles the questions anew under another load, as a server
in fast mode would see them. Who answers is `noise_torch.py` or `noise_engine.py`; the files are
`noise_runs.py`, what they show is `noise_study.py`.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from evalsuite.noise_runs import (
    DITHER,
    Model,
    NoiseRun,
    RunPlan,
    Score,
    Variant,
    load_run,
    path_of,
    splits,
    variant_path,
    write,
)

# Replays of each variant: two, so that what they share is the variant's own.
VARIANT_REPLAYS = 2


def make_model(plan: RunPlan, variant: str = "clean") -> Model:
    """Who answers under a plan."""
    if plan.has_engine:
        from evalsuite.noise_engine import EngineModel

        return EngineModel(variant, plan.num_questions, plan.device)
    from evalsuite.noise_torch import TorchModel

    return TorchModel(variant, plan)


def measure(plan: RunPlan, num_runs: int, part: tuple[int, int] = (0, 1)) -> None:
    """Make the runs that the folder lacks, up to `num_runs` in all.

    Args:
        plan: What a run is.
        num_runs: Runs of the folder.
        part: (k, n): every n-th run from the k-th on; several processes share the work.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    first, step = part
    missing = [
        number
        for number in sorted({0, *range(first, num_runs, step)})
        if number < num_runs and not path_of(plan.folder, number).is_file()
    ]
    if not missing:
        return
    model = make_model(plan)
    for number in missing:
        run = measure_one(plan, model, number)
        write(path_of(plan.folder, number), run)
        print(
            f"run {number}: {sum(run.right)} of {len(run.right)} right, {run.num_asked} asked, "
            f"{len(run.splits)} replies other than run 0's, {run.seconds:.1f} s",
            flush=True,
        )


def measure_one(plan: RunPlan, model: Model, number: int) -> NoiseRun:
    """Ask the questions in the order and under the load of this run; replay run 0's replies."""
    from moeserve.tiny.evaluate import is_right

    began, cpu_began = time.perf_counter(), time.process_time()
    base = load_run(path_of(plan.folder, 0)) if number else None
    chosen = list(range(plan.num_questions))
    if base is not None and number >= plan.num_full:
        chosen = [i for i in chosen if base.least_margin(i) < plan.margin_cut]
    found = model.ask(random.Random(number).sample(chosen, len(chosen)), number)
    right = list(base.right) if base is not None else [False] * plan.num_questions
    for index, reply in found.items():
        right[index] = is_right(reply.text, model.questions[index])
    reference = [list(found[i].ids) for i in chosen] if base is None else base.token_ids
    margins = [list(found[i].margins) for i in chosen] if base is None else base.margins
    scores: dict[int, Score] = {}
    if number % plan.replay_every == 0:
        # Run 0 says how near every reply was to another one.
        count = plan.num_questions if base is None else plan.num_replayed
        scores = model.score(dict(enumerate(reference[:count])), number)
    if base is None and not any(margins):
        margins = [list(scores[index].margins) for index in chosen]
    return NoiseRun(
        number=number,
        num_asked=len(chosen),
        right=right,
        splits=splits(found, reference, margins),
        logprobs=_rows(scores, plan.num_replayed),
        seconds=round(time.perf_counter() - began, 2),
        cpu_seconds=round(time.process_time() - cpu_began, 2),
        machine=model.machine,
        token_ids=reference if base is None else [],
        margins=[[round(x, 3) for x in row] for row in margins] if base is None else [],
    )


def _rows(scores: Mapping[int, Score], count: int) -> list[list[float]]:
    kept = sorted(scores)[:count]
    return [[round(x, 6) for x in scores[index].logprobs] for index in kept]


def measure_variants(plan: RunPlan, names: Sequence[tuple[int, str]]) -> None:
    """Replay run 0's replies through each variant that the folder lacks, and ask the questions.

    Args:
        plan: What a run is.
        names: Number, which chooses order and load, and a fault or a key of `noise_engine.OTHERS`.
    """
    from moeserve.errors import Unsupported
    from moeserve.tiny.evaluate import is_right

    base = load_run(path_of(plan.folder, 0))
    for place, name in names:
        number = 1000 + place
        path = variant_path(plan.folder, name)
        if path.is_file():
            continue
        began = time.perf_counter()
        try:
            model = make_model(plan, name)
        except Unsupported as error:
            print(f"{name}: not here: {error}", flush=True)
            continue
        kept = dict(enumerate(base.token_ids[: plan.num_replayed]))
        loads = [number + 7 * again for again in range(VARIANT_REPLAYS)]
        replays = [_rows(model.score(kept, load), plan.num_replayed) for load in loads]
        asked = min(plan.num_asked_variants, plan.num_questions)
        order = random.Random(number).sample(range(asked), asked)
        found = model.ask(order, number)
        right = [is_right(found[i].text, model.questions[i]) for i in sorted(found)]
        parted = splits(found, base.token_ids, base.margins)
        seconds = round(time.perf_counter() - began, 2)
        write(path, Variant(name, right, parted, replays, seconds, model.machine, loads))
        print(f"{name}: {sum(right)} of {len(right)} right, {seconds:.1f} s", flush=True)


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}: want K/N with 0 <= K < N")
    return int(part), int(parts)


def main(argv: list[str] | None = None) -> int:
    """Make what is missing."""
    parser = argparse.ArgumentParser(prog="python -m evalsuite.noise_measure", description=__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder of the runs")
    add("--runs", type=int, default=0, help="make runs up to this number")
    add("--variants", nargs="*", default=(), help="faults, other backends, 'eager', ...")
    add("--part", type=_part, default=(0, 1), help="K/N: this process makes every N-th")
    add("--engine", action="store_true", help="moeserve's engine answers, not torch alone")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--full", type=int, default=100, help="runs that ask every question")
    add("--margin-cut", type=float, default=2.0, help="later runs ask what lies below it")
    add("--questions", type=int, default=1319)
    add("--replayed", type=int, default=500, help="replies that are teacher-forced")
    add("--asked", type=int, default=1319, help="questions of each variant")
    add("--dither", type=float, default=DITHER, help="0 for the processor's own rounding alone")
    add("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(args.threads)
    plan = RunPlan(
        args.work,
        args.questions,
        num_asked_variants=args.asked,
        num_replayed=args.replayed,
        dither=args.dither,
        num_full=args.full,
        margin_cut=args.margin_cut,
        device=args.device,
        has_engine=args.engine,
    )
    part, parts = args.part
    measure(plan, args.runs, args.part)
    failed = 0
    for one in list(enumerate(args.variants))[part::parts]:
        try:
            measure_variants(plan, [one])
        except Exception:  # noqa: BLE001 - a process for many variants; the others go on
            traceback.print_exc()
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
