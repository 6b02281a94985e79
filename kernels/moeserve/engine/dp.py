"""The front's side of data parallelism: one lane for each DP rank, requests to the emptiest.

Receives requests and what lanes report; says which lane takes a request, and sums their counters.
`process.py` owns the lanes; how DP ranks step together is `team.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeserve.engine.client import EngineInfo, EngineStats
from moeserve.engine.request import Request
from moeserve.engine.streams import Connection


class Lane:
    """One DP rank, as the API process sees it.

    Attributes:
        connection: To its leader.
        stats: After its last step.
        info: What it said when it was ready; None before.
        profile: Its answer to the profile that is being taken; None before.
        new: Requests that have not been sent.
        aborted: Ids that have not been sent.
        is_flush_due: Whether sending them is on its way.
        num_open: Requests that it has.
    """

    def __init__(self) -> None:
        self.connection: Connection
        self.stats = EngineStats()
        self.info: EngineInfo | None = None
        self.profile: dict[str, object] | None = None
        self.new: list[Request] = []
        self.aborted: list[str] = []
        self.is_flush_due = False
        self.num_open = 0

    def flush(self) -> None:
        """Send what is waiting as one message."""
        self.is_flush_due = False
        self.connection.send(("work", self.new, self.aborted))
        self.new, self.aborted = [], []


def emptiest(lanes: Sequence[Lane]) -> Lane:
    """The lane with the fewest open requests, the first of them."""
    return min(lanes, key=lambda lane: lane.num_open)


def merged_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """All lanes as one engine: every rank's choices, and limits that hold on each."""
    first = infos[0]
    if len(infos) == 1:
        return first
    ranks: list[object] = []
    for info in infos:
        ranks += info.backends.get("ranks", [])  # type: ignore[arg-type]
    return replace(
        first,
        max_model_len=min(info.max_model_len for info in infos),
        num_pages=sum(info.num_pages for info in infos),
        load_s=max(info.load_s for info in infos),
        backends={**first.backends, "ranks": ranks},
    )


def merged_stats(lanes: Sequence[Lane]) -> EngineStats:
    """Sums over lanes, with what has not been sent yet counted as waiting."""
    if len(lanes) == 1 and not lanes[0].new:
        return lanes[0].stats
    stats = [lane.stats for lane in lanes]
    return EngineStats(
        num_running=sum(s.num_running for s in stats),
        num_waiting=sum(s.num_waiting for s in stats) + sum(len(lane.new) for lane in lanes),
        cache_usage=sum(s.cache_usage for s in stats) / len(stats),
        num_preemptions=sum(s.num_preemptions for s in stats),
        prefix_hit_tokens=sum(s.prefix_hit_tokens for s in stats),
        prefix_query_tokens=sum(s.prefix_query_tokens for s in stats),
        padding_rows=sum(s.padding_rows for s in stats),
        nan_rows=sum(s.nan_rows for s in stats),
        num_steps=sum(s.num_steps for s in stats),
    )


def merged_profile(lanes: Sequence[Lane]) -> dict[str, object] | None:
    """Every rank's counts in order; None while a lane has not answered."""
    results = [lane.profile for lane in lanes if lane.profile is not None]
    if len(results) < len(lanes):
        return None
    for result in results:
        if "error" in result:
            return result
    ranks: list[dict[str, object]] = []
    for result in results:
        ranks += result["ranks"]  # type: ignore[arg-type]
    return {**results[0], "ranks": ranks}
