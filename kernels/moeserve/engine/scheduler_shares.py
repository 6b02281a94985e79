"""How many tokens of a step each connection may have, so that nobody is crowded out.

Receives sequences as they come, run and go; tells `scheduler.py` how large the next step may be and
what each connection may have of it. It looks at requests alone, never at a clock, so ranks that see
the same requests decide alike.

Parties are clients (API key or address); where there is one client, its connections. A party is as
large as what it has open: prompts and the tokens that may follow, counted as they came. One that is
far larger than the smallest is heavy, the others are light. Without a heavy one nothing is held
back, so what evaluations ask for is batched as if it came from one. Beside heavy ones the light run
in every step, and the heavy may spend a part of what those steps cost: a step of T tokens is taken
to cost F + T (F: what a step costs before its first token). Of several clients, each heavy one has
a quarter, so that one that wants little keeps four fifths of the engine beside one that asks for
everything; of one client's connections, all heavy ones have a third, in larger pieces, since what
they lose in speed is the client's own. Half of the rate is then still there when the front, the
network and the processor's caches have taken their part.

A light party that has just gone counts for a while: whoever asks again and again is absent between
two requests, and must not find a step under way that fills the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.engine.scheduler_flows import Flow, Flows, demand_of, share_out

if TYPE_CHECKING:
    from moeserve.engine import sequence

# Steps for which a party that left still counts. At two steps a millisecond and less this is longer
# than a client takes to send its next request.
MEMORY_STEPS = 64
# A party is heavy when it is so many times as large as the smallest. Requests of one evaluation
# and evaluations of different concurrency stay within it.
_FAR_MORE = 16
# A connection of fewer tokens counts as this large: a long prompt beside a short one is nothing
# unusual in one client's work.
_SMALL = 128
# Prompt tokens of a step beside other parties, in F: 512 on a CPU, as fast as 2048, each.
_CALM_STEP = 128
# The light parties' step counts with at most this many times F: a prompt found in the cache wants
# less than its length, and must not make room for as many tokens of others.
_MOST_EARNED = 4
# What heavy parties add to a step before their first token, at most: drawn tokens among greedy ones
# cost a small model on a CPU as much again as its step, and on a GPU next to nothing.
_MOST_JOINING = 16
# Tokens with which they join a step, at most. Where steps are cheap for their tokens they need not
# save up for more.
_MOST_QUANTUM = 512
# Costs are whole numbers of such parts of a token. Attention over as many tokens costs about as
# much as a token's other layers, so a token of context costs one part.
_PARTS = 2048


@dataclass(frozen=True)
class _Rule:
    """How much heavy parties may have.

    Attributes:
        fair_tokens: F.
        quantum: They join a step with this many tokens or all that they want, and save up for it.
        light_steps: They may spend one in so many of what the light parties' steps cost.
        is_each: So much for each of them, rather than for all together.
        small: A party of fewer tokens counts as this large.
        most_debt: What they used while others were absent counts up to so many joined steps.
    """

    fair_tokens: int
    quantum: int
    light_steps: int
    is_each: bool
    small: int
    most_debt: int


class Shares:
    """Who is heavy, what they may spend, and what is left of it in this step."""

    def __init__(self, fair_tokens: int) -> None:
        self.flows = Flows(_FAR_MORE * _SMALL)
        self._fair_tokens = fair_tokens
        quantum = min(2 * fair_tokens, _MOST_QUANTUM)
        self._among_clients = _Rule(fair_tokens, quantum, 4, True, 64, 16)
        quantum = min(8 * fair_tokens, _MOST_QUANTUM)
        self._among_connections = _Rule(2 * fair_tokens, quantum, 3, False, _SMALL, 4)
        self._num_steps = 0
        self._is_limited = False
        self._credit = 0
        self._rest = 0
        self._has_rivals = False
        self._is_light_absent = False
        self._light: list[list[Flow]] = []
        self._heavy: list[list[Flow]] = []

    @property
    def _rule(self) -> _Rule:
        return self._among_clients if self.flows.num_clients > 1 else self._among_connections

    @property
    def is_limited(self) -> bool:
        """Whether this step is smaller than what is wanted."""
        return self._is_limited

    def begin_step(self, running: Sequence[sequence.Sequence], num_free: int, budget: int) -> int:
        """Share out the next step; return the most tokens it may have.

        Args:
            running: Sequences that hold pages.
            num_free: How many more could be admitted.
            budget: Tokens of the largest step.
        """
        self._num_steps += 1
        self.flows.forget(self._num_steps, MEMORY_STEPS)
        self._is_limited = False
        if self.flows.is_changed:
            self._weigh()
        if not self._has_rivals:
            return budget
        # One long prompt must not hold up the others' tokens for the time of a whole step.
        calm = min(budget, _CALM_STEP * self._fair_tokens + len(running))
        if not self._heavy:
            return calm
        self._count_demands(running, num_free)
        light = sum(map(demand_of, self._light))
        if not light and not self._is_light_absent:
            return budget
        self._rest = self._spend(light, budget)
        self._is_limited = light + self._rest < budget
        if not self._is_limited:
            return budget
        for flow in (flow for party in self._light for flow in party):
            flow.left = flow.demand
        share_out(self._heavy, self._rest)
        return min(light, calm) + self._rest

    def lift(self) -> None:
        """Take the limits off this step, in which nobody could run."""
        self._is_limited = False

    def most(self, seq: sequence.Sequence, budget: int) -> int:
        """Tokens that a sequence may have in this step, of `budget` that are left."""
        return min(budget, seq.flow.left) if self._is_limited else budget

    def more(self, seq: sequence.Sequence, budget: int) -> int:
        """Tokens that a sequence may have when all have had their share."""
        return min(budget, self._rest) if seq.flow.is_heavy else budget

    def take(self, seq: sequence.Sequence, num_tokens: int) -> None:
        """Count tokens of a sequence in this step."""
        seq.flow.left -= num_tokens
        if seq.flow.is_heavy:
            self._rest -= num_tokens

    def _weigh(self) -> None:
        """Tell heavy parties from light ones; only where somebody came or went."""
        flows = self.flows
        flows.is_changed = False
        self._is_light_absent = False
        self._light, self._heavy = [], []
        self._has_rivals = flows.num_parties > 1
        if not self._has_rivals or flows.are_small:
            return
        parties = flows.parties()
        sizes = [sum(flow.size for flow in party) for party in parties]
        absent = [flow.size for flow in flows.absent_parties()]
        least = min([*sizes, *absent], default=0)
        limit = _FAR_MORE * max(least, self._rule.small)
        for party, size in zip(parties, sizes, strict=True):
            (self._heavy if size > limit else self._light).append(party)
            for flow in party:
                flow.is_heavy = size > limit
        self._is_light_absent = bool(absent) and min(absent) <= limit

    def _spend(self, light: int, budget: int) -> int:
        """Tokens for the heavy parties, 0 where they have to save up first.

        Args:
            light: Tokens that the light ones want.
            budget: Of the largest step.
        """
        rule = self._rule
        fair, joining = rule.fair_tokens, min(rule.fair_tokens, _MOST_JOINING)
        wanted = sum(map(demand_of, self._heavy))
        enough = min(rule.quantum, wanted)
        if not light:
            # Nobody is kept waiting, but somebody may come back: steps stay short.
            least = -rule.most_debt * (fair + rule.quantum)
            self._credit = max(min(self._credit, 0) - (fair + enough) * _PARTS, least * _PARTS)
            return enough
        earned = (fair + min(light, _MOST_EARNED * fair)) * _PARTS // rule.light_steps
        earned *= len(self._heavy) if rule.is_each else 1
        self._credit = min(self._credit + earned, (budget + fair) * _PARTS)
        num_running = sum(flow.num_running for party in self._heavy for flow in party)
        context = sum(flow.context for party in self._heavy for flow in party)
        per_token = _PARTS + context // max(num_running, 1)
        rest = (self._credit - joining * _PARTS) // per_token
        if rest < enough:
            return 0
        rest = min(rest, wanted)
        if rest:
            self._credit -= joining * _PARTS + rest * per_token
        return rest

    def _count_demands(self, running: Sequence[sequence.Sequence], num_free: int) -> None:
        """Count what each flow wants in this step; of those that wait no more than have room."""
        for flow in self.flows.present.values():
            has_room = num_free > 0
            flow.demand = flow.waiting_tokens if has_room else 0
            flow.context = flow.left = 0
            num_free -= has_room and not flow.num_running
        for seq in running:
            seq.flow.demand += seq.num_left
            seq.flow.context += seq.num_computed
