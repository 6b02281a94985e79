"""Gates: exact comparison, confidence bounds, pairs, repeats by a plan, bit equality."""

from __future__ import annotations

import numpy as np
import pytest
from verdict_helpers import make_record

from evalsuite.baseline import Answer, text_sha256
from evalsuite.gates.absolute import Floor, false_alarm_rate, statistical_gate, threshold_gate
from evalsuite.gates.base import Counts
from evalsuite.gates.equal import equal_gate
from evalsuite.gates.paired import PairedPlan, look_level, paired_gate, wants_repeat
from evalsuite.stats.paired import mcnemar_exact
from evalsuite.verdict import Status

NO_FLOOR = Floor(0.5, 0.5)
PLAN = PairedPlan(alpha=0.05, power=0.8)
Run = dict[int, tuple[bool | None, ...]]


def single(n: int, right: set[int]) -> Run:
    return {i: (i in right,) for i in range(n)}


# -- threshold and statistical ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "n", "threshold", "tolerance", "status"),
    [
        (898, 1000, 0.9, 0.0, Status.FAIL),
        (900, 1000, 0.9, 0.0, Status.PASS),
        (1184, 1319, 0.9, 0.0, Status.FAIL),  # 0.8976, prints as 0.90
        (7, 10, 0.7, 0.0, Status.PASS),  # equal is enough
        (840, 1000, 0.92, 0.08, Status.PASS),
        (839, 1000, 0.92, 0.08, Status.FAIL),
    ],
)
def test_threshold_is_exact(
    right: int, n: int, threshold: float, tolerance: float, status: Status
) -> None:
    assert threshold_gate(Counts(right, 0, n), Floor(threshold, tolerance)).status is status


def test_missing_answers_decide_nothing_or_are_an_error() -> None:
    floor = Floor(0.9, 0.0)
    assert threshold_gate(Counts(95, 2, 100), floor).status is Status.PASS
    assert threshold_gate(Counts(80, 2, 100), floor).status is Status.FAIL
    outcome = threshold_gate(Counts(89, 2, 100), floor)
    assert outcome.status is Status.ERROR
    assert "between 0.8900 and 0.9100" in outcome.reason
    assert outcome.alpha is None


def test_stated_false_alarm_rate_is_the_real_one() -> None:
    floor, n = Floor(0.88, 0.02), 1319
    rng = np.random.default_rng(0)
    draws = rng.binomial(n, 0.88, 100_000)
    fails = np.mean(
        [threshold_gate(Counts(int(x), 0, n), floor).status is Status.FAIL for x in draws[:3000]]
    )
    assert false_alarm_rate(floor, n) == pytest.approx((draws < 1135).mean(), abs=0.002)
    assert fails == pytest.approx(false_alarm_rate(floor, n), abs=0.008)


def test_calibration_sharpens_the_stated_rates() -> None:
    plain = threshold_gate(Counts(1180, 0, 1319), Floor(0.88, 0.02))
    measured = threshold_gate(Counts(1180, 0, 1319), Floor(0.88, 0.02, sigma_run=0.0036))
    assert plain.alpha is not None
    assert measured.alpha is not None
    assert measured.alpha < 1e-6 < plain.alpha
    assert measured.detectable_drop == pytest.approx(0.02 + 0.8416 * 0.0036, abs=1e-4)


@pytest.mark.parametrize(
    ("right", "status"),
    [(1219, Status.PASS), (1190, Status.INCONCLUSIVE), (1150, Status.FAIL)],
)
def test_statistical(right: int, status: Status) -> None:
    outcome = statistical_gate(Counts(right, 0, 1319), Floor(0.9, 0.0))
    assert outcome.status is status
    assert outcome.alpha == 0.05


def test_statistical_uses_the_calibration() -> None:
    counts, sharp = Counts(1196, 0, 1319), Floor(0.9, 0.0, sigma_run=0.0036)
    assert statistical_gate(counts, Floor(0.9, 0.0)).status is Status.INCONCLUSIVE
    assert statistical_gate(counts, sharp).status is Status.PASS


# -- paired ----------------------------------------------------------------------------------


def test_paired_single_run_is_mcnemar_with_its_flips() -> None:
    n = 400
    base = single(n, set(range(360)))
    run = single(n, set(range(12, 360)) | {390, 391})
    outcome = paired_gate(run, {"baseline": base}, NO_FLOOR, PLAN)
    assert outcome.status is Status.FAIL
    assert outcome.p_value == pytest.approx(mcnemar_exact(12, 2))
    assert outcome.detail["lost"] == list(range(12))
    assert outcome.detail["gained"] == [390, 391]
    assert outcome.alpha == 0.05
    assert outcome.power == 0.8
    assert outcome.detectable_drop is not None
    assert 0.01 < outcome.detectable_drop < 0.05


