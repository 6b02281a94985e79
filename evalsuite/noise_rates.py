"""What the gates and the replay make of runs of one unchanged build, and of faults beside them.

Receives runs that `noise_measure.py` made, returns rates; the page of them is `noise_study.py`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalsuite.gates.absolute import Floor, false_alarm_rate, statistical_gate, threshold_gate
from evalsuite.gates.base import Counts, GateOutcome
from evalsuite.gates.paired import PairedPlan, paired_gate
from evalsuite.noise_runs import NoiseRun, load_variant
from evalsuite.replay import ReplayLimits, compare_logprobs, noise_between
from evalsuite.stats.noise import measure_noise, tolerance_for
from evalsuite.verdict import Status

CLEAN_REPLAYS = 200
# Doses that no accuracy gate sees, and two that are gross, for the other end.
FAULTS = (
    *("noise:0.003", "noise:0.01", "noise:0.03", "noise:0.1", "slots-dropped:1"),
    *("expert-scale:0.1", "expert-scale:0.5", "layer-scale:0.01@1", "layer-scale:0.1@1"),
    *("experts-zeroed:1@2", "no-renormalisation:1", "experts-zeroed:4"),
)


def clopper_pearson(hits: int, draws: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided exact interval of a rate."""
    from scipy.stats import beta

    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, draws - hits + 1))
    high = 1.0 if hits == draws else float(beta.ppf(1 - tail, hits + 1, draws - hits))
    return low, high


@dataclass(frozen=True)
class Rate:
    """False alarms of one gate on one number of questions."""

    gate: str
    n: int
    stated: float
    hits: int
    draws: int


def false_alarms(
    rows: Sequence[Sequence[bool]], n: int, draws: int, seed: int, *, by_question: bool
) -> list[Rate]:
    """Share of pairs of runs of one build on which each gate says FAIL.

    Args:
        rows: Outcomes, one row a run.
        n: Questions of each pair: a random subset.
        draws: Pairs.
        seed: Of the draws.
        by_question: Both sides take every question from a run of its own, so that pairs are
            nearly independent; else whole runs are paired, of which there are only so many.
    """
    draw = random.Random(seed)
    total = len(rows[0])
    # What calibration on these runs would give for this number of questions.
    noise = measure_noise(rows)
    sigma = noise.sigma_run * math.sqrt(total / n)
    tolerance = tolerance_for(0.001, sigma, n)
    plans = {"paired 5 %": PairedPlan(0.05, 0.8), "paired 0.1 %": PairedPlan(0.001, 0.95)}
    shares = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    hits = dict.fromkeys((*plans, "statistical 5 %", "calibrated threshold 0.1 %", "threshold"), 0)
    stated = {"paired 5 %": 0.05, "paired 0.1 %": 0.001, "statistical 5 %": 0.05}
    largest: dict[str, float] = {}
    # The pairs decide by what was lost and gained, and by the floor; equal ones are asked once.
    asked: dict[tuple[str, int, int, bool], bool] = {}
    for _ in range(draws):
        chosen = draw.sample(range(total), n)
        sides = draw.sample(range(len(rows)), 2)
        before, after = (
            [rows[draw.randrange(len(rows)) if by_question else side][i] for i in chosen]
            for side in sides
        )
        # The mean of many repeats of these very questions is the threshold.
        truth = round(math.fsum(shares[i] for i in chosen) / n, 9)
        counts = Counts(sum(after), 0, n)
        floors = {
            "statistical 5 %": Floor(truth, 0.0, sigma, alpha=0.05),
            "calibrated threshold 0.1 %": Floor(truth, round(tolerance, 9), sigma),
            "threshold": Floor(truth, 0.02),
        }
        hits["statistical 5 %"] += _fails(statistical_gate(counts, floors["statistical 5 %"]))
        for name in ("calibrated threshold 0.1 %", "threshold"):
            hits[name] += _fails(threshold_gate(counts, floors[name]))
            rate = false_alarm_rate(floors[name], n)
            largest[name] = max(rate, largest.get(name, 0.0))
        flips = list(zip(before, after, strict=True))
        lost, gained = flips.count((True, False)), flips.count((False, True))
        is_low = _fails(threshold_gate(counts, floors["threshold"]))
        for name, plan in plans.items():
            key = (name, lost, gained, is_low)
            if key not in asked:
                run = {i: (x,) for i, x in enumerate(after)}
                base = {"baseline": {i: (x,) for i, x in enumerate(before)}}
                asked[key] = _fails(paired_gate(run, base, floors["threshold"], plan))
            hits[name] += asked[key]
    return [Rate(k, n, (stated | largest)[k], count, draws) for k, count in hits.items()]


def _fails(outcome: GateOutcome) -> bool:
    return outcome.status is Status.FAIL


@dataclass(frozen=True)
class Replays:
    """What replay says of clean builds and of faults."""

    num_clean: int
    failed: int
    mean_shifts: tuple[float, ...]
    ratios: tuple[float, ...]
    faults: tuple[tuple[str, str, float, float, float], ...]


def replays(runs: Sequence[NoiseRun], folder: Path) -> Replays:
    """Replay the model against itself, then against the faults that were measured."""
    scored = [dict(enumerate(run.logprobs)) for run in runs if run.logprobs]
    triples = list(itertools.permutations(range(len(scored)), 3))
    random.Random(1).shuffle(triples)
    shifts, ratios, failed = [], [], 0
    limits = ReplayLimits()
    triples = triples[:CLEAN_REPLAYS]
    for first, again, after in triples:
        noise = noise_between(scored[first], scored[again])
        outcome = compare_logprobs(scored[first], scored[after], limits, noise)
        failed += outcome.status is Status.FAIL
        shifts.append(outcome.mean_shift)
        ratios.append(_ratio(noise_between(scored[first], scored[after]), noise))
    found = []
    if len(scored) > 1:
        noise = noise_between(scored[0], scored[1])
        for fault in FAULTS:
            measured = load_variant(folder, fault)
            if measured is not None:
                faulty = dict(enumerate(measured.replays[0]))
                one = compare_logprobs(scored[0], faulty, limits, noise)
                ratio = _ratio(noise_between(scored[0], faulty), noise)
                found.append((fault, one.status.value, one.mean_shift, one.spread, ratio))
    return Replays(len(triples), failed, tuple(shifts), tuple(ratios), tuple(found))


def _ratio(spreads: Mapping[int, float], noise: Mapping[int, float]) -> float:
    """Geometric mean over answers of the spread over the noise."""
    least = ReplayLimits().min_spread / 10
    logs = [math.log(max(x, least) / max(noise[index], least)) for index, x in spreads.items()]
    return math.exp(math.fsum(logs) / len(logs))
