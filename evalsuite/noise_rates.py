"""How often the gates and replay fail runs of one unchanged build.

Receives runs that `noise_measure.py` made, returns rates; faults under the same noise are
`noise_doses.py`, the page is `noise_study.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalsuite.gates.absolute import Floor, false_alarm_rate, statistical_gate, threshold_gate
from evalsuite.gates.base import Counts, GateOutcome
from evalsuite.gates.paired import PairedPlan, paired_gate
from evalsuite.noise_runs import NUM_LOADS, NoiseRun
from evalsuite.replay import ReplayLimits, compare_logprobs, noise_between
from evalsuite.stats.noise import measure_noise, tolerance_for
from evalsuite.verdict import Status

CLEAN_REPLAYS = 200


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
    """What replay says of clean builds.

    Attributes:
        num_clean: Replays of the unchanged build against a baseline of its own.
        failed: Of them, by all tests.
        mean_shifts: Mean loss of each, nats a token.
        ratios: Spread of an answer over its noise, geometric mean over answers.
        agreements: Of the two shifts.
        p_agreements: Their one-sided p.
    """

    num_clean: int
    failed: int
    mean_shifts: tuple[float, ...]
    ratios: tuple[float, ...]
    agreements: tuple[float, ...]
    p_agreements: tuple[float, ...]


def replays(runs: Sequence[NoiseRun], draws: int = CLEAN_REPLAYS) -> Replays:
    """Replay the model against itself: two replays are the baseline's, two the build's.

    Each pair had the same load, as `evalsuite replay` sends it; no run is in both pairs.
    """
    by_load: dict[int, list[NoiseRun]] = {}
    for run in runs:
        if run.logprobs:
            by_load.setdefault(run.number % NUM_LOADS, []).append(run)
    kept = [group for group in by_load.values() if len(group) > 1]
    draw = random.Random(1)
    limits = ReplayLimits()
    outcomes, ratios = [], []
    for _ in range(draws if len(kept) > 1 else 0):
        (one, two), (three, four) = (draw.sample(group, 2) for group in draw.sample(kept, 2))
        before, after, old, new = (dict(enumerate(x.logprobs)) for x in (one, two, three, four))
        noise = noise_between(before, old)
        outcomes.append(compare_logprobs(before, after, limits, noise, (old, new)))
        ratios.append(noise_ratio(noise_between(before, after), noise))
    return Replays(
        len(outcomes),
        sum(one.status is Status.FAIL for one in outcomes),
        tuple(one.mean_shift for one in outcomes),
        tuple(ratios),
        tuple(one.agreement or 0.0 for one in outcomes),
        tuple(1.0 if one.p_agreement is None else one.p_agreement for one in outcomes),
    )


def noise_ratio(spreads: Mapping[int, float], noise: Mapping[int, float]) -> float:
    """Geometric mean over answers of the spread over the noise."""
    least = ReplayLimits().min_spread / 10
    logs = [math.log(max(x, least) / max(noise[index], least)) for index, x in spreads.items()]
    return math.exp(math.fsum(logs) / len(logs))
