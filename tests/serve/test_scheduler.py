from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, expected


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