def test_paired_pass_and_floor_kept() -> None:
    n = 400
    base = single(n, set(range(360)))
    run = single(n, set(range(4, 360)) | {390, 391, 392})
    assert paired_gate(run, {"baseline": base}, NO_FLOOR, PLAN).status is Status.PASS
    low = paired_gate(run, {"baseline": base}, Floor(0.95, 0.01), PLAN)
    assert low.status is Status.FAIL
    assert low.detail["below_floor"] is True


def test_anchor_stops_slow_drift() -> None:
    n = 1000
    anchor = single(n, set(range(950)))
    current = single(n, set(range(12, 950)))
    run = single(n, set(range(16, 950)))
    assert paired_gate(run, {"baseline": current}, NO_FLOOR, PLAN).status is Status.PASS
    both = paired_gate(run, {"baseline": current, "anchor": anchor}, NO_FLOOR, PLAN)
    assert both.status is Status.FAIL
    assert both.detail["reference"] == "anchor"
    assert both.detail["level"] == 0.025


def test_paired_missing_answers() -> None:
    n = 400
    base = single(n, set(range(360)))
    fine: Run = {**base, 0: (None,)}
    assert paired_gate(fine, {"baseline": base}, NO_FLOOR, PLAN).status is Status.PASS
    # Four lost and three missing: seven lost fails, four lost passes.
    run: Run = {**single(n, set(range(4, 360))), 10: (None,), 11: (None,), 12: (None,)}
    outcome = paired_gate(run, {"baseline": base}, NO_FLOOR, PLAN)
    assert outcome.status is Status.ERROR
    assert "lack an answer and decide" in outcome.reason


@pytest.mark.parametrize(
    ("lost", "status"), [(2, Status.PASS), (8, Status.INCONCLUSIVE), (60, Status.FAIL)]
)
def test_max_drop_has_three_outcomes(lost: int, status: Status) -> None:
    base = single(1319, set(range(1200)))
    run = single(1319, set(range(lost, 1200)))
    plan = PairedPlan(0.05, 0.8, max_drop=0.006)
    assert paired_gate(run, {"baseline": base}, NO_FLOOR, plan).status is status


def test_plan_of_repeats_is_fixed_and_ends() -> None:
    plan = PairedPlan(0.05, 0.8, max_repeats=3)
    levels = [look_level(plan, 1, look) for look in (1, 2, 3)]
    assert all(level < 0.05 for level in levels)
    n = 400
    base = single(n, set(range(360)))
    near = single(n, set(range(5, 360)) | {390})  # p = 7 / 64: near, not below its level
    outcome = paired_gate(near, {"baseline": base}, NO_FLOOR, plan)
    assert outcome.status is Status.PASS
    assert wants_repeat(outcome, near, plan)
    assert not wants_repeat(outcome, near, PLAN)
    copies: Run = {i: o * 2 for i, o in near.items()}
    assert not wants_repeat(outcome, copies, plan)  # bit-equal repeats carry no information
    assert not wants_repeat(paired_gate(base, {"baseline": base}, NO_FLOOR, plan), base, plan)


# -- equal -----------------------------------------------------------------------------------


def answers(texts: list[str], logprobs: tuple[float, ...] = ()) -> dict[int, Answer]:
    return {i: Answer((True,), "18", t, text_sha256(t), logprobs) for i, t in enumerate(texts)}


def test_equal() -> None:
    texts = ["a", "b", "c"]
    records = [make_record(i, text) for i, text in enumerate(texts)]
    assert equal_gate(records, answers(texts)).status is Status.PASS
    changed = equal_gate(records, answers(["a", "b ", "c"]))
    assert changed.status is Status.FAIL
    assert changed.detail["texts_differ"] == [1]


def test_equal_compares_logprobs_where_both_have_them() -> None:
    records = [make_record(0, "a", token_logprobs=(-0.5, -0.25001))]
    assert equal_gate(records, answers(["a"], (-0.5, -0.25001))).status is Status.PASS
    assert equal_gate(records, answers(["a"], (-0.5, -0.25))).status is Status.FAIL
    assert equal_gate(records, answers(["a"])).status is Status.PASS


def test_equal_with_a_missing_answer_is_no_pass_and_no_fail() -> None:
    records = [make_record(0, "a"), make_record(1, None, status="timeout")]
    assert equal_gate(records, answers(["a", "b"])).status is Status.ERROR
    assert equal_gate(records[:1], answers(["a", "b"])).status is Status.ERROR
    records = [make_record(0, "x"), make_record(1, None, status="timeout")]
    assert equal_gate(records, answers(["a", "b"])).status is Status.FAIL
