"""Connections as the scheduler sees them, max-min shares among several, and who makes way for whom.

`Flows` counts sequences in and out; `scheduler_shares.py` decides how much there is to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeserve.engine import sequence

# A client takes places from another that runs more than this many times as many sequences. Nearer
# to equal, places that fall free are shared by turns, and nothing is computed twice.
_FAR_LESS = 4


class Client:
    """What all connections of a client have together.

    Attributes:
        num_flows: Connections, those that have just gone included.
        num_present: Connections with something open.
        num_running: Sequences that hold pages.
    """

    __slots__ = ("num_flows", "num_present", "num_running")

    def __init__(self) -> None:
        self.num_flows = 0
        self.num_present = 0
        self.num_running = 0


class Flow:
    """One connection of a client.

    Attributes:
        client: API key (a digest of it) or address.
        connection: Name of the connection.
        size: Tokens that it has brought since it last had nothing open, and that may follow.
        is_heavy: Whether it has to wait for others.
        num_open: Unfinished sequences.
        num_running: Those that hold pages.
        num_visits: How often it came with nothing open.
        waiting_tokens: Of sequences that do not run.
        turn: Place in the queue of its next sequence.
        gone_at: Step at which its last sequence ended.
        demand: Tokens that it wants in the next step.
        context: Tokens that its running sequences have behind them, together.
        left: Tokens that it may still have in the next step.
    """

    __slots__ = (
        "client",
        "connection",
        "context",
        "demand",
        "gone_at",
        "is_heavy",
        "left",
        "num_open",
        "num_running",
        "num_visits",
        "size",
        "turn",
        "waiting_tokens",
    )

    def __init__(self, client: str, connection: str) -> None:
        self.client = client
        self.connection = connection
        self.size = 0
        self.is_heavy = False
        self.num_open = 0
        self.num_running = 0
        self.num_visits = 0
        self.waiting_tokens = 0
        self.turn = 0
        self.gone_at = 0
        self.demand = 0
        self.context = 0
        self.left = 0


class Flows:
    """All connections that have something open, and those that had until a moment ago.

    Attributes:
        present: With something open.
        is_changed: Somebody came or went since this was last set to False.
    """

    def __init__(self, large: int) -> None:
        self.present: dict[tuple[str, str], Flow] = {}
        self.is_changed = False
        self._absent: dict[tuple[str, str], Flow] = {}
        self._clients: dict[str, Client] = {}
        self._large = large
        self._num_large = 0
        self._num_wide = 0
        self._num_steps = 0
        self._turn = 0

    @property
    def num_clients(self) -> int:
        """Clients, those that have just gone included."""
        return len(self._clients)

    @property
    def num_parties(self) -> int:
        """Clients; connections where there is one client."""
        if len(self._clients) > 1:
            return len(self._clients)
        return len(self.present) + len(self._absent)

    @property
    def are_small(self) -> bool:
        """Whether there is one client with no connection above `large` tokens."""
        return len(self._clients) < 2 and not self._num_large

    @property
    def has_rivals(self) -> bool:
        """Whether more than one connection has something open."""
        return len(self.present) > 1

    def parties(self) -> list[list[Flow]]:
        """Those with something open, each as its connections."""
        if len(self._clients) < 2:
            return [[flow] for flow in self.present.values()]
        clients: dict[str, list[Flow]] = {}
        for flow in self.present.values():
            clients.setdefault(flow.client, []).append(flow)
        return list(clients.values())

    def absent_parties(self) -> list[Flow]:
        """Connections that stand for parties that have just gone."""
        absent = self._absent.values()
        if len(self._clients) > 1:
            return [flow for flow in absent if not self._clients[flow.client].num_present]
        # One that came once may have closed its connection for good.
        return [flow for flow in absent if flow.num_visits > 1]

    def arrive(self, seq: sequence.Sequence) -> None:
        """Take in a new sequence and give it its turn: one of each flow, then the next of each."""
        key = (seq.request.client, seq.request.connection)
        flow = self.present.get(key)
        if flow is None:
            flow = self._come(key)
        seq.flow = flow
        seq.turn = max(self._turn, flow.turn)
        flow.turn = seq.turn + 1
        flow.num_open += 1
        flow.waiting_tokens += len(seq.tokens)
        was_large = flow.size > self._large
        flow.size += seq.max_total
        self._num_large += (flow.size > self._large) - was_large
        self.is_changed = True

    def admit(self, seq: sequence.Sequence) -> None:
        """Count a sequence as running."""
        self._turn = max(self._turn, seq.turn)
        seq.flow.waiting_tokens -= len(seq.tokens)
        self._run(seq.flow, 1)

    def step_back(self, seq: sequence.Sequence) -> None:
        """Count a running sequence as waiting again."""
        seq.flow.waiting_tokens += len(seq.tokens)
        self._run(seq.flow, -1)

    def leave(self, seq: sequence.Sequence, *, was_running: bool) -> None:
        """Count a sequence that ended out."""
        flow = seq.flow
        flow.num_open -= 1
        if was_running:
            self._run(flow, -1)
        else:
            flow.waiting_tokens -= len(seq.tokens)
        if flow.num_open:
            return
        self.is_changed = True
        self._num_large -= flow.size > self._large
        key = (flow.client, flow.connection)
        self._absent[key] = self.present.pop(key)
        flow.gone_at = self._num_steps
        self._clients[flow.client].num_present -= 1
        if not self.present:  # nobody is in anybody's way
            self._absent.clear()
            self._clients.clear()

    def forget(self, num_steps: int, memory_steps: int) -> None:
        """Let go of those that went more than `memory_steps` before step `num_steps`."""
        self._num_steps = num_steps
        while self._absent:
            key = next(iter(self._absent))
            if self._absent[key].gone_at >= num_steps - memory_steps:
                break
            del self._absent[key]
            self._drop(key[0])
            self.is_changed = True

    def to_the_back(self, seq: sequence.Sequence) -> None:
        """Give a sequence that made way a turn behind whom it made way for."""
        seq.turn = self._turn + 1

    def victim_for(
        self, seq: sequence.Sequence, running: Sequence[sequence.Sequence]
    ) -> sequence.Sequence | None:
        """The running sequence that makes way for one whose flow has none; None where nobody does.

        It is the youngest of the client with most, where the other client has far less; else the
        youngest of the connection with most, of the same client. Whoever runs one keeps it.
        """
        if seq.flow.num_running:
            return None
        own_client = self._clients[seq.flow.client]
        name, largest = max(self._clients.items(), key=lambda item: item[1].num_running)
        if largest.num_running > max(1, _FAR_LESS * own_client.num_running):
            return next(s for s in reversed(running) if s.flow.client == name)
        if not self._num_wide:
            return None
        own = [flow for flow in self.present.values() if flow.client == seq.flow.client]
        widest = max(own, key=lambda flow: flow.num_running)
        if widest.num_running < 2:
            return None
        return next(s for s in reversed(running) if s.flow is widest)

    def largest_of(self, running: Sequence[sequence.Sequence]) -> sequence.Sequence:
        """The running sequence that gives its pages back: the youngest of who has most."""
        if len(self.present) < 2:
            return running[-1]
        clients = self._clients
        # Of equals the first that is seen, which is the youngest.
        return max(
            reversed(running),
            key=lambda s: (clients[s.flow.client].num_running, s.flow.num_running),
        )

    def _come(self, key: tuple[str, str]) -> Flow:
        if key in self._absent:
            flow = self._absent.pop(key)
        else:
            flow = Flow(*key)
            self._clients.setdefault(key[0], Client()).num_flows += 1
        self.present[key] = flow
        self._clients[key[0]].num_present += 1
        flow.num_visits += 1
        flow.size = 0
        flow.is_heavy = False
        return flow

    def _drop(self, client: str) -> None:
        self._clients[client].num_flows -= 1
        if not self._clients[client].num_flows:
            del self._clients[client]

    def _run(self, flow: Flow, change: int) -> None:
        was_wide = flow.num_running > 1
        flow.num_running += change
        self._num_wide += (flow.num_running > 1) - was_wide
        self._clients[flow.client].num_running += change


def demand_of(party: list[Flow]) -> int:
    """Tokens that a party wants in the next step."""
    return sum(flow.demand for flow in party)


def share_out(parties: list[list[Flow]], size: int) -> None:
    """Give each party what it wants, or as much as any other that wants more; so its flows."""
    wants = {place: demand_of(party) for place, party in enumerate(parties)}
    for place, part in _water_filled(wants, size).items():
        own = {index: flow.demand for index, flow in enumerate(parties[place])}
        for index, given in _water_filled(own, part).items():
            parties[place][index].left = given


def _water_filled(demands: dict[int, int], size: int) -> dict[int, int]:
    """Share `size` by max-min: the small get what they want, the large get equal parts."""
    given: dict[int, int] = {}
    num_left = len(demands)
    for key, demand in sorted(demands.items(), key=lambda item: item[1]):
        # Rounded up, so that a part of less than one token goes to somebody.
        given[key] = min(demand, -(-size // num_left))
        size -= given[key]
        num_left -= 1
    return given
