from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.engine.kv_cache import PagePool
from moeserve.engine.request import Request, SamplingParams
from moeserve.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from moeserve.engine.sequence import Sequence

PAGE = 4


class Simulation:
    """A scheduler with a model whose next token is a function of all tokens so far."""

    def __init__(
        self,
        num_pages: int = 1000,
        max_num_seqs: int = 8,
        budget: int = 32,
        max_model_len: int = 256,
        has_caching: bool = True,
        has_chunks: bool = True,
    ) -> None:
        self.pool = PagePool(num_pages, PAGE, has_caching)
        limits = SchedulerLimits(max_num_seqs, budget, max_model_len, has_chunks)
        self.scheduler = Scheduler(limits, self.pool)
        self.arrivals = itertools.count()
        self.finished: list[Sequence] = []
        self.plans: list[StepPlan] = []

    def add(self, prompt: list[int], max_tokens: int = 4, **fields: int) -> Sequence:
        number = next(self.arrivals)
        priority = fields.pop("priority", 0)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)
        request = Request(str(number), tuple(prompt), sampling, priority)
        seq = Sequence(request, number, (), self.scheduler.limits.max_model_len)
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        counts = {id(s): c for s, c in plan.prefills} | {id(s): 1 for s in plan.decodes}
        assert sum(counts.values()) <= self.scheduler.limits.max_num_batched_tokens
        assert len(counts) <= self.scheduler.limits.max_num_seqs
        for seq in [*plan.decodes, *(s for s, _ in plan.prefills)]:
            end = seq.num_computed + counts[id(seq)]
            assert len(seq.pages) * PAGE >= end
            row = self.scheduler.block_table[seq.row, : len(seq.pages)]
            assert row.tolist() == seq.pages
        sampled = plan.sampled()
        self.scheduler.advance(plan)
        for seq in sampled:
            seq.tokens.append(sum(seq.tokens) * 31 % 997)
            if len(seq.tokens) >= seq.max_total:
                self.scheduler.remove(seq)
                self.finished.append(seq)
        self.plans.append(plan)
        return plan

    def run(self) -> None:
        while self.scheduler.waiting or self.scheduler.running:
            assert self.step(), "work is left and nothing was scheduled"


def expected(seq: Sequence) -> list[int]:
    tokens = list(seq.request.prompt_ids)
    while len(tokens) < seq.max_total:
        tokens.append(sum(tokens) * 31 % 997)
    return tokens


def test_a_prompt_longer_than_the_budget_is_cut_and_decodes_go_on_in_every_step() -> None:
    sim = Simulation(budget=16)
    small = sim.add([1, 2, 3], max_tokens=20)
    sim.step()
    sim.add(list(range(100, 190)), max_tokens=2)
    chunks = []
    for _ in range(7):
        plan = sim.step()
        assert plan.decodes[0] is small
        chunks += [count for _, count in plan.prefills]
    assert chunks == [15, 15, 15, 15, 15, 15]
    sim.run()
    assert [s.tokens for s in sim.finished] == [expected(s) for s in sim.finished]


def test_a_huge_prompt_leaves_half_of_the_budget_to_small_ones_behind_it() -> None:
    sim = Simulation(budget=32, has_caching=False)
    huge = sim.add([7] * 200)
    small = [sim.add([i, i + 1, i + 2]) for i in range(4)]
    plan = sim.step()
    assert plan.prefills[0] == (huge, 16)
    assert [s for s, _ in plan.prefills[1:]] == small
    sim.run()
    assert sim.finished[-1] is huge


def test_equal_prompts_share_pages_within_one_step() -> None:
    sim = Simulation(budget=64)
    first = sim.add(list(range(20)))
    second = sim.add([*range(16), 99, 98, 97])
    plan = sim.step()
    assert plan.prefills == [(first, 20), (second, 3)]
    assert second.pages[:4] == first.pages[:4]
    assert second.num_cached == 16
    assert sim.scheduler.prefix_hit_tokens == 16
    assert sim.scheduler.prefix_query_tokens == 39
    sim.run()
    assert sim.pool.num_used == 0


def test_a_prompt_waits_for_the_pages_that_another_is_computing() -> None:
    sim = Simulation(budget=16)
    prompt = list(range(40))
    first = sim.add(prompt)
    second = sim.add([*prompt, 77])
    other = sim.add([5, 5, 5])
    assert [s for s, _ in sim.step().prefills] == [first, other]
    sim.run()
    # 40 tokens once, then only what the second has of its own.
    assert second.num_cached == 40
    assert [s.tokens for s in sim.finished] == [expected(s) for s in sim.finished]


def test_the_last_prompt_token_is_computed_even_if_all_pages_are_cached() -> None:
    sim = Simulation()
    sim.add(list(range(16)), max_tokens=1)
    sim.run()
    again = sim.add(list(range(16)), max_tokens=1)
    plan = sim.step()
    assert plan.prefills == [(again, 4)]


