"""An evaluation opens a connection for each question: its steps are those of one connection."""

from __future__ import annotations

import time

from moeserve.engine.config import GPU_FAIR_TOKENS
from moeserve.engine.kv_cache import PagePool
from moeserve.engine.request import Request, SamplingParams
from moeserve.engine.scheduler import Scheduler, SchedulerLimits
from moeserve.engine.sequence import Sequence

NUM_REQUESTS, NUM_OUTPUT = 1000, 12


def steps_of(num_connections: int) -> tuple[list[tuple[int, int]], float]:
    """(decodes, prompt tokens) of every step of a load, and the processor time of scheduling."""
    limits = SchedulerLimits(NUM_REQUESTS, 8192, 256, True, GPU_FAIR_TOKENS)
    scheduler = Scheduler(limits, PagePool(NUM_REQUESTS * 4, 64, True))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    for i in range(NUM_REQUESTS):
        prompt = tuple((i * 7919 + j) % 1000 for j in range(90 + i % 30))
        origin = ("127.0.0.1", f"127.0.0.1:{i % num_connections}")
        request = Request(str(i), prompt, sampling, 0, *origin)
        scheduler.add(Sequence(request, i, (), 256))
    steps = []
    begin = time.process_time()
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        steps.append((len(plan.decodes), sum(count for _, count in plan.prefills)))
        sampled = plan.sampled()
        scheduler.advance(plan)
        for seq in sampled:
            seq.tokens.append(5)
            if len(seq.tokens) == seq.max_total:
                scheduler.remove(seq)
    return steps, time.process_time() - begin


def test_a_thousand_connections_are_scheduled_as_one_and_nearly_as_fast() -> None:
    one, seconds_of_one = steps_of(1)
    many, seconds_of_many = steps_of(NUM_REQUESTS)
    assert many == one
    assert sum(decodes for decodes, _ in many) == NUM_REQUESTS * (NUM_OUTPUT - 1)
    # Searching each connection among all took twenty times as long.
    assert seconds_of_many < 5 * seconds_of_one
