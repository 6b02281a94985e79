"""What runs in the next step: decodes first, then prompts cut to the tokens that are left.

Receives requests as `Sequence`, returns one `StepPlan` a step and owns queues, rows and pages of
every sequence. The order of decisions depends on the requests alone, so ranks that see the same
requests schedule the same steps.

Rules: every decoding sequence advances in every step; a prompt takes what is left, at most half
of it while others wait and it would not be done anyway; a prompt's pages are taken when it is
admitted, so a prefill never runs dry half-way; where a decode finds no page, the youngest
running sequence of who has most gives its pages back, keeps its tokens and is computed again. Where
one client asks for so much that others would wait, `scheduler_shares.py` makes steps smaller.
"""

from __future__ import annotations

from bisect import insort
from enum import Enum

import numpy as np

from moeserve.engine.kv_cache import NULL_PAGE, PagePool, page_keys
from moeserve.engine.scheduler_flows import Flow
from moeserve.engine.scheduler_plan import SchedulerLimits as SchedulerLimits
from moeserve.engine.scheduler_plan import StepPlan as StepPlan
from moeserve.engine.scheduler_shares import Shares
from moeserve.engine.sequence import Sequence

# Waiting sequences that are passed by, at most, in search of one that may run.
_MOST_LOOKED_AT = 256


class _Admission(Enum):
    ADMITTED = 0
    NO_ROOM = 1
    LATER = 2  # another prompt is computing the same pages right now