def test_a_scored_prompt_takes_nothing_from_the_cache() -> None:
    sim = Simulation()
    sim.add(list(range(16)), max_tokens=1)
    sim.run()
    scored = sim.add(list(range(16)), max_tokens=1, num_prompt_logprobs=1)
    assert sim.step().prefills == [(scored, 16)]


def test_preemption_takes_the_youngest_and_loses_nothing() -> None:
    sim = Simulation(num_pages=14, budget=32, has_caching=False)
    seqs = [sim.add([i] * 7, max_tokens=30) for i in range(1, 5)]
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    assert sim.finished[0] is seqs[0]
    for seq in seqs:
        assert seq.tokens == expected(seq)
    assert sim.pool.num_available == 13


def test_priority_goes_first_and_ties_are_served_in_order_of_arrival() -> None:
    sim = Simulation(max_num_seqs=1)
    late = sim.add([1], priority=5)
    normal = [sim.add([2]), sim.add([3])]
    urgent = sim.add([4], priority=-1)
    sim.run()
    assert sim.finished == [urgent, *normal, late]


def test_removing_a_sequence_in_any_state_gives_everything_back() -> None:
    sim = Simulation(budget=8, max_num_seqs=2)
    decoding = sim.add([1, 2], max_tokens=9)
    sim.step()
    prefilling = sim.add([3] * 50)
    waiting = sim.add([4] * 5)
    sim.step()
    assert decoding.num_left == 1
    assert 1 < prefilling.num_left < 50
    assert waiting.row == -1
    for seq in (decoding, prefilling, waiting):
        sim.scheduler.remove(seq)
    assert sim.pool.num_used == 0
    assert not sim.scheduler.schedule()
    assert not sim.scheduler.block_table.any()


def test_without_chunks_a_prompt_runs_whole() -> None:
    sim = Simulation(budget=256, has_chunks=False)
    prompts = [sim.add([i] * 100) for i in range(1, 5)]
    assert [count for _, count in sim.step().prefills] == [100, 100]
    assert [s for s, _ in sim.step().prefills] == prompts[2:]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2)),
        min_size=1,
        max_size=14,
    ),
    st.integers(27, 60),
    st.integers(8, 40),
    st.booleans(),
)
def test_every_request_ends_with_its_own_tokens_under_any_pressure(
    requests: list[tuple[int, int, int]], num_pages: int, budget: int, has_caching: bool
) -> None:
    sim = Simulation(num_pages=num_pages, budget=budget, max_model_len=100, has_caching=has_caching)
    for length, max_tokens, family in requests:
        sim.add([family + 1] * length, max_tokens=max_tokens)
        sim.step()
    sim.run()
    assert len(sim.finished) == len(requests)
    for seq in sim.finished:
        assert seq.tokens == expected(seq)
    assert sim.pool.num_used == 0
    assert sorted(sim.scheduler._free_rows) == list(range(8))


def add_for(sim: Simulation, client: str, prompt: list[int], max_tokens: int, n: int = 1) -> None:
    """Queue `n` sequences of one request, as the HTTP side does."""
    for _ in range(n):
        number = next(sim.arrivals)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        name, _, connection = client.partition(":")
        request = Request(str(number), tuple(prompt), sampling, 0, name, connection or "1")
        sim.scheduler.add(Sequence(request, number, (), sim.scheduler.limits.max_model_len))


def tokens_of(plan: StepPlan, client: str) -> int:
    counts = [(s, 1) for s in plan.decodes] + plan.prefills
    return sum(count for seq, count in counts if seq.request.client == client)


def test_a_client_with_many_sequences_leaves_the_engine_to_one_that_wants_little() -> None:
    sim = Simulation(num_pages=4000, max_num_seqs=128, budget=512, has_caching=False)
    add_for(sim, "greedy", list(range(20)), 200, n=100)
    for _ in range(8):
        sim.step()  # alone, it has all there is
    assert tokens_of(sim.plans[-1], "greedy") == 100
    add_for(sim, "small", [1, 2, 3], 60)
    begin = len(sim.plans)
    while not any(s.request.client == "small" for s in sim.finished):
        sim.step()
    plans = sim.plans[begin:]
    # It ran in every step: 3 prompt tokens, then one each.
    assert [tokens_of(plan, "small") for plan in plans] == [3] + [1] * 59
    # Cost of a step: 4 tokens before its first. The rest had at most a quarter of the small one's,
    # beyond what a first joined step saves up for, and it was not left out.
    fair = sim.scheduler.limits.fair_tokens
    spent = [tokens_of(plan, "greedy") for plan in plans]
    cost = sum(fair + count for count in spent if count)
    assert 0 < cost <= len(plans) * (fair + 1) / 4 + (fair + 3) + 8 * fair
    assert max(spent) <= 2 * fair + 8
    sim.run()
    assert all(s.tokens == expected(s) for s in sim.finished)
    assert len(sim.finished) == 101


