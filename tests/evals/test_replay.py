"""Replay: teacher forcing over HTTP, the shift test, near-ties."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fake_server import Action, FakeServer, Request, error

from evalsuite.baseline import LOGPROB_DIGITS
from evalsuite.errors import EvalError
from evalsuite.flips import Flip
from evalsuite.near_ties import explain_flip, explain_flips
from evalsuite.replay import (
    ReplayLimits,
    clipped,
    compare_logprobs,
    noise_between,
)
from evalsuite.replay_client import ReplayServer, Scored, answer_part, score
from evalsuite.retries import RetryPolicy
from evalsuite.verdict import Status

Logprobs = dict[int, list[float]]


def echo_payload(text: str, generated: str = "") -> bytes:
    """One token a word, the space before it included; -len(word)/10 as its log-probability."""
    words = [w for w in (text + generated).replace(" ", "| ").split("|") if w]
    offsets = [sum(map(len, words[:i])) for i in range(len(words))]
    logprobs = {
        "tokens": words,
        "token_logprobs": [None, *[-len(w) / 10 for w in words[1:]]],
        "text_offset": offsets,
    }
    return json.dumps({"choices": [{"index": 0, "text": text, "logprobs": logprobs}]}).encode()


def test_score_takes_the_answers_tokens_only() -> None:
    def script(request: Request) -> Action:
        assert request.body["echo"] is True
        assert request.body["logprobs"] == 1
        return Action(payload=echo_payload(request.prompts[0]))

    with FakeServer(script) as server:
        found = score(ReplayServer(server.url, "m"), {4: ("a question", " so it is 18")})
    assert found == {4: Scored((" so", " it", " is", " 18"), (-0.3, -0.3, -0.3, -0.3))}


def test_a_server_that_wants_one_token_gets_one_and_it_is_cut_off() -> None:
    def script(request: Request) -> Action:
        if request.body["max_tokens"] == 0:
            return Action(status=400, payload=b'{"error":{"message":"max_tokens must be >= 1"}}')
        return Action(payload=echo_payload(request.prompts[0], " extra"))

    with FakeServer(script) as server:
        found = score(ReplayServer(server.url, "m"), {0: ("q", " 18")})
    assert found[0].tokens == (" 18",)


def test_failures_are_errors_after_retries() -> None:
    policy = RetryPolicy(max_retries=2, base_s=0.001)
    with FakeServer(lambda _: Action(status=500, payload=b"boom")) as server:
        with pytest.raises(EvalError, match="HTTP 500: boom"):
            score(ReplayServer(server.url, "m", retry=policy), {0: ("q", "a")})
        assert len(server.requests) == 3
    with (
        FakeServer(lambda _: Action(("text",))) as server,
        pytest.raises(EvalError, match="echoed"),
    ):
        score(ReplayServer(server.url, "m", retry=policy), {0: ("q", "a")})


def test_retries_and_the_key_are_the_clients() -> None:
    policy = RetryPolicy(max_retries=2, base_s=0.001)

    def script(request: Request) -> Action:
        if request.attempt < 2:
            return error(429, "busy", Retry_After="0")
        return Action(payload=echo_payload(request.prompts[0]))

    with FakeServer(script) as server:
        target = ReplayServer(server.url + "/v1/", "m", retry=policy, api_key="sk-secret")
        found = score(target, {7: ("a question", " so it is 18")})
        assert found[7].tokens == (" so", " it", " is", " 18")
        assert {r.headers["authorization"] for r in server.requests} == {"Bearer sk-secret"}
        assert [request.attempt for request in server.requests] == [0, 1, 2]
    with (
        FakeServer(lambda _: error(401, "no key sk-secret")) as server,
        pytest.raises(EvalError, match=r"refuses echo .*HTTP 401: no key \*\*\*"),
    ):
        score(ReplayServer(server.url, "m", api_key="sk-secret"), {0: ("q", "a")})


def test_a_token_across_the_border_is_left_out() -> None:
    logprobs = {"tokens": ["ab", "cd"], "token_logprobs": [None, -1.0], "text_offset": [0, 2]}
    payload = json.dumps({"choices": [{"logprobs": logprobs}]}).encode()
    assert answer_part(payload, 3, 4) == Scored((), ())
    assert answer_part(payload, 2, 4) == Scored(("cd",), (-1.0,))


def answers(rng: np.random.Generator, n: int = 300) -> Logprobs:
    return {i: list(-rng.exponential(0.2, rng.integers(30, 120))) for i in range(n)}


def noisy(base: Logprobs, rng: np.random.Generator, sigma: float, shift: float = 0.0) -> Logprobs:
    return {i: [x - shift + rng.normal(0, sigma) for x in row] for i, row in base.items()}


def test_an_unchanged_build_passes_at_the_stated_rate() -> None:
    rng = np.random.default_rng(0)
    limits = ReplayLimits(alpha=0.05, max_mean_shift=0.0)
    statuses = []
    for _ in range(60):
        base = answers(rng, 60)
        one, two = noisy(base, rng, 0.02), noisy(base, rng, 0.02)
        statuses.append(compare_logprobs(one, two, limits).status)
    assert statuses.count(Status.FAIL) <= 9  # 5 % of 60 is 3; 9 is the 99.9 % quantile


def test_a_shift_that_flips_nothing_is_seen() -> None:
    rng = np.random.default_rng(1)
    base = answers(rng)
    outcome = compare_logprobs(base, noisy(base, rng, 0.02, shift=0.004), ReplayLimits())
    assert outcome.status is Status.FAIL
    assert outcome.mean_shift == pytest.approx(0.004, abs=0.001)
    allowed = compare_logprobs(
        base, noisy(base, rng, 0.02, shift=0.004), ReplayLimits(max_mean_shift=0.006)
    )
    assert allowed.status is Status.PASS


def test_more_noise_without_a_shift_is_seen_against_the_builds_own() -> None:
    rng = np.random.default_rng(2)
    base = answers(rng)
    first, second = noisy(base, rng, 0.01), noisy(base, rng, 0.01)
    noise = noise_between(first, second)
    assert np.mean(list(noise.values())) == pytest.approx(0.0141, abs=0.001)
    fine = compare_logprobs(first, noisy(base, rng, 0.01), ReplayLimits(), noise)
    assert fine.status is Status.PASS
    worse = compare_logprobs(first, noisy(base, rng, 0.05), ReplayLimits(), noise)
    assert worse.status is Status.FAIL
    assert worse.p_spread is not None
    assert worse.p_spread < 0.0005 < worse.p_mean
    unknown = compare_logprobs(first, noisy(base, rng, 0.05), ReplayLimits(max_spread=0.02))
    assert unknown.status is Status.FAIL


def test_a_bit_equal_build_with_rounded_logprobs_passes() -> None:
    rng = np.random.default_rng(4)
    base = answers(rng)
    rounded = {i: [round(x, LOGPROB_DIGITS) for x in row] for i, row in base.items()}
    outcome = compare_logprobs(rounded, base, ReplayLimits(), dict.fromkeys(base, 0.0))
    assert outcome.status is Status.PASS
    assert 0 < outcome.spread < 1e-7


def test_a_few_questions_far_beyond_the_noise_are_seen() -> None:
    # A confident model: most answers cannot move, and a fault shows where two tokens were close.
    rng = np.random.default_rng(5)
    base = answers(rng, 200)
    first, second = noisy(base, rng, 1e-4), noisy(base, rng, 1e-4)
    noise = noise_between(first, second)
    after = noisy(base, rng, 1e-4)
    for index in range(9):
        after[index][3] -= 0.05 * (-1) ** index
    outcome = compare_logprobs(first, after, ReplayLimits(), noise)
    assert (outcome.status, outcome.num_beyond) == (Status.FAIL, 9)
    assert outcome.p_spread is not None
    # P(X >= 9), X ~ Bin(200, 0.01).
    assert outcome.p_beyond == pytest.approx(2.3e-4, rel=0.1)
    assert min(outcome.p_mean, outcome.p_spread) > 0.001 / 3


def test_unequal_noise_over_questions_raises_no_alarm() -> None:
    rng = np.random.default_rng(6)
    limits = ReplayLimits(alpha=0.05, max_mean_shift=0.0, noise_factor=1.5)
    failed = 0
    for _ in range(60):
        sizes = 0.01 * np.exp(rng.normal(0, 1.5, 100))
        builds = [
            {i: list(rng.standard_t(3, 30) * size) for i, size in enumerate(sizes)}
            for _ in range(3)
        ]
        noise = noise_between(builds[0], builds[1])
        failed += compare_logprobs(builds[0], builds[2], limits, noise).status is Status.FAIL
    assert failed <= 9  # 5 % of 60 is 3; 9 is the 99.9 % quantile


def test_one_garbled_question_does_not_decide() -> None:
    rng = np.random.default_rng(3)
    base = answers(rng)
    after = noisy(base, rng, 0.01)
    after[5] = [x - 20 for x in after[5]]
    outcome = compare_logprobs(base, after, ReplayLimits())
    assert outcome.status is Status.PASS
    assert outcome.largest[0][0] == 5


def test_other_tokens_are_an_error() -> None:
    base: Logprobs = {i: [-1.0, -2.0] for i in range(10)}
    outcome = compare_logprobs(base, {i: [-1.0] for i in range(10)}, ReplayLimits())
    assert outcome.status is Status.ERROR
    assert outcome.num_unaligned == 10


def test_clipping_keeps_order_and_centre() -> None:
    assert clipped([0.0, 1.0, 2.0, 1000.0]) == [0.0, 1.0, 2.0, 9.5]
    assert clipped([0.0, 0.0, 0.0, 5.0]) == [0.0, 0.0, 0.0, 5.0]


def test_flips_are_near_ties_or_real() -> None:
    flip = Flip(3, "18", True, False, " so 18", " so 17")
    before = Scored((" so", " 18"), (-0.1, -0.70))
    near = explain_flip(flip, before, Scored((" so", " 17"), (-0.1, -0.69)))
    assert near == "near-tie: margin +0.010 nats at token 1 (' 18' -> ' 17')"
    real = explain_flip(flip, before, Scored((" so", " 17"), (-0.1, -0.01)))
    assert real.startswith("real: margin +0.690 nats at token 1")
    longer = explain_flip(flip, before, Scored((" so", " 18", " more"), (-0.1, -0.7, -1.0)))
    assert longer == "one reply ends where the other goes on"
    (explained,) = explain_flips([flip], {3: before}, {3: Scored((" no",), (-0.17,))})
    assert explained.note == "near-tie: margin -0.070 nats at token 0 (' so' -> ' no')"


def four(
    rng: np.random.Generator, base: Logprobs, sigma: float, shift: Logprobs | None = None
) -> tuple[Logprobs, Logprobs, tuple[Logprobs, Logprobs]]:
    """Two replays of a baseline and two of a build that shifts every token in its own way."""
    moved = base
    if shift is not None:
        moved = {i: [x + y for x, y in zip(base[i], shift[i], strict=True)] for i in base}
    again = (noisy(base, rng, sigma), noisy(moved, rng, sigma))
    return noisy(base, rng, sigma), noisy(moved, rng, sigma), again


def only_agreement(**more: float) -> ReplayLimits:
    return ReplayLimits(max_mean_shift=10.0, noise_factor=100.0, **more)


def test_a_shift_far_below_the_noise_is_seen_in_two_replays() -> None:
    rng = np.random.default_rng(5)
    base = answers(rng)
    # A third of the noise of a token, up or down: neither mean nor spread shows it.
    shift = {i: list(rng.normal(0, 0.01, len(row))) for i, row in base.items()}
    first, after, again = four(rng, base, 0.02, shift)
    noise = noise_between(first, again[0])
    once = compare_logprobs(first, after, ReplayLimits(), noise)
    assert once.status is Status.PASS
    assert once.agreement is None
    twice = compare_logprobs(first, after, ReplayLimits(), noise, again)
    assert twice.status is Status.FAIL
    # Sheppard: (2 / pi) asin(r), with r the shift's share of the variance of one difference.
    share = 0.01**2 / (0.01**2 + 2 * 0.02**2)
    assert twice.agreement == pytest.approx(2 / math.pi * math.asin(share), abs=0.02)
    assert "two shifts agree by +0.0" in twice.reason
    allowed = compare_logprobs(first, after, ReplayLimits(max_agreement=0.2), noise, again)
    assert allowed.status is Status.PASS


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_agreement_of_an_unchanged_build_keeps_its_rate(scale: float) -> None:
    rng = np.random.default_rng(6)
    found = []
    for _ in range(200):
        # Noise of tokens that differs by factors of thousands, and is far from normal.
        base = {i: list(-rng.exponential(0.2, 30)) for i in range(40)}
        widths = {i: scale * 10 ** rng.uniform(-3, 0, 30) for i in base}
        runs = [
            {i: list(np.array(row) + widths[i] * rng.standard_t(2, 30)) for i, row in base.items()}
            for _ in range(4)
        ]
        one = compare_logprobs(runs[0], runs[1], only_agreement(), None, (runs[2], runs[3]))
        assert one.p_agreement is not None
        found.append(one.p_agreement)
    # 5 % of 200 is 10 and 20 % is 40; the bounds are the 0.1 and 99.9 % quantiles.
    assert 2 <= sum(p <= 0.05 for p in found) <= 20
    assert 23 <= sum(p <= 0.2 for p in found) <= 58


def test_bit_equal_replays_have_nothing_to_agree_on() -> None:
    base = answers(np.random.default_rng(7), 50)
    # The last digit that a file keeps is no shift either.
    kept = {i: [round(x, LOGPROB_DIGITS) for x in row] for i, row in base.items()}
    outcome = compare_logprobs(kept, base, ReplayLimits(), noise_between(base, base), (kept, base))
    assert outcome.status is Status.PASS
    assert outcome.agreement == 0.0
    assert outcome.p_agreement == 1.0


def test_other_kernels_may_round_and_may_not_lose() -> None:
    rng = np.random.default_rng(8)
    base = answers(rng)
    shift = {i: list(rng.normal(0, 0.003, len(row))) for i, row in base.items()}
    first, after, again = four(rng, base, 0.0001, shift)
    noise = noise_between(first, again[0])
    assert compare_logprobs(first, after, ReplayLimits(), noise, again).status is Status.FAIL
    allowed = ReplayLimits(has_other_kernels=True)
    outcome = compare_logprobs(first, after, allowed, noise, again)
    assert outcome.status is Status.PASS
    assert (outcome.p_spread, outcome.agreement, outcome.num_beyond) == (None, None, 0)
    # A loss is one whatever computes it, and so are five answers in a hundred far off.
    lossy = {i: [x - 0.004 for x in row] for i, row in after.items()}
    assert compare_logprobs(first, lossy, allowed, noise, again).status is Status.FAIL
    far = {i: [x + 0.02 * (-1) ** j for j, x in enumerate(after[i])] for i in range(15)}
    outcome = compare_logprobs(first, {**after, **far}, allowed, noise, again)
    assert outcome.status is Status.FAIL
    assert outcome.num_beyond == 15
    few = {i: far[i] for i in range(4)}
    assert compare_logprobs(first, {**after, **few}, allowed, noise).status is Status.PASS
