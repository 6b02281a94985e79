"""A scheduler with a model whose next token is a function of all tokens so far."""

from __future__ import annotations

import itertools

from moeserve.engine.config import CPU_FAIR_TOKENS
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
        fair: int = CPU_FAIR_TOKENS,
    ) -> None:
        self.pool = PagePool(num_pages, PAGE, has_caching)
        limits = SchedulerLimits(max_num_seqs, budget, max_model_len, has_chunks, fair)
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
