"""A connection as the scheduler sees it, and max-min shares among several.

`scheduler_shares.py` counts sequences in and out of flows and decides how much there is to share.
"""

from __future__ import annotations


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
