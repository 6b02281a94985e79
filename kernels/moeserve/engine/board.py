"""Which step each rank is in: shared memory that every rank writes and every rank watches.

Receives a file descriptor of memory that all ranks of a server inherit; says, as text, that a step
has lasted too long and which rank does not take part in it. A collective cannot say that: whoever
waits in one knows only that somebody is missing. What is done about it is `ranks.py`.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moeserve.parallel import Place

_COLUMNS = 3  # steps begun, steps ended, process id
_LOOKS = 20  # at the board, in the time of the limit


def board_bytes(num_ranks: int) -> int:
    """Size of the memory that a board wants."""
    return num_ranks * _COLUMNS * 8


class Board:
    """One rank's view of all ranks' steps."""

    def __init__(self, fd: int, place: Place) -> None:
        """Map the memory.

        Args:
            fd: Of `board_bytes` bytes, shared with the other ranks.
            place: This rank's.
        """
        self._memory = mmap.mmap(fd, board_bytes(place.num_ranks))
        table = np.frombuffer(self._memory, dtype=np.int64).reshape(place.num_ranks, _COLUMNS)
        self.place = place
        self._table = table
        self._mine = table[place.rank]
        self._mine[2] = os.getpid()

    def begin(self) -> None:
        """Note that this rank enters a step, before it waits for anybody."""
        self._mine[0] += 1

    def end(self) -> None:
        """Note that it is through."""
        self._mine[1] = self._mine[0]

    @property
    def first_pid(self) -> int:
        """Process id of rank 0."""
        return int(self._table[0, 2])

    def watch(self, limit_s: float, grace_s: float, on_stall: Callable[[str], None]) -> None:
        """Look at the board for ever, in a thread of its own.

        Args:
            limit_s: A step may take this long.
            grace_s: Wait this much longer before `on_stall`, so that another rank can act first.
            on_stall: Receives the report.
        """

        def look() -> None:
            seen = self._table.copy()
            since = [time.monotonic()] * self.place.num_ranks
            while True:
                time.sleep(limit_s / _LOOKS)
                now, table = time.monotonic(), self._table.copy()
                for rank in range(self.place.num_ranks):
                    if (table[rank] != seen[rank]).any() or table[rank, 0] == table[rank, 1]:
                        since[rank] = now
                seen = table
                if max(now - start for start in since) > limit_s + grace_s:
                    on_stall(self.report(limit_s))
                    return

        threading.Thread(target=look, daemon=True, name="board").start()

    def report(self, limit_s: float) -> str:
        """The stall in words, the ranks that are to blame first."""
        rows = [(rank, *map(int, row)) for rank, row in enumerate(self._table)]
        states = {rank: process_state(pid) for rank, _, _, pid in rows}
        missing = [rank for rank, _, _, _ in rows if states[rank] in "TtZX"]
        missing = missing or [rank for rank, begun, ended, _ in rows if begun == ended]
        lines = []
        for rank, begun, ended, pid in rows:
            place = f"in step {begun}" if begun != ended else f"idle after step {ended}"
            lines.append(f"rank {rank} {place} (pid {pid}, state {states[rank]})")
        blamed = " and ".join(f"rank {rank}" for rank in missing)
        who = f"{blamed} did not take part" if missing else "every rank is in it"
        return f"stalled: a step has lasted more than {limit_s:g} s; {who}: {'; '.join(lines)}"


def process_state(pid: int) -> str:
    """The kernel's letter for a process: R, S, D, T (stopped), Z (dead); X where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    # The name before it is in brackets and may hold any letter.
    return text.rpartition(")")[2].split()[0]