class Scheduler:
    """Waiting and running sequences, and the pages they hold."""

    def __init__(self, limits: SchedulerLimits, pool: PagePool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # A prompt that runs whole cannot be given a part of a step.
        is_cut = limits.has_chunked_prefill
        self.shares = Shares(limits.fair_tokens if is_cut else limits.max_num_batched_tokens)
        self.flows = self.shares.flows
        self.num_preemptions = 0
        self._num_admissions = 0
        self._num_steps = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        max_pages = -(-limits.max_model_len // pool.page_size)
        self.block_table = np.full((limits.max_num_seqs, max_pages), NULL_PAGE, dtype=np.int32)
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind those of its priority whose turn is before."""
        self.flows.arrive(seq)
        insort(self.waiting, seq, key=lambda s: s.order)

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out and give back what it holds."""
        was_running = seq.row >= 0
        if was_running:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        self.flows.leave(seq, was_running=was_running)

    def schedule(self) -> StepPlan:
        """Decide the next step and take the pages for it."""
        self._num_steps += 1
        first = self._make_way()
        most = self.limits.max_num_batched_tokens
        budget = self.shares.begin_step(self.running, len(self._free_rows), most)
        plan = self._plan(budget, first)
        if not plan and self.shares.is_limited:
            self.shares.lift()  # whom the step was kept free for cannot run now
            plan = self._plan(most, first)
        return plan

    def _plan(self, budget: int, first: Sequence | None) -> StepPlan:
        preemptions_before = self.num_preemptions
        decodes = self._schedule_decodes()
        budget -= len(decodes)
        prefills: list[tuple[Sequence, int]] = []
        for seq in self.running:
            if seq.num_left > 1 and (allowed := self.shares.most(seq, budget)) > 0:
                budget -= self._schedule_chunk(seq, allowed, bool(self.waiting), prefills)
        if self.num_preemptions == preemptions_before:
            budget = self._admit_waiting(budget, prefills, first)
        if self.shares.is_limited:
            self._use_rest(budget, prefills)
        return StepPlan(decodes, prefills)

    def advance(self, plan: StepPlan) -> None:
        """Count the tokens of a step that has run as computed."""
        for seq in plan.decodes:
            seq.num_computed += 1
        for seq, count in plan.prefills:
            seq.num_computed += count

    def _schedule_decodes(self) -> list[Sequence]:
        decodes: list[Sequence] = []
        page_size = self.pool.page_size
        before = self.num_preemptions
        for seq in self._decoding():  # a copy: preemption takes sequences out
            if seq.row < 0 or len(seq.tokens) - seq.num_computed != 1:
                continue
            if seq.num_pending and seq.is_ending:
                continue
            position = seq.num_computed
            if position == len(seq.pages) * page_size and not self._grow(seq):
                continue
            # A page is named by its tokens, so it is published once the host knows all of them.
            num_known = position + 1 - seq.num_pending
            if num_known >= (seq.num_published + 1) * page_size:
                self._publish(seq, num_known)
            decodes.append(seq)
        if self.num_preemptions != before:
            decodes = [seq for seq in decodes if seq.row >= 0]
        for seq in decodes:
            seq.last_step = self._num_steps
        return decodes

    def _decoding(self) -> list[Sequence]:
        """Running sequences that may decode; of a flow that has more, those that waited longest."""
        if not self.shares.is_limited:
            return list(self.running)
        chosen = set()
        for seq in sorted(self.running, key=lambda s: s.last_step):
            if len(seq.tokens) - seq.num_computed == 1 and self.shares.most(seq, 1) > 0:
                self.shares.take(seq, 1)
                chosen.add(seq)
        return [seq for seq in self.running if seq in chosen]

    def _grow(self, seq: Sequence) -> bool:
        """Give a decoding sequence one more page; False where it had to step back itself."""
        while not self.pool.num_available:
            victim = self.flows.largest_of(self.running)
            self._preempt(victim)
            if victim is seq:
                return False
        (page,) = self.pool.allocate(1)
        self.block_table[seq.row, len(seq.pages)] = page
        seq.pages.append(page)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        self.num_preemptions += 1
        self.flows.step_back(seq)
        insort(self.waiting, seq, key=lambda s: s.order)

    def _make_way(self) -> Sequence | None:
        """Take places from who has many for one that has none; return whom they were taken for."""
        if not self.flows.has_rivals or not self.waiting:
            return None
        heads = (seq for seq in self.waiting[:_MOST_LOOKED_AT] if not seq.flow.num_running)
        head = next(heads, None)
        if head is None:
            return None
        wanted, before = -(-len(head.tokens) // self.pool.page_size), self.num_preemptions
        while not self._free_rows or wanted + len(self.running) > self.pool.num_available:
            victim = self.flows.victim_for(head, self.running)
            if victim is None:
                break
            self._preempt(victim)
            self.waiting.remove(victim)
            self.flows.to_the_back(victim)  # not before whom it made way for
            insort(self.waiting, victim, key=lambda s: s.order)
        return head if self.num_preemptions != before else None

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        self.block_table[seq.row, : len(seq.pages)] = NULL_PAGE
        self._free_rows.append(seq.row)
        seq.pages, seq.row, seq.num_computed, seq.num_published = [], -1, 0, 0

    def _schedule_chunk(
        self, seq: Sequence, budget: int, do_others_wait: bool, out: list[tuple[Sequence, int]]
    ) -> int:
        chunk = seq.num_left
        if chunk > budget:
            is_halved = do_others_wait and not self.shares.is_limited
            chunk = max(1, budget // 2) if is_halved else budget
        self.shares.take(seq, chunk)
        self._publish(seq, seq.num_computed + chunk)
        out.append((seq, chunk))
        return chunk

    def _use_rest(self, budget: int, prefills: list[tuple[Sequence, int]]) -> None:
        """Give what nobody took to the prompts of the step, first come first."""
        for place, (seq, chunk) in enumerate(prefills):
            more = min(self.shares.more(seq, budget), seq.num_left - chunk)
            if more > 0:
                self.shares.take(seq, more)
                prefills[place] = (seq, chunk + more)
                self._publish(seq, seq.num_computed + chunk + more)
                budget -= more

    def _admit_waiting(
        self, budget: int, prefills: list[tuple[Sequence, int]], first: Sequence | None
    ) -> int:
        """Admit what fits, `first` before others; return the tokens that are left."""
        in_progress = self._keys_in_progress()
        without_room: set[Flow] = set()
        index = self.waiting.index(first) if first is not None else 0
        num_passed = 0
        while index < len(self.waiting) and budget > 0 and self._free_rows:
            seq = self.waiting[index]
            allowed = self.shares.most(seq, budget)
            outcome = _Admission.NO_ROOM if seq.flow in without_room else _Admission.LATER
            if outcome is _Admission.LATER and allowed > 0:
                outcome = self._try_admit(seq, allowed, in_progress)
            if outcome is _Admission.NO_ROOM:
                if not seq.flow.num_running or not self.flows.has_rivals:
                    break
                without_room.add(seq.flow)
            if outcome is not _Admission.ADMITTED:
                # One whose connection runs others already does not hold up who runs none.
                num_passed += outcome is _Admission.NO_ROOM or allowed <= 0
                index, first = 0 if seq is first else index + 1, None
                if num_passed > _MOST_LOOKED_AT:
                    break
                continue
            del self.waiting[index]
            insort(self.running, seq, key=lambda s: s.order)
            self.flows.admit(seq)
            budget -= self._schedule_chunk(seq, allowed, index < len(self.waiting), prefills)
            if self.pool.has_caching and seq.num_computed + prefills[-1][1] < len(seq.tokens):
                in_progress.update(seq.keys[seq.num_published :])
            if seq is first:
                index, first = 0, None
        return budget

    def _keys_in_progress(self) -> set[bytes]:
        """Keys of pages that a running prompt will fill in later steps."""
        keys: set[bytes] = set()
        if self.pool.has_caching:
            for seq in self.running:
                if seq.num_left > 1:
                    keys.update(seq.keys[seq.num_published :])
        return keys

    def _try_admit(self, seq: Sequence, budget: int, in_progress: set[bytes]) -> _Admission:
        page_size = self.pool.page_size
        self._extend_keys(seq, len(seq.tokens) // page_size)
        # The last token is always computed, because its logits are wanted.
        usable = [] if seq.needs_prompt_logprobs else seq.keys[: (len(seq.tokens) - 1) // page_size]
        shared = self.pool.match(usable)
        if len(shared) < len(usable) and usable[len(shared)] in in_progress:
            return _Admission.LATER
        num_left = len(seq.tokens) - len(shared) * page_size
        if num_left > budget and not self.limits.has_chunked_prefill:
            return _Admission.NO_ROOM
        wanted = -(-len(seq.tokens) // page_size) - len(shared)
        # One page stays free for each running sequence, so that admitting does not preempt.
        reserve = len(self.running)
        if wanted + self.pool.num_idle(shared) + reserve > self.pool.num_available:
            return _Admission.NO_ROOM
        self.pool.share(shared)
        seq.pages = shared + self.pool.allocate(wanted)
        seq.row = self._free_rows.pop()
        seq.admission = self._num_admissions
        self._num_admissions += 1
        self.block_table[seq.row, : len(seq.pages)] = seq.pages
        seq.num_computed = len(shared) * page_size
        seq.num_published = len(shared)
        if seq.num_cached < 0:
            seq.num_cached = seq.num_computed
            self.prefix_query_tokens += seq.num_prompt
            self.prefix_hit_tokens += seq.num_computed
        return _Admission.ADMITTED

    def _extend_keys(self, seq: Sequence, num_pages: int) -> None:
        start, page_size = len(seq.keys), self.pool.page_size
        if self.pool.has_caching and num_pages > start:
            parent = seq.keys[-1] if seq.keys else b""
            tokens = seq.tokens[start * page_size : num_pages * page_size]
            seq.keys += page_keys(tokens, page_size, parent)

    def _publish(self, seq: Sequence, num_tokens: int) -> None:
        """Offer the pages that this step fills up to `num_tokens`.

        Before the step runs: every layer writes all keys and values before it reads any, so a
        sequence of the same step may already share them.
        """
        if not self.pool.has_caching:
            return
        num_full = num_tokens // self.pool.page_size
        self._extend_keys(seq, num_full)
        for i in range(seq.num_published, num_full):
            self.pool.publish(seq.pages[i], seq.keys[i])
        seq.num_published = max(seq.num_published, num_full)
