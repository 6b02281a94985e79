"""Statistics against scipy, published figures, and invariants on random inputs."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evalsuite.stats import agreement, noise, paired, power, proportion, rules, sequential

OUTCOMES = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


# -- proportion ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "n", "expected"),
    [
        (0.29, 1319, 0.0125), (0.58, 1319, 0.0136), (0.85, 1319, 0.0098), (0.88, 1319, 0.0089),
        (0.92, 1319, 0.0075), (0.95, 1319, 0.0060), (0.88, 200, 0.0230), (0.92, 200, 0.0192),
    ],
)  # fmt: skip
def test_binomial_se_published(p: float, n: int, expected: float) -> None:
    assert proportion.binomial_se(p, n) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("n", "half"), [(50, 0.075), (200, 0.038), (1319, 0.015)])
def test_half_width_at_092(n: int, half: float) -> None:
    low, high = proportion.wilson_interval(round(0.92 * n), n)
    assert (high - low) / 2 == pytest.approx(half, abs=0.0035)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipy(case: tuple[int, int]) -> None:
    right, n = case
    interval = scipy_stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    low, high = proportion.wilson_interval(right, n)
    assert low == pytest.approx(interval.low, abs=1e-12)
    assert high == pytest.approx(interval.high, abs=1e-12)
    one_sided = scipy_stats.binomtest(right, n, alternative="greater").proportion_ci(
        0.95, method="wilson"
    )
    assert proportion.wilson_bound(right, n, 0.95, "lower") == pytest.approx(
        one_sided.low, abs=1e-12
    )


@pytest.mark.parametrize(
    ("threshold", "tolerance", "n", "needed"),
    [
        (0.9, 0.0, 1000, 900),
        (0.9, 0.0, 1319, 1188),  # 1187.1
        (0.7, 0.0, 10, 7),  # 0.7 * 10 is 7.000000000000001 in binary
        (0.92, 0.08, 1319, 1108),  # 0.84 * 1319 = 1107.96
        (0.3, 0.1, 10, 2),  # 0.3 - 0.1 is 0.19999999999999998 in binary
        (0.05, 0.08, 100, 0),
    ],
)
def test_min_correct_is_exact(threshold: float, tolerance: float, n: int, needed: int) -> None:
    assert proportion.min_correct(threshold, tolerance, n) == needed


# -- paired ----------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_equals_scipy_binomtest(lost: int, gained: int) -> None:
    total = lost + gained
    expected = (
        scipy_stats.binomtest(lost, total, 0.5, alternative="greater").pvalue if total else 1.0
    )
    assert paired.mcnemar_exact(lost, gained) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_mcnemar_by_hand() -> None:
    # 8 lost, 2 gained: (45 + 10 + 1) / 1024; the point itself is 45 / 1024.
    assert paired.mcnemar_exact(8, 2) == pytest.approx(56 / 1024)
    assert paired.mcnemar_midp(8, 2) == pytest.approx((56 - 22.5) / 1024)
    assert paired.mcnemar_exact(0, 0) == 1.0
    assert paired.mcnemar_two_sided(8, 2) == pytest.approx(112 / 1024)


@pytest.mark.parametrize(("d", "se"), [(0.006, 0.21), (0.02, 0.39), (0.035, 0.52), (0.1, 0.87)])
def test_paired_se_published(d: float, se: float) -> None:
    half = d * 1319 / 2
    assert 100 * paired.paired_se(half, half, 1319) == pytest.approx(se, abs=0.006)  # type: ignore[arg-type]


@given(OUTCOMES)
def test_swapping_sides(pairs: list[tuple[bool, bool]]) -> None:
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired.discordance(before, after), paired.discordance(after, before)
    assert (there.lost, there.gained) == (back.gained, back.lost)
    assert there.drop == -back.drop
    # P(X >= b) + P(X >= c) = 1 + P(X = b): the two one-sided tests share the observed point.
    point = scipy_stats.binom.pmf(there.lost, there.lost + there.gained, 0.5)
    total = paired.mcnemar_exact(there.lost, there.gained) + paired.mcnemar_exact(
        back.lost, back.gained
    )
    assert total == pytest.approx(1 + point)


def _repeats(
    rng: np.random.Generator, n: int, r: int, p: float
) -> dict[int, tuple[bool | None, ...]]:
    return {i: tuple(bool(x) for x in rng.random(r) < p) for i in range(n)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_permuting_and_padding_change_nothing(seed: int, rb: int, ra: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    base, cand = _repeats(rng, n, rb, 0.8), _repeats(rng, n, ra, 0.7)
    result = paired.repeats_test(base, cand)
    order = rng.permutation(n)
    shuffled = paired.repeats_test(
        {int(k): base[int(i)] for k, i in enumerate(order)},
        {int(k): cand[int(i)] for k, i in enumerate(order)},
    )
    assert shuffled.p_value == pytest.approx(result.p_value, rel=1e-9)
    # Equal pairs, on which both builds always agree, carry no information.
    padded = paired.repeats_test(
        {**base, **{n + k: (k % 2 == 0,) * rb for k in range(20)}},
        {**cand, **{n + k: (k % 2 == 0,) * ra for k in range(20)}},
    )
    assert padded.p_value == pytest.approx(result.p_value, rel=1e-9)
    assert padded.drop == pytest.approx(result.drop * n / (n + 20))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_swapping_repeated_builds_turns_the_drop(seed: int, rb: int, ra: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    base, cand = _repeats(rng, n, rb, 0.8), _repeats(rng, n, ra, 0.7)
    there, back = paired.repeats_test(base, cand), paired.repeats_test(cand, base)
    assert there.drop == pytest.approx(-back.drop)
    assert there.stderr == pytest.approx(back.stderr)
    # Each is a tail of one distribution, so that the two tails overlap in the observed point.
    assert there.p_sign_flip + back.p_sign_flip >= 1 - 1e-9
    assert there.p_stratified + back.p_stratified >= 1 - 1e-9


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 400))
def test_one_more_lost_answer_never_helps(lost: int, gained: int, equal: int) -> None:
    n = lost + gained + equal + 1
    assert paired.mcnemar_exact(lost + 1, gained) <= paired.mcnemar_exact(lost, gained)
    assert paired.mcnemar_exact(lost, gained + 1) >= paired.mcnemar_exact(lost, gained)
    better, worse = (paired.drop_upper_bound(b, gained, n, 0.8) for b in (lost, lost + 1))
    assert better < worse


@given(OUTCOMES)
def test_one_repeat_each_is_mcnemar(pairs: list[tuple[bool, bool]]) -> None:
    counts = paired.discordance([a for a, _ in pairs], [b for _, b in pairs])
    result = paired.repeats_test(
        {i: (a,) for i, (a, _) in enumerate(pairs)}, {i: (b,) for i, (_, b) in enumerate(pairs)}
    )
    expected = paired.mcnemar_exact(counts.lost, counts.gained)
    assert result.p_sign_flip == pytest.approx(expected, rel=1e-9)
    assert result.p_stratified == pytest.approx(expected, rel=1e-9)


def test_sign_flip_by_enumeration() -> None:
    differences = [3, -1, 2, 2, -3, 1, 0, 4]
    nonzero = [d for d in differences if d]
    sums = [
        sum(s * abs(d) for s, d in zip(signs, nonzero, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(nonzero))
    ]
    expected = sum(total >= sum(differences) for total in sums) / len(sums)
    assert paired.sign_flip_exact(differences) == pytest.approx(expected)
    assert paired.sign_flip_monte_carlo(differences) == pytest.approx(expected, abs=0.01)


def test_sign_flip_equals_scipy_permutation_test() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0.3, 1.0, 12)
    expected = scipy_stats.permutation_test(
        (x, np.zeros(12)), lambda a, b: np.sum(a - b), permutation_type="samples",
        alternative="greater", n_resamples=np.inf,
    ).pvalue  # fmt: skip
    assert paired.sign_flip_monte_carlo(list(x)) == pytest.approx(expected, abs=0.01)


def test_stratified_by_enumeration() -> None:
    # Two questions, 2 baseline and 2 candidate answers each.
    groups = [((True, True), (False, True)), ((True, False), (False, False))]
    observed = sum(sum(c) for _, c in groups)
    hits = total = 0
    for picks in itertools.product(itertools.combinations(range(4), 2), repeat=2):
        value = sum(
            sum((*b, *c)[i] for i in pick) for (b, c), pick in zip(groups, picks, strict=True)
        )
        hits, total = hits + (value <= observed), total + 1
    strata = [(sum(b), 2, sum(c), 2) for b, c in groups]
    assert paired.stratified_permutation(strata) == pytest.approx(hits / total)


def test_copies_of_one_run_add_no_certainty() -> None:
    # Ten bit-equal repeats are one run: by question the p-value stays that of a single run.
    before = dict.fromkeys(range(30), (True,))
    after = {i: (i >= 6,) for i in range(30)}
    single = paired.repeats_test(before, after).p_value
    copies = paired.repeats_test(
        {i: o * 10 for i, o in before.items()}, {i: o * 10 for i, o in after.items()}
    )
    assert single == pytest.approx(1 / 64)
    assert copies.p_value == pytest.approx(single)
    assert copies.p_stratified < single / 1000  # what the larger of the two protects from


def test_missing_repeats_are_left_out() -> None:
    result = paired.repeats_test(
        {0: (True, None), 1: (None, None), 2: (True, True)},
        {0: (False, None), 1: (True, True), 2: (True, False)},
    )
    assert result.n == 2
    assert result.drop == pytest.approx(0.75)


def test_drop_upper_bound_is_positive_without_a_flip() -> None:
    bound = paired.drop_upper_bound(0, 0, 1319, 0.95)
    assert 0.0005 < bound < 0.003
    assert paired.drop_upper_bound(40, 20, 1319, 0.95) == pytest.approx(
        20 / 1321 + 1.6449 * math.sqrt(62 - 400 / 1321) / 1321, abs=1e-6
    )


# -- power -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "usual", "strict"),
    [
        (0.006, 0.53, 1.01),
        (0.02, 0.97, 1.84),
        (0.035, 1.28, 2.44),
        (0.05, 1.53, 2.92),
        (0.1, 2.17, 4.12),
    ],
)
def test_detectable_drop_published(d: float, usual: float, strict: float) -> None:
    see = power.smallest_detectable_drop
    assert 100 * see(1319, d, 0.05, 0.8) == pytest.approx(usual, abs=0.01)
    assert 100 * see(1319, d, 0.001, 0.95) == pytest.approx(strict, abs=0.01)


def test_required_questions_inverts() -> None:
    drop = power.smallest_detectable_drop(1319, 0.035, 0.05, 0.8)
    assert power.required_questions(drop * 1.0000001, 0.035, 0.05, 0.8) == 1319


@pytest.mark.parametrize(("noise_", "drop"), [(0.005, 0.01), (0.035, 0.0), (0.1, 0.02)])
def test_mcnemar_power_against_draws(noise_: float, drop: float) -> None:
    rng = np.random.default_rng(1)
    n, draws = 800, 20_000
    cells = rng.multinomial(n, [noise_ / 2 + drop, noise_ / 2, 1 - noise_ - drop], size=draws)
    p = scipy_stats.binom.sf(cells[:, 0] - 1, cells[:, 0] + cells[:, 1], 0.5)
    assert power.mcnemar_power(n, noise_, drop, 0.05) == pytest.approx((p <= 0.05).mean(), abs=0.01)


def test_detectable_drop_on_top_reaches_its_power_and_costs_more() -> None:
    drop = power.detectable_drop_on_top(1319, 0.035, 0.05, 0.8)
    assert power.mcnemar_power(1319, 0.035, drop, 0.05) >= 0.8
    assert power.mcnemar_power(1319, 0.035, drop - 1e-4, 0.05) < 0.8
    assert drop > power.smallest_detectable_drop(1319, 0.035, 0.05, 0.8)


def test_detectable_drop_from_se_agrees_with_single_runs() -> None:
    se = math.sqrt(0.035 / 1319)
    assert power.detectable_drop_from_se(se, 1319, 0.05, 0.8) == pytest.approx(
        power.detectable_drop_on_top(1319, 0.035, 0.05, 0.8), abs=0.0015
    )


# -- noise and rules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "sigma"), [(0.006, 0.15), (0.02, 0.28), (0.035, 0.36), (0.05, 0.44), (0.1, 0.62)]
)
def test_sigma_published(d: float, sigma: float) -> None:
    assert 100 * noise.sigma_from_discordance(d, 1319) == pytest.approx(sigma, abs=0.006)


def test_noise_of_a_known_process() -> None:
    rng = np.random.default_rng(7)
    p = rng.choice([0.0, 0.3, 1.0], size=1319, p=[0.05, 0.1, 0.85])
    runs = rng.random((40, 1319)) < p
    measured = noise.measure_noise(runs.tolist())
    true_sigma = math.sqrt((p * (1 - p)).sum()) / 1319
    assert measured.sigma_questions == pytest.approx(true_sigma, rel=0.05)
    assert measured.sigma_repeats == pytest.approx(true_sigma, rel=0.35)
    assert measured.discordant == pytest.approx(2 * (p * (1 - p)).sum() / 1319, rel=0.05)
    assert measured.sigma_run == measured.sigma_questions


def test_noise_sees_shifts_of_whole_runs() -> None:
    # Whole runs shift together: half of the runs lose the same 60 questions.
    rows = [[not (run % 2 and i < 60) for i in range(1000)] for run in range(10)]
    measured = noise.measure_noise(rows)
    assert measured.p_overdispersed < 0.01
    assert measured.sigma_run == measured.sigma_repeats == pytest.approx(0.0316, abs=1e-4)


def test_noise_needs_two_repeats() -> None:
    with pytest.raises(ValueError, match="two or more"):
        noise.measure_noise([[True]])


@pytest.mark.parametrize(
    ("n", "offset", "theta"),
    [(1319, -3.203, 4.841), (512, -5.14, 7.77), (1024, -3.63, 5.49), (4096, -1.82, 2.75)],
)
def test_trtllm_rule_published(n: int, offset: float, theta: float) -> None:
    rule = rules.TrtllmRule(n)
    assert 100 * rule.offset == pytest.approx(offset, abs=0.01)
    assert 100 * rule.theta == pytest.approx(theta, abs=0.01)
    assert rule.passes(0.85, 0.88) is (100 * rule.offset <= -3)


def test_vllm_rule() -> None:
    assert rules.vllm_passes(0.81, 0.88)
    assert not rules.vllm_passes(0.79, 0.88)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 60))
def test_noise_does_not_know_an_order(seed: int, repeats: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((repeats, n)) < 0.8
    found = noise.measure_noise(rows.tolist())
    turned = noise.measure_noise(rows[rng.permutation(repeats)][:, rng.permutation(n)].tolist())
    assert turned.discordant == pytest.approx(found.discordant)
    assert turned.sigma_run == pytest.approx(found.sigma_run)
    # Questions that never flip thin the discordance out and widen nothing.
    padded = noise.measure_noise(np.hstack([rows, np.ones((repeats, n), bool)]).tolist())
    assert padded.discordant == pytest.approx(found.discordant / 2)
    assert padded.sigma_questions == pytest.approx(found.sigma_questions / 2)


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=12), st.randoms())
def test_holm_does_not_know_an_order(p_values: list[float], random: Random) -> None:
    adjusted = sequential.holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))
    order = random.sample(range(len(p_values)), len(p_values))
    assert sequential.holm([p_values[i] for i in order]) == [adjusted[i] for i in order]


# -- agreement -------------------------------------------------------------------------------

SHIFTS = st.lists(
    st.tuples(*[st.floats(-2, 2, allow_subnormal=False)] * 2), min_size=1, max_size=50
)


@given(SHIFTS)
def test_agreement_is_symmetric(pairs: list[tuple[float, float]]) -> None:
    one, two = [a for a, _ in pairs], [b for _, b in pairs]
    found = agreement.sign_agreement(one, two, 1e-6)
    assert -1 <= found <= 1
    assert agreement.sign_agreement(two, one, 1e-6) == found
    # Swapping the builds turns both shifts; swapping the first two replays turns one.
    assert agreement.sign_agreement([-x for x in one], [-x for x in two], 1e-6) == found
    assert agreement.sign_agreement([-x for x in one], two, 1e-6) == -found
    # Tokens in another order are the same tokens, of another size too; equal ones say nothing.
    turned = agreement.sign_agreement(one[::-1], two[::-1], 1e-6)
    assert turned == pytest.approx(found)
    assert agreement.sign_agreement([3 * x for x in one], two, 3e-6) == pytest.approx(
        agreement.sign_agreement(one, [x if abs(x) > 3e-6 else 0.0 for x in two], 1e-6)
    )
    padded = agreement.sign_agreement([*one, *[0.0] * 7], [*two, *[1.0] * 7], 1e-6)
    assert padded == pytest.approx(found * len(one) / (len(one) + 7))


@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.5, 0.9])
def test_signs_of_correlated_normals_agree_as_scipy_says(correlation: float) -> None:
    cov = [[1, correlation], [correlation, 1]]
    both_low = scipy_stats.multivariate_normal.cdf([0, 0], cov=cov)
    expected = 4 * both_low - 1  # P(same sign) - P(other sign)
    assert agreement.common_share(expected) == pytest.approx(correlation, abs=1e-5)
    rng = np.random.default_rng(1)
    one, two = rng.multivariate_normal([0, 0], cov, 40_000).T
    found = agreement.sign_agreement(list(one), list(two), 0.0)
    assert found == pytest.approx(expected, abs=0.02)


def test_common_shift_in_noise() -> None:
    # Half of the variance is common: a shift as large as the noise; a third of the signs agree.
    assert agreement.shift_in_noise(1 / 3) == pytest.approx(1.0)
    assert agreement.shift_in_noise(0.0) == agreement.shift_in_noise(-0.4) == 0.0
    assert agreement.shift_in_noise(1.0) > 1e6


@pytest.mark.parametrize("n", [1, 30, 330, 1319])
@pytest.mark.parametrize("p", [1e-6, 0.02, 0.5, 0.9, 0.96, 1.0])
def test_binomial_cdf_equals_scipy_stats(n: int, p: float) -> None:
    for k in {-1, 0, 1, n // 2, int(0.9 * n), n - 1, n, n + 1}:
        want = float(scipy_stats.binom.cdf(k, n, p))
        assert proportion.binomial_cdf(k, n, p) == pytest.approx(want, rel=1e-9, abs=1e-300)


def test_a_verdict_does_not_wait_for_scipy_stats() -> None:
    code = (
        "import sys\n"
        "from evalsuite.gates.absolute import Floor, threshold_gate\n"
        "from evalsuite.gates.base import Counts\n"
        "threshold_gate(Counts(1200, 0, 1319), Floor(0.9, 0.02, None, 0.05, 0.8))\n"
        "print('scipy.stats' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
