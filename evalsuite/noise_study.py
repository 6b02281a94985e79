"""False alarms on real runs that differ by rounding alone: `python -m evalsuite.noise_study`.

Receives the folder that `noise_measure.py` fills; asks the gates about pairs of runs of the one,
unchanged model, replays its answers against itself and against faults, and replaces the text
between two marks of a Markdown page. Error rates on made-up draws are `simulate.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from evalsuite.files import write_text
from evalsuite.near_ties import NEAR_TIE_NATS
from evalsuite.noise_doses import ACCURACY_GATES, Dose, doses
from evalsuite.noise_rates import Rate, clopper_pearson, false_alarms, replays
from evalsuite.noise_runs import NoiseRun, load_runs
from evalsuite.replay import ReplayLimits
from evalsuite.report.markdown import table
from evalsuite.stats.noise import Noise, measure_noise
from evalsuite.verdict import Status

BEGIN = "<!-- noise study, {name}: begin (made by a command, do not edit) -->"
END = "<!-- noise study, {name}: end -->"
SIZES = (200, 500, 1319)
HARMLESS = (
    *("clean", "eager", "noise:0", "deterministic", "torch_grouped_mm", "flashinfer_cutlass"),
    "float32",
)
FAULTS = (
    *("random-routing:1", "halves-swapped:32", "no-renormalisation:1", "slots-dropped:1"),
    *("experts-zeroed:1@2", "experts-zeroed:1", "experts-zeroed:2", "experts-zeroed:4"),
    *("experts-zeroed:8", "experts-swapped:2", "row-lost:64", "row-lost:16"),
    *("noise:0.001", "noise:0.003", "noise:0.01", "noise:0.03", "noise:0.1", "narrow-sums:16"),
    *("expert-scale:0.01", "expert-scale:0.1", "expert-scale:0.5", "expert-scale:1"),
    *("layer-scale:0.01@1", "layer-scale:0.1@1", "layer-scale:0.5@1", "layer-scale:1@1"),
)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def render(folder: Path, draws: int, seed: int, command: str) -> str:
    """Return the text between the marks."""
    runs = load_runs(folder)
    rows = [run.right for run in runs]
    noise = measure_noise(rows)
    total = len(rows[0])
    sizes = [n for n in SIZES if n <= total]
    parts = [
        _about(runs, noise, command),
        "#### False alarms on pairs of these runs",
        f"{draws:,} pairs a row, both sides the same unchanged model on the same questions (a "
        "random subset where fewer). *Whole runs* pairs runs as they were, of which there are "
        f"{len(runs) * (len(runs) - 1) // 2}, so that its pairs repeat; *by question* takes every "
        "question of both sides from a run of its own, which keeps each question's own flips. "
        "Brackets: 95 % Clopper-Pearson interval.",
        _rates_table(rows, sizes, draws, seed),
        "#### Replay of these runs",
        _replay_text(runs),
        "#### Faults under this noise",
        _doses_text(runs, folder),
    ]
    return "\n\n".join(parts)


def _about(runs: Sequence[NoiseRun], noise: Noise, command: str) -> str:
    full = [run for run in runs if run.num_asked == len(run.right)]
    base = runs[0]
    asked_later = {run.num_asked for run in runs if run.num_asked < len(run.right)}
    late = max((base.least_margin(s.index) for run in full for s in run.splits), default=0.0)
    changed = mean(len(run.splits) for run in full[1:]) if len(full) > 1 else 0.0
    minutes = sum(run.seconds for run in runs) / 60
    # Runs that replay take longer.
    seconds = median(run.seconds for run in full)
    part = (
        f" The other {len(runs) - len(full)} asked the {asked_later.pop()} questions whose "
        "smallest margin is small enough to turn; for the rest the outcome of the first run "
        f"stands. In the full runs no reply changed whose smallest margin was above {late:g}."
        if asked_later
        else ""
    )
    accuracies = [mean(run.right) for run in runs]
    return (
        f"{len(runs)} runs, {len(full)} of them full ({len(base.right):,} questions), on "
        f"{base.machine}; a full run takes {seconds:.1f} s beside others, all of them together "
        f"{minutes:.0f} minutes of processes side by side.{part}\n\n```\n{command}\n```\n\n"
        f"Between two runs {changed:.0f} replies differ, and {100 * noise.discordant:.2f} % of the "
        f"outcomes. Accuracy {100 * noise.mean_accuracy:.2f} % (from "
        f"{100 * min(accuracies):.2f} to {100 * max(accuracies):.2f}); sigma of a run "
        f"{100 * noise.sigma_questions:.3f} points by the flips, {100 * noise.sigma_repeats:.3f} "
        f"between the runs (p {noise.p_overdispersed:.2g} that single flips explain it)."
    )


def _rates_table(
    rows: Sequence[Sequence[bool]], sizes: Sequence[int], draws: int, seed: int
) -> str:
    cells = []
    for n in sizes:
        both = (false_alarms(rows, n, draws, seed, by_question=kind) for kind in (False, True))
        for whole, mixed in zip(*both, strict=True):
            cells.append(
                [str(n), whole.gate, f"{100 * whole.stated:.3g}", _rate(whole), _rate(mixed)]
            )
    header = ["questions", "gate", "stated (%)", "whole runs: FAIL (%)", "by question: FAIL (%)"]
    return table(header, cells)


def _rate(rate: Rate) -> str:
    low, high = clopper_pearson(rate.hits, rate.draws)
    return f"{100 * rate.hits / rate.draws:.2f} ({100 * low:.2f} to {100 * high:.2f})"


def _replay_text(runs: Sequence[NoiseRun]) -> str:
    found = replays(runs)
    margins = [s.margin for run in runs for s in run.splits if s.margin is not None]
    limits = ReplayLimits()
    low, high = clopper_pearson(found.failed, max(1, found.num_clean))
    at_5 = sum(p <= 0.05 for p in found.p_agreements)
    low_5, high_5 = clopper_pearson(at_5, max(1, found.num_clean))
    lines = [
        f"{found.num_clean} replays of the unchanged model against a baseline of its own (two "
        f"replays on each side, {len(_replayed(runs)[0].logprobs)} replies each, four of "
        f"{len(_replayed(runs))} runs): {found.failed} FAIL ({100 * low:.1f} to {100 * high:.1f} "
        f"%; stated {100 * limits.alpha:g} %). Mean loss "
        f"{min(found.mean_shifts, default=0.0):+.5f} to "
        f"{max(found.mean_shifts, default=0.0):+.5f} nats a token (up to "
        f"{limits.max_mean_shift:g} passes); spread of an answer over its noise, geometric mean, "
        f"{_quantile(found.ratios, 0.5):.2f} in the middle, "
        f"{max(found.ratios, default=0):.2f} at most (up to {limits.noise_factor:g} passes); "
        f"agreement of two shifts {min(found.agreements, default=0):+.4f} to "
        f"{max(found.agreements, default=0):+.4f}, its p at most 5 % in {at_5} "
        f"({100 * low_5:.1f} to {100 * high_5:.1f} %).",
        _near_ties(margins),
    ]
    return "\n\n".join(lines)


def _near_ties(margins: Sequence[float]) -> str:
    if not margins:
        return "No reply of an unchanged build parts from the first run's."
    near = sum(margin < NEAR_TIE_NATS for margin in margins)
    return (
        f"Where a reply of an unchanged build parts from the first run's, the margin between the "
        f"two best tokens is {_quantile(margins, 0.5):.3g} in the middle, "
        f"{_quantile(margins, 0.9):.3g} at 90 %, {_quantile(margins, 0.99):.3g} at 99 % of "
        f"{len(margins)} splits; {100 * near / len(margins):.1f} % are below the "
        f"{NEAR_TIE_NATS:g} nats of a near-tie."
    )


def _replayed(runs: Sequence[NoiseRun]) -> list[NoiseRun]:
    return [run for run in runs if run.logprobs]


def _doses_text(runs: Sequence[NoiseRun], folder: Path) -> str:
    harmless = doses(runs, folder, HARMLESS)
    faults = doses(runs, folder, FAULTS)
    asked = " or ".join(f"{n:,}" for n in sorted({one.flips.n for one in [*harmless, *faults]}))
    unseen = [one for one in faults if not one.is_seen_by_accuracy]
    seen = [one for one in unseen if one.twice.status is Status.FAIL]
    once = [one for one in unseen if one.once.status is Status.FAIL]
    left = ", ".join(f"`{one.name}`" for one in unseen if one not in seen) or "none"
    lenient = [one for one in unseen if one.lenient.status is Status.FAIL]
    return "\n\n".join(
        [
            f"Each answered {asked} questions once, against the first clean run, and "
            "teacher-forced the same replies twice. *calibrated* is the threshold that `evalsuite "
            "calibrate` makes of these runs. *agreement* and *mean loss* are replay's; *spread / "
            "noise* is the geometric mean over answers. Above the line are other ways to compute "
            "the same.",
            _dose_table(harmless, faults),
            f"No accuracy gate sees {len(unseen)} of these {len(faults)} doses. Of them replay "
            f"sees {len(once)} by one replay on each side and {len(seen)} by two; unseen by it "
            f"too: {left}. Where other kernels are allowed for, it sees {len(lenient)}.",
        ]
    )


def _dose_table(harmless: Sequence[Dose], faults: Sequence[Dose]) -> str:
    header = [
        *("variant", "drop (points)", "replies changed", *ACCURACY_GATES),
        *("replay, once", "replay, twice", "replay, other kernels"),
        *("mean loss (nats)", "spread / noise", "agreement", "p"),
    ]
    rows = [_dose_row(one) for one in harmless]
    rows.append(["—"] * len(header))
    rows += [_dose_row(one) for one in faults]
    return table(header, rows)


def _dose_row(one: Dose) -> list[str]:
    words = {Status.FAIL: "**seen**", Status.PASS: "·"}
    return [
        one.name,
        f"{100 * one.flips.drop + 0.0:+.2f}",
        str(one.num_changed),
        *(words[one.outcomes[gate]] for gate in ACCURACY_GATES),
        words.get(one.once.status, str(one.once.status)),
        words.get(one.twice.status, str(one.twice.status)),
        words.get(one.lenient.status, str(one.lenient.status)),
        f"{round(one.twice.mean_shift, 5) + 0.0:+.5f}",
        f"{one.ratio:.2f}",
        f"{one.twice.agreement or 0.0:+.4f}",
        f"{one.twice.p_agreement:.2g}",
    ]


def main(argv: list[str] | None = None) -> int:
    """Write the section, or print it."""
    parser = argparse.ArgumentParser(prog="python -m evalsuite.noise_study", description=__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder of the runs")
    add("--name", default="torch", help="of the section: torch, engine")
    add("--draws", type=int, default=3000, help="pairs a row")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="page with the two marks; else standard output")
    args = parser.parse_args(argv)
    if len(load_runs(args.work)) < 3:
        parser.error(f"{args.work}: three runs or more are needed; make them with noise_measure")
    command = (
        f"python -m evalsuite.noise_study --work build/noise-{args.name} --name {args.name} "
        f"--draws {args.draws} --out docs/verdicts.md"
    )
    begin_mark, end_mark = (mark.format(name=args.name) for mark in (BEGIN, END))
    section = render(args.work, args.draws, args.seed, command)
    if args.out is None:
        print(section)
        return 0
    before, begin, rest = args.out.read_text(encoding="utf-8").partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        parser.error(f"{args.out} lacks the marks {begin_mark!r} and {end_mark!r}")
    write_text(args.out, f"{before}{begin_mark}\n\n{section}\n\n{end_mark}{after}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
