"""`paired`: a run against stored runs of the same questions, the floor kept.

Receives outcomes of the run and of the baselines, returns `GateOutcome`; says whether another
repeat is worth its time. Whether two runs may be compared at all is `baseline.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from evalsuite.gates.absolute import Floor, false_alarm_rate
from evalsuite.gates.base import GateOutcome
from evalsuite.stats.paired import (
    Outcomes,
    drop_upper_bound,
    mcnemar_midp,
    repeats_test,
)
from evalsuite.stats.power import (
    detectable_drop_from_se,
    detectable_drop_on_top,
    smallest_detectable_drop,
)
from evalsuite.stats.proportion import min_correct, normal_quantile
from evalsuite.stats.sequential import information_fractions, spending_levels
from evalsuite.verdict import Status

# A look whose p-value is above this ends the plan with PASS: more repeats would hardly turn
# it. Stopping early to accept never raises the false-alarm rate.
FUTILITY_P = 0.3


@dataclass(frozen=True)
class PairedPlan:
    """Settings of the comparison, fixed before the first answer.

    Attributes:
        alpha: False-alarm rate over the whole plan and all references.
        power: Power at which the detectable drop is stated.
        max_repeats: Looks at most; one look is one more repeat of the candidate.
        max_drop: Acceptable drop. With it FAIL needs a drop shown to be larger (at alpha), PASS
            one shown not to be (with confidence `power`); in between it is INCONCLUSIVE. None:
            FAIL where a drop is shown, else PASS.
        noise: Calibrated discordant fraction, None to use the observed one.
    """

    alpha: float
    power: float
    max_repeats: int = 1
    max_drop: float | None = None
    noise: float | None = None


@functools.lru_cache(maxsize=256)
def look_level(plan: PairedPlan, baseline_repeats: int, look: int, references: int = 1) -> float:
    """Level to which this look's p-value is compared (Pocock-like spending, Bonferroni)."""
    alpha = plan.alpha / references
    if plan.max_repeats == 1:
        return alpha
    fractions = information_fractions(max(1, baseline_repeats), plan.max_repeats)
    return spending_levels(fractions, alpha)[min(look, plan.max_repeats) - 1]


def paired_gate(
    run: Outcomes, references: Mapping[str, Outcomes], floor: Floor, plan: PairedPlan
) -> GateOutcome:
    """Decide a run against each reference ("baseline", and "anchor" where there is one).

    FAIL where the pooled accuracy is below the floor or a reference shows a drop at its level;
    with `max_drop` INCONCLUSIVE where the drop may lie on either side of it; else PASS. Missing
    answers count as wrong and as right in turn; where the two disagree the outcome is ERROR.
    """
    num_missing = sum(None in outcomes for outcomes in run.values())
    worst = _decide(_filled(run, False), references, floor, plan)
    if not num_missing:
        return worst
    best = _decide(_filled(run, True), references, floor, plan)
    if worst.status is best.status:
        return replace(
            worst, reason=f"{worst.reason}; {num_missing} questions lack an answer, either way"
        )
    return GateOutcome(
        Status.ERROR,
        f"{num_missing} of {len(run)} questions lack an answer and decide the outcome: "
        f"{worst.status} if they are wrong ({worst.reason}), {best.status} if right",
    )


def _filled(run: Outcomes, value: bool) -> dict[int, tuple[bool, ...]]:
    return {
        index: tuple(value if x is None else x for x in outcomes) for index, outcomes in run.items()
    }


def _decide(
    run: Mapping[int, tuple[bool, ...]],
    references: Mapping[str, Outcomes],
    floor: Floor,
    plan: PairedPlan,
) -> GateOutcome:
    compared = [
        _compare(name, run, reference, plan, len(references))
        for name, reference in references.items()
    ]
    # The reference that decides: a failing one first, else the one nearest to failing.
    order = (Status.FAIL, Status.INCONCLUSIVE, Status.PASS)
    decisive = min(compared, key=lambda one: (order.index(one.status), one.p_value or 0.0))
    answers = sum(len(outcomes) for outcomes in run.values())
    right = sum(sum(outcomes) for outcomes in run.values())
    needed = min_correct(floor.threshold, floor.tolerance, answers)
    detail: dict[str, object] = {
        **decisive.detail,
        "below_floor": right < needed,
        "floor_needed": needed,
        "floor_false_alarm": false_alarm_rate(floor, len(run)),
        "references": {
            name: {"status": one.status.value, "p_value": one.p_value, **one.detail}
            for name, one in zip(references, compared, strict=True)
        },
    }
    if right < needed:
        return replace(
            decisive,
            status=Status.FAIL,
            reason=f"accuracy {right}/{answers} = {right / answers:.4f} < floor {floor.value:g} "
            f"(needs {needed}); {decisive.reason}",
            detail=detail,
        )
    return replace(decisive, detail=detail)


