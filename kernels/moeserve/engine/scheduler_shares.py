"""How many tokens of a step each connection may have, so that nobody is crowded out.

Receives sequences as they come, run and go; tells `scheduler.py` how large the next step may be and
what each connection may have of it. It looks at requests alone, never at a clock, so ranks that see
the same requests decide alike.

A step of T tokens takes about as long as F + T of them (F: `fair_tokens`, what a step costs before
its first token). Of C parties with work, one that wants x tokens a step would get them alone in
F + x; it keeps at least 1/C of that rate as long as a step has at most C·x + (C−1)·F tokens. That
is the rule, with x of the party that wants least. Parties are clients (API key or address); where
there is one client, its connections. A party that has just gone counts for a while: whoever asks
again and again is absent between two requests, and must not find a step under way that fills the
machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from moeserve.engine import sequence

# Steps for which a party that left still counts. At two steps a millisecond and less this is longer
# than a client takes to send its next request.
MEMORY_STEPS = 64
# The least party counts with at most this many times F: a prompt found in the cache wants less than
# its length, and must not make room for as many tokens of others.
_MOST_LEAST = 4
# A client takes places from another that runs more than this many times as many sequences. Nearer
# to equal, places that fall free are shared by turns, and nothing is computed twice.
_FAR_LESS = 4
Key = TypeVar("Key")


class Flow:
    """One connection of a client.

    Attributes:
        client: API key (a digest of it) or address.
        connection: Name of the connection.
        num_open: Unfinished sequences.
        num_running: Those that hold pages.
        num_visits: How often it came with nothing open.
        waiting_tokens: Of sequences that do not run.
        turn: Place in the queue of its next sequence.
        gone_at: Step at which its last sequence ended.
        demand: Tokens that it wants in the next step.
        left: Tokens that it may still have in the next step.
    """

    __slots__ = (
        "client",
        "connection",
        "demand",
        "gone_at",
        "left",
        "num_open",
        "num_running",
        "num_visits",
        "turn",
        "waiting_tokens",
    )

    def __init__(self, client: str, connection: str) -> None:
        self.client = client
        self.connection = connection
        self.num_open = 0
        self.num_running = 0
        self.num_visits = 0
        self.waiting_tokens = 0
        self.turn = 0
        self.gone_at = 0
        self.demand = 0
        self.left = 0


@dataclass(frozen=True)
class _Parties:
    """Who shares a step.

    Attributes:
        num_all: Those that count.
        num_absent: Those among them that have just gone.
        least: Tokens that the smallest wants.
    """

    num_all: int
    num_absent: int
    least: int


class Shares:
    """All flows of one scheduler."""

    def __init__(self, fair_tokens: int) -> None:
        self._fair_tokens = fair_tokens
        self._present: dict[tuple[str, str], Flow] = {}
        self._absent: dict[tuple[str, str], Flow] = {}
        self._turn = 0
        self._num_steps = 0
        self._is_limited = False

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
        if not self._present:
            # Nobody is in anybody's way.
            self._absent.clear()

    @property
    def has_rivals(self) -> bool:
        """Whether more than one connection has something open."""
        return len(self._present) > 1

    def victim_for(
        self, seq: sequence.Sequence, running: Sequence[sequence.Sequence]
    ) -> sequence.Sequence | None:
        """The running sequence that makes way for one whose flow has none; None where nobody does.

        It is the youngest of the client with most, where the other client has far less; else the
        youngest of the connection with most, of the same client. Whoever runs one keeps it.
        """
        flow = seq.flow
        if flow.num_running:
            return None
        counts: dict[str, int] = {}
        for other in self._present.values():
            counts[other.client] = counts.get(other.client, 0) + other.num_running
        client = max(counts, key=lambda name: counts[name])
        if counts[client] > max(1, _FAR_LESS * counts[flow.client]):
            return next(s for s in reversed(running) if s.flow.client == client)
        largest = max(
            (f for f in self._present.values() if f.client == flow.client),
            key=lambda f: f.num_running,
        )
        if largest.num_running < 2:
            return None
        return next(s for s in reversed(running) if s.flow is largest)

    def largest_of(self, running: Sequence[sequence.Sequence]) -> sequence.Sequence:
        """The running sequence that gives its pages back: the youngest of who has most."""
        if len(self._present) < 2:
            return running[-1]
        counts: dict[str, int] = {}
        for flow in self._present.values():
            counts[flow.client] = counts.get(flow.client, 0) + flow.num_running
        # Of equals the youngest: a later one replaces an earlier.
        return max(reversed(running), key=lambda s: (counts[s.flow.client], s.flow.num_running))

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
        flows = self._wanting(running, num_free)
        parties = self._parties(flows)
        fair = self._fair_tokens
        if parties.num_all < 2:
            return budget
        least = max(1, min(parties.least, _MOST_LEAST * fair))
        size = parties.num_all * least + (parties.num_all - 1) * fair
        if size >= budget or sum(flow.demand for flow in flows) <= size:
            return budget
        self._is_limited = True
        self._share_out(flows, size - parties.num_absent)
        return size

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

    def _wanting(self, running: Iterable[sequence.Sequence], num_free: int) -> list[Flow]:
        """Flows with something to run, and how much; of those that wait no more than have room."""
        flows = []
        for flow in self._present.values():
            flow.demand = flow.left = 0
            has_room = num_free > 0
            if flow.num_running or has_room:
                flow.demand = flow.waiting_tokens if has_room else 0
                num_free -= not flow.num_running
                flows.append(flow)
        for seq in running:
            seq.flow.demand += seq.num_left
        return flows

    def _parties(self, flows: Iterable[Flow]) -> _Parties:
        demands: dict[str, int] = {}
        for flow in flows:
            demands[flow.client] = demands.get(flow.client, 0) + flow.demand
        absent = {flow.client for flow in self._absent.values()} - demands.keys()
        if len(demands) + len(absent) > 1:
            wants: list[int] = list(demands.values())
            num_absent = len(absent)
        else:
            wants = [flow.demand for flow in flows]
            # One that came once may have closed its connection for good.
            num_absent = sum(flow.num_visits > 1 for flow in self._absent.values())
        least = 1 if num_absent or not wants else min(wants)
        return _Parties(len(wants) + num_absent, num_absent, least)

    def _share_out(self, flows: list[Flow], size: int) -> None:
        """Give each flow what it wants, or as much as any other that wants more."""
        per_client: dict[str, list[Flow]] = {}
        for flow in flows:
            per_client.setdefault(flow.client, []).append(flow)
        demands = {client: sum(f.demand for f in own) for client, own in per_client.items()}
        for client, given in _water_filled(demands, size).items():
            own = per_client[client]
            wants = {place: flow.demand for place, flow in enumerate(own)}
            for place, part in _water_filled(wants, given).items():
                own[place].left = part


def _water_filled(demands: dict[Key, int], size: int) -> dict[Key, int]:
    """Share `size` by max-min: the small get what they want, the large get equal parts."""
    given: dict[Key, int] = {}
    num_left = len(demands)
    for key, demand in sorted(demands.items(), key=lambda item: item[1]):
        # Rounded up, so that a part of less than one token does not stop everybody.
        given[key] = min(demand, -(-max(size, 0) // num_left))
        size -= given[key]
        num_left -= 1
    return given
