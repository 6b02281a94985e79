"""How many tokens of a step each connection may have, so that nobody is crowded out.

Receives sequences as they come, run and go; tells `scheduler.py` how large the next step may be and
what each connection may have of it. It looks at requests alone, never at a clock, so ranks that see
the same requests decide alike.

A step of T tokens is taken to cost F + T (F: what a step costs before its first token). Parties are
clients (API key or address); where there is one client, its connections. Of C parties at work some
run in every step: the client that wants as little as x, the least; every connection with one
sequence. For each such step, which would cost F + x without the rest, the rest together may spend a
part of (C−1)·(F+x), as if they ran steps of their own: a quarter among clients, so that one that
wants little keeps four fifths of the engine beside one that asks for everything; a half among
connections of one client, in larger pieces, since what they lose in speed is the client's own. Half
of the rate is then still there when the front, the network and the processor's caches have taken
their part.

A party that has just gone counts for a while: whoever asks again and again is absent between two
requests, and must not find a step under way that fills the machine. What another client computes in
such gaps it has had. Of clients that want equally little, the one that has had least comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.engine.scheduler_flows import Flow, demand_of, largest_of, share_out, victim_for

if TYPE_CHECKING:
    from moeserve.engine import sequence

# Steps for which a party that left still counts. At two steps a millisecond and less this is longer
# than a client takes to send its next request.
MEMORY_STEPS = 64
# What a client had in a step counts as this much at most.
_MOST_NOTED = 16
# Prompt tokens of a step beside other connections, in F: 256 on a CPU, as fast as 2048, each.
_CALM_STEP = 64
# The least party counts with at most this many times F: a prompt found in the cache wants less than
# its length, and must not make room for as many tokens of others.
_MOST_LEAST = 4
# Costs are whole numbers of such parts of a token. Attention over as many tokens costs about as
# much as a token's other layers, so a token of context costs one part.
_PARTS = 2048


@dataclass(frozen=True)
class _Rule:
    """How much the parties that want more than the least may have.

    Attributes:
        fair_tokens: F.
        quantum: They join a step with this many tokens or all that they want, and save up for it.
        light_steps: They may spend one in so many of what the others' steps cost.
        most_debt: What they used while others were absent counts up to so many joined steps.
    """

    fair_tokens: int
    quantum: int
    light_steps: int
    most_debt: int


@dataclass(frozen=True)
class _Parties:
    """Who shares a step.

    Attributes:
        flows: Of each party at work.
        num_absent: Parties that have just gone.
        rule: For these.
    """

    flows: list[list[Flow]]
    num_absent: int
    rule: _Rule

    @property
    def num_all(self) -> int:
        """C."""
        return len(self.flows) + self.num_absent


class Shares:
    """All flows of one scheduler."""

    def __init__(self, fair_tokens: int) -> None:
        self._among_clients = _Rule(fair_tokens, 2 * fair_tokens, 4, 16)
        self._among_connections = _Rule(2 * fair_tokens, 16 * fair_tokens, 2, 0)
        self._present: dict[tuple[str, str], Flow] = {}
        self._absent: dict[tuple[str, str], Flow] = {}
        self._turn = 0
        self._num_steps = 0
        self._is_limited = False
        self._credit = 0
        self._used: dict[str, int] = {}

    def arrive(self, seq: sequence.Sequence) -> None:
        """Take in a new sequence and give it its turn: one of each flow, then the next of each."""
        key = (seq.request.client, seq.request.connection)
        flow = self._present.get(key)
        if flow is None:
            flow = self._absent.pop(key) if key in self._absent else Flow(*key)
            self._present[key] = flow
            flow.num_visits += 1
        seq.flow = flow
        seq.turn = max(self._turn, flow.turn)
        flow.turn = seq.turn + 1
        flow.num_open += 1
        flow.waiting_tokens += len(seq.tokens)

    def admit(self, seq: sequence.Sequence) -> None:
        """Count a sequence as running."""
        self._turn = max(self._turn, seq.turn)
        seq.flow.num_running += 1
        seq.flow.waiting_tokens -= len(seq.tokens)

    def step_back(self, seq: sequence.Sequence) -> None:
        """Count a running sequence as waiting again."""
        seq.flow.num_running -= 1
        seq.flow.waiting_tokens += len(seq.tokens)

    def leave(self, seq: sequence.Sequence, *, was_running: bool) -> None:
        """Count a sequence that ended out."""
        flow = seq.flow
        flow.num_open -= 1
        if was_running:
            flow.num_running -= 1
        else:
            flow.waiting_tokens -= len(seq.tokens)
        if not flow.num_open:
            key = (flow.client, flow.connection)
            self._absent[key] = self._present.pop(key)
            flow.gone_at = self._num_steps
        if not self._present:  # nobody is in anybody's way
            self._absent.clear()
            self._used.clear()

    @property
    def has_rivals(self) -> bool:
        """Whether more than one connection has something open."""
        return len(self._present) > 1

    def victim_for(
        self, seq: sequence.Sequence, running: Sequence[sequence.Sequence]
    ) -> sequence.Sequence | None:
        """See `scheduler_flows.victim_for`."""
        return victim_for(seq, running, self._present.values())

    def largest_of(self, running: Sequence[sequence.Sequence]) -> sequence.Sequence:
        """See `scheduler_flows.largest_of`."""
        return largest_of(running, self._present.values())

    def to_the_back(self, seq: sequence.Sequence) -> None:
        """Give a sequence that made way a turn behind whom it made way for."""
        seq.turn = self._turn + 1

    def begin_step(self, running: Sequence[sequence.Sequence], num_free: int, budget: int) -> int:
        """Share out the next step; return the most tokens it may have.

        Args:
            running: Sequences that hold pages.
            num_free: How many more could be admitted.
            budget: Tokens of the largest step.
        """
        self._num_steps += 1
        self._forget()
        self._is_limited = False
        if len(self._present) + len(self._absent) < 2:
            return budget
        if self._are_alike():
            return self._calm(running, budget)
        parties = self._parties(self._wanting(running, num_free))
        if parties.num_all < 2 or not parties.flows:
            return budget
        least = 1 if parties.num_absent else max(1, min(map(demand_of, parties.flows)))
        if parties.rule is self._among_clients:
            light = [party for party in parties.flows if demand_of(party) <= least]
            light = self._with_least_use(light, parties)
        else:
            light = [party for party in parties.flows if party[0].num_open == 1]
        chosen = set(map(id, light))
        heavy = [party for party in parties.flows if id(party) not in chosen]
        if not heavy:
            return self._calm(running, budget)
        if not light and not parties.num_absent:
            return budget
        rule = parties.rule
        light_step = rule.fair_tokens + min(least, _MOST_LEAST * rule.fair_tokens)
        earned = (parties.num_all - 1) * light_step * _PARTS // rule.light_steps
        self._credit = min(self._credit + earned, (budget + rule.fair_tokens) * _PARTS)
        size = sum(map(demand_of, light)) + (rest := self._spend(rule, heavy, bool(light)))
        self._is_limited = size < budget
        if not self._is_limited:
            return budget
        for flow in (flow for party in light for flow in party):
            flow.left = flow.demand
        share_out(heavy, rest)
        return size

    def _calm(self, running: Sequence[sequence.Sequence], budget: int) -> int:
        """One long prompt must not hold up the others' tokens for the time of a whole step."""
        return min(budget, _CALM_STEP * self._among_clients.fair_tokens + len(running))

    def _are_alike(self) -> bool:
        """Whether all are connections of one client with one sequence each: an evaluation's step.

        Told apart from the rest because it is met with a thousand of them, many times a second.
        """
        if not self._present:
            return False
        client = next(iter(self._present.values())).client
        return all(
            flow.num_open == 1 and flow.client == client for flow in self._present.values()
        ) and all(flow.client == client for flow in self._absent.values())

    def _with_least_use(self, light: list[list[Flow]], parties: _Parties) -> list[list[Flow]]:
        """Of clients that want as little, those that had as little in the last steps."""
        used = self._used
        for client in used:
            used[client] -= used[client] // MEMORY_STEPS
        for party in parties.flows:
            client = party[0].client
            used[client] = used.get(client, 0) + min(demand_of(party), _MOST_NOTED) * _PARTS
        least = min(used.values())
        return [party for party in light if used[party[0].client] * 2 <= least * 3]

    def lift(self) -> None:
        """Take the limits off this step, in which nobody could run."""
        self._is_limited = False

    def _spend(self, rule: _Rule, heavy: list[list[Flow]], has_light: bool) -> int:
        """Tokens for the parties that want much, 0 where they have to save up first."""
        wanted = sum(map(demand_of, heavy))
        enough = min(rule.quantum, wanted)
        if not has_light:
            # Nobody is kept waiting, but somebody may come back: steps stay short.
            least = -rule.most_debt * (rule.fair_tokens + rule.quantum)
            spent = rule.fair_tokens + enough
            self._credit = max(min(self._credit, 0) - spent * _PARTS, least * _PARTS)
            return enough
        num_running = sum(flow.num_running for party in heavy for flow in party)
        context = sum(flow.context for party in heavy for flow in party) // max(num_running, 1)
        per_token = _PARTS + context
        rest = (self._credit - rule.fair_tokens * _PARTS) // per_token
        if rest < enough:
            return 0
        rest = min(rest, wanted)
        self._credit -= rule.fair_tokens * _PARTS + rest * per_token
        return rest

    def most(self, seq: sequence.Sequence, budget: int) -> int:
        """Tokens that a sequence may have in this step, of `budget` that are left."""
        return min(budget, seq.flow.left) if self._is_limited else budget

    def take(self, seq: sequence.Sequence, num_tokens: int) -> None:
        """Count tokens of a sequence in this step."""
        seq.flow.left -= num_tokens

    @property
    def is_limited(self) -> bool:
        """Whether this step is smaller than what is wanted."""
        return self._is_limited

    def _forget(self) -> None:
        oldest = self._num_steps - MEMORY_STEPS
        while self._absent:
            key = next(iter(self._absent))
            if self._absent[key].gone_at >= oldest:
                break
            del self._absent[key]
            if not any(client == key[0] for client, _ in (*self._present, *self._absent)):
                self._used.pop(key[0], None)

    def _wanting(self, running: Iterable[sequence.Sequence], num_free: int) -> list[Flow]:
        """Flows with something to run, and how much; of those that wait no more than have room."""
        flows = []
        for flow in self._present.values():
            flow.demand = flow.context = flow.left = 0
            has_room = num_free > 0
            if flow.num_running or has_room:
                flow.demand = flow.waiting_tokens if has_room else 0
                num_free -= not flow.num_running
                flows.append(flow)
        for seq in running:
            seq.flow.demand += seq.num_left
            seq.flow.context += seq.num_computed
        return flows

    def _parties(self, flows: list[Flow]) -> _Parties:
        clients: dict[str, list[Flow]] = {}
        for flow in flows:
            clients.setdefault(flow.client, []).append(flow)
        absent = {flow.client for flow in self._absent.values()} - clients.keys()
        if len(clients) + len(absent) > 1:
            return _Parties(list(clients.values()), len(absent), self._among_clients)
        # One that came once may have closed its connection for good.
        num_absent = sum(flow.num_visits > 1 for flow in self._absent.values())
        return _Parties([[flow] for flow in flows], num_absent, self._among_connections)