@dataclass(frozen=True)
class _Bounds:
    """What is known of the drop besides its p-value."""

    lower: float
    upper: float
    seen: float
    counts: str
    detail: dict[str, object]


def _single_runs(
    reference: Outcomes, run: Mapping[int, tuple[bool, ...]], plan: PairedPlan, level: float
) -> _Bounds:
    lost, gained = _flips(reference, run)
    b, c, n = len(lost), len(gained), len(reference.keys() & run.keys())
    observed = (b + c) / n
    return _Bounds(
        lower=-drop_upper_bound(c, b, n, 1 - level),
        upper=drop_upper_bound(b, c, n, plan.power),
        seen=detectable_drop_on_top(
            n, observed if plan.noise is None else plan.noise, level, plan.power
        ),
        counts=f"{b} lost, {c} gained of {n}",
        detail={
            "lost": lost,
            "gained": gained,
            "discordant": observed,
            "p_midp": mcnemar_midp(b, c),
            "detectable_drop_within": smallest_detectable_drop(n, observed, level, plan.power),
        },
    )


def _compare(
    name: str,
    run: Mapping[int, tuple[bool, ...]],
    reference: Outcomes,
    plan: PairedPlan,
    references: int,
) -> GateOutcome:
    test = repeats_test(reference, run)
    look = max(len(outcomes) for outcomes in run.values())
    before = max(len(outcomes) for outcomes in reference.values())
    level = look_level(plan, before, look, references)
    if look == before == 1:
        bounds = _single_runs(reference, run, plan, level)
    else:
        bounds = _Bounds(
            lower=test.drop - normal_quantile(1 - level) * test.stderr,
            upper=test.drop + normal_quantile(plan.power) * test.stderr,
            seen=detectable_drop_from_se(test.stderr, test.n, level, plan.power),
            counts=f"{look} repeats against {before}, {test.n} questions",
            detail={},
        )
    is_shown = test.p_value <= level
    status, seen = Status.FAIL if is_shown else Status.PASS, bounds.seen
    reason = (
        f"against the {name}: drop {100 * test.drop:+.2f} points ({bounds.counts}), "
        f"one-sided p {test.p_value:.4g} {'<=' if is_shown else '>'} {level:.4g}"
    )
    if plan.max_drop is not None:
        seen = min(1.0, seen + plan.max_drop)
        if not (is_shown and bounds.lower > plan.max_drop):
            status = Status.PASS if bounds.upper <= plan.max_drop else Status.INCONCLUSIVE
        reason += (
            f"; acceptable {100 * plan.max_drop:.2f} points, the drop lies between "
            f"{100 * bounds.lower:.2f} and {100 * bounds.upper:.2f}"
        )
    detail: dict[str, object] = {
        **bounds.detail,
        "reference": name,
        "drop": test.drop,
        "drop_stderr": test.stderr,
        "drop_bounds": [bounds.lower, bounds.upper],
        "p_sign_flip": test.p_sign_flip,
        "p_stratified": test.p_stratified,
        "level": level,
        "look": look,
        "max_looks": plan.max_repeats,
        "baseline_repeats": before,
        "pairs": test.n,
    }
    return GateOutcome(status, reason, plan.alpha, plan.power, seen, test.p_value, detail)


def _flips(reference: Outcomes, run: Mapping[int, tuple[bool, ...]]) -> tuple[list[int], list[int]]:
    shared = sorted(reference.keys() & run.keys())
    lost = [i for i in shared if reference[i][0] and run[i][0] is False]
    gained = [i for i in shared if reference[i][0] is False and run[i][0]]
    return lost, gained


def wants_repeat(outcome: GateOutcome, run: Outcomes, plan: PairedPlan) -> bool:
    """Whether the plan asks for another repeat after this look.

    No more where the plan is used up, the outcome is a FAIL, p is far from any level, or the
    last repeat equals the one before it: copies carry no information.
    """
    look = max((len(outcomes) for outcomes in run.values()), default=0)
    if look >= plan.max_repeats or outcome.status in (Status.FAIL, Status.ERROR):
        return False
    if look > 1 and all(outcomes[-1] == outcomes[-2] for outcomes in run.values()):
        return False
    near = outcome.p_value is not None and outcome.p_value <= FUTILITY_P
    return near or outcome.status is Status.INCONCLUSIVE
