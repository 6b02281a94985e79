"""Which gate sees which fault under real noise: variants of the model beside its clean runs.

Receives the runs and variants that `noise_measure.py` made; asks each gate about one run of the
variant against one clean run, and replay about two replays of each. Returns rows for a table; the
page is `noise_study.py`. The same faults without noise are `dose_response.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalsuite.gates.absolute import Floor, threshold_gate
from evalsuite.gates.base import Counts
from evalsuite.gates.paired import PairedPlan, paired_gate
from evalsuite.noise_rates import noise_ratio
from evalsuite.noise_runs import NUM_LOADS, NoiseRun, Variant, load_variant
from evalsuite.replay import ReplayLimits, ReplayOutcome, compare_logprobs, noise_between
from evalsuite.stats.noise import measure_noise, tolerance_for
from evalsuite.stats.paired import Discordance, discordance
from evalsuite.stats.rules import TrtllmRule, vllm_passes
from evalsuite.verdict import Status

PLANS = {"paired 5 %": PairedPlan(0.05, 0.8), "paired 0.1 %": PairedPlan(0.001, 0.95)}
ACCURACY_GATES = ("threshold", "calibrated 0.1 %", *PLANS, "vLLM -8 points", "TensorRT-LLM")
TOLERANCE = 0.02


@dataclass(frozen=True)
class Dose:
    """One variant under every gate.

    Attributes:
        name: Of the variant.
        flips: Of its run against the clean run.
        num_changed: Replies that differ from the clean run's.
        outcomes: Status by accuracy gate.
        once: Replay of one replay on each side, against measured noise.
        twice: Of two replays on each side.
        lenient: Where other kernels are allowed for.
        ratio: Spread of an answer over its noise, geometric mean.
    """

    name: str
    flips: Discordance
    num_changed: int
    outcomes: Mapping[str, Status]
    once: ReplayOutcome
    twice: ReplayOutcome
    lenient: ReplayOutcome
    ratio: float

    @property
    def is_seen_by_accuracy(self) -> bool:
        """Whether a gate on right and wrong answers fails it."""
        return Status.FAIL in self.outcomes.values()


def doses(runs: Sequence[NoiseRun], folder: Path, names: Sequence[str]) -> list[Dose]:
    """Ask every gate about the variants that were measured.

    Args:
        runs: Clean ones; run 0 is the baseline, the rest say what the noise is.
        folder: Of the variants.
        names: Variants, those that are not there are left out.
    """
    found = [one for name in names if (one := load_variant(folder, name)) is not None]
    replayed = [run for run in runs if run.logprobs]
    if len(replayed) < 2:
        return []
    return [
        _dose(one, runs[0].right, _partners(one, replayed), _calibrated(runs, len(one.right)))
        for one in found
    ]


def _calibrated(runs: Sequence[NoiseRun], n: int) -> Floor:
    """What `evalsuite calibrate` would write into a file that asks the first `n` questions."""
    noise = measure_noise([run.right[:n] for run in runs])
    tolerance = tolerance_for(0.001, noise.sigma_run, n)
    return Floor(round(noise.mean_accuracy, 9), round(tolerance, 9), noise.sigma_run)


def _partners(one: Variant, replayed: Sequence[NoiseRun]) -> tuple[NoiseRun, NoiseRun]:
    """Two clean replays under the loads of the variant's two."""
    chosen: list[NoiseRun] = []
    for load in one.loads:
        left = [run for run in replayed if run not in chosen]
        same = [run for run in left if (run.number - load) % NUM_LOADS == 0]
        chosen.append((same or left)[0])
    return chosen[0], chosen[1]


def _dose(
    one: Variant, clean: Sequence[bool], partners: tuple[NoiseRun, NoiseRun], calibrated: Floor
) -> Dose:
    n = len(one.right)
    clean = clean[:n]
    accuracy, reference = sum(one.right) / n, sum(clean) / n
    counts, floor = Counts(sum(one.right), 0, n), Floor(reference, TOLERANCE)
    run = {index: (right,) for index, right in enumerate(one.right)}
    baseline = {"baseline": {index: (right,) for index, right in enumerate(clean)}}
    outcomes = {
        "threshold": threshold_gate(counts, floor).status,
        "calibrated 0.1 %": threshold_gate(counts, calibrated).status,
        **{name: paired_gate(run, baseline, floor, plan).status for name, plan in PLANS.items()},
        "vLLM -8 points": _status(vllm_passes(accuracy, reference)),
        "TensorRT-LLM": _status(TrtllmRule(n).passes(accuracy, reference)),
    }
    before, old = (dict(enumerate(run.logprobs)) for run in partners)
    after, new = (dict(enumerate(rows)) for rows in one.replays)
    noise, limits = noise_between(before, old), ReplayLimits()
    return Dose(
        one.name,
        discordance(clean, one.right),
        len(one.splits),
        outcomes,
        compare_logprobs(before, after, limits, noise),
        compare_logprobs(before, after, limits, noise, (old, new)),
        compare_logprobs(before, after, ReplayLimits(has_other_kernels=True), noise),
        noise_ratio(noise_between(before, after), noise),
    )


def _status(passes: bool) -> Status:
    return Status.PASS if passes else Status.FAIL
