"""Shares of steps, places and pages among clients and among connections of one client."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, add_for, expected, tokens_of


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


def test_where_tokens_are_cheap_the_heavy_run_in_every_step_too() -> None:
    sim = Simulation(num_pages=4000, max_num_seqs=128, budget=8192, has_caching=False, fair=1024)
    add_for(sim, "greedy", list(range(20)), 200, n=100)
    sim.step()
    add_for(sim, "small", [1, 2, 3], 60)
    for _ in range(50):
        plan = sim.step()
        assert tokens_of(plan, "greedy") == 100


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
    assert sum(fair + count for count in joined) <= len(plans) * (fair + 3) / 3 + fair + 64
    assert joined


def test_any_number_of_heavy_connections_has_no_more_than_one() -> None:
    spent = []
    for num_heavy in (1, 4):
        sim = Simulation(num_pages=9000, max_num_seqs=256, budget=512, has_caching=False)
        for place in range(num_heavy):
            add_for(sim, f"host:heavy{place}", [5, 6], 100, n=200 // num_heavy)
        sim.step()
        add_for(sim, "host:light", [1, 2, 3], 60)
        begin = len(sim.plans)
        while not any(s.request.connection == "light" for s in sim.finished):
            sim.step()
        assert len(sim.plans) - begin == 60
        spent.append(sum(plan.num_tokens for plan in sim.plans[begin:]) - 62)
    assert 0 < spent[1] <= spent[0] + 8


def test_one_huge_prompt_after_another_leaves_a_small_request_its_steps() -> None:
    sim = Simulation(num_pages=4000, budget=512, max_model_len=5000, has_caching=False)
    for place in range(3):
        add_for(sim, f"host:{place}", [place] * 3900, 1)
    sim.step()
    add_for(sim, "host:small", [1, 2], 40)
    begin = len(sim.plans)
    while not any(s.request.connection == "small" for s in sim.finished):
        sim.step()
    plans = sim.plans[begin:]
    assert len(plans) <= 42
    assert 0 < sum(plan.num_tokens for plan in plans) < 350
    sim.run()
    assert all(s.tokens == expected(s) for s in sim.finished)


def closed_loop(origins: list[str], sizes: list[tuple[int, int]]) -> list[int]:
    """Tokens of each step where every origin asks again two steps after its answer."""
    sim = Simulation(num_pages=40000, max_num_seqs=256, budget=2048, max_model_len=2000)
    left = dict.fromkeys(origins, 3)
    due = dict.fromkeys(origins, 0)
    num_seen, step = 0, 0
    while due or sim.scheduler.running or sim.scheduler.waiting:
        for origin in [name for name, at in due.items() if at <= step]:
            del due[origin]
            place = origins.index(origin)
            length, count = sizes[(place + left[origin]) % len(sizes)]
            add_for(sim, origin, [place, left[origin]] * (length // 2), count)
        sim.step()
        step += 1
        for seq in sim.finished[num_seen:]:
            origin = f"{seq.request.client}:{seq.request.connection}"
            left[origin] -= 1
            if left[origin]:
                due[origin] = step + 2
        num_seen = len(sim.finished)
    return [plan.num_tokens for plan in sim.plans if plan]


def test_equal_clients_are_batched_as_if_they_were_one() -> None:
    """Two evaluations used to hold each other's batches to half, whoever wanted less at a time."""
    sizes = [(600, 40), (500, 90), (650, 20), (620, 60)]
    one = closed_loop([f"a:{i}" for i in range(16)], sizes)
    two = closed_loop([f"{'ab'[i % 2]}:{i}" for i in range(16)], sizes)
    each = closed_loop([f"{i}:{i}" for i in range(16)], sizes)
    assert one == two == each


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
