"""The grid of ranks before its processes exist: who sits where, connected to whom.

Receives the options and the front's sockets; returns a `Seat` for each rank, with sockets and
shared memory as file descriptors to be inherited. `ranks.py` starts the processes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from moeserve.engine.board import board_bytes
from moeserve.engine.config import EngineConfig
from moeserve.errors import Unsupported
from moeserve.parallel import Place


@dataclass(frozen=True)
class Seat:
    """What a rank's process is started with; numbers are inherited file descriptors.

    Attributes:
        config: Options.
        place: In the grid.
        started_at: `time.time()` at which the engine began to start.
        board: See `board.py`.
        front: To the API process; -1 for a follower.
        leader: To the leader of the row; -1 for a leader.
        followers: To the others of the row, by TP rank.
        peers: (DP rank, to its leader) of leaders that share experts with this one.
    """

    config: EngineConfig
    place: Place
    started_at: float
    board: int
    front: int = -1
    leader: int = -1
    followers: tuple[int, ...] = ()
    peers: tuple[tuple[int, int], ...] = ()

    @property
    def sockets(self) -> list[int]:
        """All of them."""
        own = [self.front, self.leader, *self.followers, *(fd for _, fd in self.peers)]
        return [fd for fd in own if fd >= 0]


@dataclass
class _Draft:
    """A seat while sockets are being made."""

    leader: int = -1
    followers: list[int] = field(default_factory=list)
    peers: list[tuple[int, int]] = field(default_factory=list)


def _pair() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def _memory(name: str) -> int:
    """Memory that can be inherited and, on Linux, opened by path."""
    if not hasattr(os, "memfd_create"):
        raise Unsupported("several ranks want Linux: they meet through shared memory")
    return os.memfd_create(name)


def make_seats(config: EngineConfig, fronts: Sequence[int], started_at: float) -> list[Seat]:
    """Lay the grid out and connect its ranks.

    Args:
        config: Options.
        fronts: Sockets of the API process, one for each DP rank.
        started_at: See `Seat`.
    """
    dp, tp = config.data_parallel_size, config.tensor_parallel_size
    drafts = [_Draft() for _ in range(dp * tp)]
    for row in range(dp):
        for column in range(1, tp):
            ours, theirs = _pair()
            drafts[row * tp].followers.append(ours)
            drafts[row * tp + column].leader = theirs
        for other in range(row + 1, dp if config.has_expert_parallel else 0):
            ours, theirs = _pair()
            drafts[row * tp].peers.append((other, ours))
            drafts[other * tp].peers.append((row, theirs))
    board = _memory("moeserve-board")
    os.truncate(board, board_bytes(dp * tp))
    stores = [_memory("moeserve-store") for _ in range(1 if config.has_expert_parallel else dp)]
    seats = []
    for rank, draft in enumerate(drafts):
        row, column = divmod(rank, tp)
        store = f"/proc/self/fd/{stores[row % len(stores)]}"
        place = Place(dp, row, tp, column, config.has_expert_parallel, store)
        front = fronts[row] if column == 0 else -1
        followers, peers = tuple(draft.followers), tuple(draft.peers)
        seats.append(Seat(config, place, started_at, board, front, draft.leader, followers, peers))
    return seats
