"""A connection as the scheduler sees it, max-min shares among several, and who makes way for whom.

`scheduler_shares.py` counts sequences in and out of flows and decides how much there is to share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeserve.engine import sequence

# A client takes places from another that runs more than this many times as many sequences. Nearer
# to equal, places that fall free are shared by turns, and nothing is computed twice.
_FAR_LESS = 4


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
        context: Tokens that its running sequences have behind them, together.
        left: Tokens that it may still have in the next step.
    """

    __slots__ = (
        "client",
        "connection",
        "context",
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
        self.context = 0
        self.left = 0


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


def _running_by_client(flows: Collection[Flow]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for flow in flows:
        counts[flow.client] = counts.get(flow.client, 0) + flow.num_running
    return counts


def victim_for(
    seq: sequence.Sequence, running: Sequence[sequence.Sequence], flows: Collection[Flow]
) -> sequence.Sequence | None:
    """The running sequence that makes way for one whose flow has none; None where nobody does.

    It is the youngest of the client with most, where the other client has far less; else the
    youngest of the connection with most, of the same client. Whoever runs one keeps it.
    """
    if seq.flow.num_running:
        return None
    counts = _running_by_client(flows)
    client = max(counts, key=lambda name: counts[name])
    if counts[client] > max(1, _FAR_LESS * counts[seq.flow.client]):
        return next(s for s in reversed(running) if s.flow.client == client)
    own = [flow for flow in flows if flow.client == seq.flow.client]
    largest = max(own, key=lambda flow: flow.num_running)
    if largest.num_running < 2:
        return None
    return next(s for s in reversed(running) if s.flow is largest)


def largest_of(running: Sequence[sequence.Sequence], flows: Collection[Flow]) -> sequence.Sequence:
    """The running sequence that gives its pages back: the youngest of who has most."""
    if len(flows) < 2:
        return running[-1]
    counts = _running_by_client(flows)
    # Of equals the first that is seen, which is the youngest.
    return max(reversed(running), key=lambda s: (counts[s.flow.client], s.flow.num_running))