def test_sequences_of_a_limited_client_take_turns() -> None:
    sim = Simulation(num_pages=4000, max_num_seqs=64, budget=512, has_caching=False)
    add_for(sim, "greedy", [5, 6], 250, n=40)
    sim.step()
    add_for(sim, "small", [1, 2, 3], 250)
    for _ in range(240):
        sim.step()
    outputs = [s.num_output for s in sim.scheduler.running if s.request.client == "greedy"]
    assert len(outputs) == 40
    assert max(outputs) - min(outputs) <= 2
    assert min(outputs) >= 1


def test_a_long_prompt_of_another_client_comes_in_small_pieces_even_between_two_requests() -> None:
    sim = Simulation(num_pages=4000, budget=512, max_model_len=5000, has_caching=False)
    add_for(sim, "small", [1, 2], 2)
    sim.step()
    add_for(sim, "greedy", list(range(4000)), 2)
    sizes = []
    for _ in range(6):
        while any(s.request.client == "small" for s in sim.scheduler.running):
            sim.step()
        for _ in range(3):  # the small client is thinking
            sizes.append(tokens_of(sim.step(), "greedy"))
        add_for(sim, "small", [1, 2], 3)
        assert tokens_of(sim.step(), "small") == 2
    assert max(sizes) <= 2 * sim.scheduler.limits.fair_tokens
    # When it stays away, the other has the engine again.
    while any(s.request.client == "small" for s in sim.scheduler.running):
        sim.step()
    assert max(tokens_of(sim.step(), "greedy") for _ in range(70)) == 512


def test_a_client_without_a_place_gets_one_from_who_has_many() -> None:
    sim = Simulation(num_pages=400, max_num_seqs=8, budget=64, has_caching=False)
    add_for(sim, "greedy", [5, 6], 100, n=50)
    sim.step()
    assert len(sim.scheduler.running) == 8
    add_for(sim, "small", [1, 2, 3], 4)
    steps = 0
    while not any(s.request.client == "small" for s in sim.finished):
        sim.step()
        steps += 1
    assert steps <= 6
    assert sim.scheduler.num_preemptions == 1
    sim.run()
    assert all(s.tokens == expected(s) for s in sim.finished)
    assert sim.pool.num_used == 0


def test_a_full_cache_gives_way_too() -> None:
    sim = Simulation(num_pages=60, max_num_seqs=32, budget=64, has_caching=False)
    add_for(sim, "greedy", list(range(20)), 60, n=20)
    for _ in range(20):
        sim.step()
    add_for(sim, "small", list(range(40)), 4)
    steps = 0
    while not any(s.request.client == "small" for s in sim.finished):
        sim.step()
        steps += 1
    assert steps <= 12
    sim.run()
    assert all(s.tokens == expected(s) for s in sim.finished)


def test_connections_of_one_client_with_a_prompt_each_run_as_if_they_were_one() -> None:
    plain, named = (Simulation(num_pages=4000, max_num_seqs=64, budget=200) for _ in range(2))
    for place in range(40):
        prompt = [place, *range(place + 3)]
        plain.add(prompt, max_tokens=30)
        add_for(named, f"host:{place}", prompt, 30)
    plain.run()
    named.run()
    sizes = [[plan.num_tokens for plan in sim.plans] for sim in (plain, named)]
    assert sizes[0] == sizes[1]


def test_a_connection_with_many_sequences_leaves_room_to_its_neighbours() -> None:
    sim = Simulation(num_pages=4000, max_num_seqs=256, budget=512, has_caching=False)
    add_for(sim, "host:a", [5, 6], 100, n=200)
    sim.step()
    add_for(sim, "host:b", [1, 2, 3], 60)
    begin = len(sim.plans)
    while not any(s.request.connection == "b" for s in sim.finished):
        sim.step()
    plans = sim.plans[begin:]
    assert len(plans) == 60
    fair = 2 * sim.scheduler.limits.fair_tokens
    joined = [plan.num_tokens - 1 for plan in plans if plan.num_tokens > 3]
    assert sum(fair + count for count in joined) <= len(plans) * (fair + 3) / 2 + fair + 64
    assert joined


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a:1", "a:2", "b:1", "c:1", "c:2"]),
            st.integers(1, 60),
            st.integers(1, 30),
            st.integers(1, 6),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(27, 80),
    st.integers(8, 64),
    st.booleans(),
    st.booleans(),
)
def test_whoever_asks_gets_an_answer_under_any_mix_of_clients(
    requests: list[tuple[str, int, int, int]],
    num_pages: int,
    budget: int,
    has_caching: bool,
    has_chunks: bool,
) -> None:
    sim = Simulation(
        num_pages=num_pages,
        budget=budget if has_chunks else 128,
        max_model_len=100,
        has_caching=has_caching,
        has_chunks=has_chunks,
    )
    for client, length, max_tokens, n in requests:
        add_for(sim, client, [length] * length, max_tokens, n)
        sim.step()
    sim.run()
    assert len(sim.finished) == sum(n for *_, n in requests)
    assert all(s.tokens == expected(s) for s in sim.finished)
    assert sim.pool.num_used == 0
    assert sorted(sim.scheduler._free_rows) == list(range(8))
