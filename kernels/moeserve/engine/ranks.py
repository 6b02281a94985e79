"""The processes of a server with several ranks: started by rank 0, alive together, gone together.

Receives the options in the engine process, which becomes rank 0; starts the other ranks on their
seats (`seats.py`), connected by the sockets that `team.py` talks over. Ranks find each other
through memory that they inherit, not through a port, so nothing can be taken by another program in
between and nothing stays behind. A rank that dies or hangs ends all of them, with a report to the
front.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moeserve.engine.board import Board
from moeserve.engine.client import EngineInfo
from moeserve.engine.config import EngineConfig
from moeserve.engine.link import Inbox, Link, LinkLost
from moeserve.engine.seats import Seat, make_seats
from moeserve.engine.team import Follower, Leader
from moeserve.errors import MoeserveError
from moeserve.parallel import Place

if TYPE_CHECKING:
    from moeserve.engine.engine import Engine

logger = logging.getLogger("moeserve.engine")
_CODE = "import sys; from moeserve.engine import ranks; ranks.main(int(sys.argv[1]))"
# A death shows within this time of the broken collective that it causes in other ranks.
_DEATH_SHOWS_S = 1.0
# Ranks that were told to end may take this long before they are killed.
_END_GRACE_S = 3.0
# Rank 0 reports a stall; the others act only where it is rank 0 that hangs.
_STALL_GRACE_S = 5.0

Fail = Callable[[str, str], None]


class Crew:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, seats: Sequence[Seat], front: Link) -> None:
        self._front = front
        self._seats = seats
        self._lock = threading.Lock()
        self._is_ending = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[Link] = []
        for seat in seats[1:]:
            self._start(seat)
        for seat in seats[1:]:
            for fd in seat.sockets:
                os.close(fd)

    def _start(self, seat: Seat) -> None:
        ours, theirs = socket.socketpair()
        store = int(seat.place.store.rpartition("/")[2])
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), seat.board, store, *seat.sockets),
                stdin=subprocess.DEVNULL,
            )
        control = Link(ours)
        control.send(("seat", seat))
        self._processes.append(process)
        self._controls.append(control)
        threading.Thread(target=self._watch, args=(control, seat.place), daemon=True).start()

    def _watch(self, control: Link, place: Place) -> None:
        """Wait for a rank's last word; its socket closes when it dies."""
        try:
            _, kind, text = control.receive()
        except LinkLost:
            self.fail("EngineError", f"{place.label} is gone")
        else:
            if kind != "ended":
                self.fail(kind, f"{place.label}: {text}")

    def fail(self, kind: str, text: str) -> None:
        """Tell the front why, and end every rank; a rank that has died is the better reason.

        Args:
            kind: Class of the error.
            text: Its message.
        """
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        text = self._first_death() or text
        logger.error("%s", text)
        try:
            self._front.send(("failed", kind, text))
        except LinkLost:
            logger.error("the API process is gone too")
        self._kill()
        os._exit(1)

    def _first_death(self) -> str:
        deadline = time.monotonic() + _DEATH_SHOWS_S
        while time.monotonic() < deadline:
            for process, seat in zip(self._processes, self._seats[1:], strict=True):
                code = process.poll()
                # A rank that fails reports it and stays until it is ended.
                if code is not None:
                    how = f"exit code {code}"
                    if code < 0:
                        how = f"killed by {signal.Signals(-code).name}"
                    return f"{seat.place.label} died ({how}); all ranks end"
            time.sleep(0.01)
        return ""

    def end(self) -> None:
        """Wait for ranks that were told to end."""
        with self._lock:
            if self._is_ending:
                # Another thread is about to end this process.
                threading.Event().wait()
            self._is_ending = True
        deadline = time.monotonic() + _END_GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("process %d is killed", process.pid)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()


def run_first(
    config: EngineConfig, front: Link, inbox: Inbox, fronts: Sequence[int], started_at: float
) -> None:
    """Be rank 0 until the server ends; does not return.

    Args:
        config: Options of more than one rank.
        front: To the API process.
        inbox: What it says.
        fronts: Its sockets for the other DP ranks.
        started_at: See `Seat`.
    """
    try:
        seats = make_seats(config, [-1, *fronts], started_at)
    except MoeserveError as error:
        front.send(("failed", type(error).__name__, str(error)))
        return
    crew = Crew(seats, front)
    _run(seats[0], front, inbox, crew.fail)
    crew.end()
    os._exit(0)


def main(fd: int) -> None:
    """Be another rank until the server ends.

    Args:
        fd: Inherited socket to rank 0; it closes when that one is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = Link(socket.socket(fileno=fd))
    _, seat = control.receive()
    threading.Thread(target=_end_with_first, args=(control,), daemon=True).start()
    inbox: Inbox = Inbox()
    front = None
    if seat.front >= 0:
        front = Link(socket.socket(fileno=seat.front))
        front.read_into(inbox, at_end=("end", None))

    def fail(kind: str, text: str) -> None:
        try:
            control.send(("failed", kind, text))
        finally:
            # Rank 0 ends this process.
            threading.Event().wait()

    if _run(seat, front, inbox, fail):
        control.send(("ended", "ended", ""))
    os._exit(0)


def _end_with_first(control: Link) -> None:
    try:
        control.receive()
    except LinkLost:
        os._exit(1)


def _run(seat: Seat, front: Link | None, inbox: Inbox, fail: Fail) -> bool:
    """Load, report, serve; whether that ended as it should."""
    place = seat.place
    logging.basicConfig(
        level=seat.config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s engine {place.label}: %(message)s",
        force=True,
    )
    try:
        board = Board(seat.board, place)
        engine = _load(seat)
        followers = [Link(socket.socket(fileno=fd)) for fd in seat.followers]
        info = engine.info(time.time() - seat.started_at)
        _serve(seat, (engine, board, info), (front, followers), inbox, fail)
        return True
    except MoeserveError as error:
        fail(type(error).__name__, str(error))
    except LinkLost:
        # Somebody is gone; rank 0 knows who, and ends this process.
        threading.Event().wait(_END_GRACE_S)
    except Exception as error:
        # The process boundary: whatever went wrong has to reach the API process as data.
        logger.exception("this rank cannot go on")
        fail("EngineError", f"{type(error).__name__}: {error}")
    return False


def _load(seat: Seat) -> Engine:
    # Torch is imported here, while the other ranks are started already.
    from moeserve.engine.engine import Engine

    return Engine(seat.config, seat.place)


def _serve(
    seat: Seat,
    loaded: tuple[Engine, Board, EngineInfo],
    links: tuple[Link | None, list[Link]],
    inbox: Inbox,
    fail: Fail,
) -> None:
    engine, board, info = loaded
    front, followers = links
    is_first = seat.place.rank == 0

    def on_stall(report: str) -> None:
        if is_first:
            fail("EngineError", report)
        logger.error("%s; rank 0 does nothing about it and is killed", report)
        os.kill(board.first_pid, signal.SIGKILL)

    if seat.leader >= 0:
        leader = Link(socket.socket(fileno=seat.leader))
        leader.send(("ready", info.backends["ranks"]))
        board.watch(seat.config.stall_limit_s, _STALL_GRACE_S, on_stall)
        Follower(engine, seat.place, board, leader).run()
        return
    assert front is not None
    ranks = list(info.backends["ranks"])  # type: ignore[call-overload]
    for link in followers:
        ranks += link.receive()[1]
    peers = {dp_rank: Link(socket.socket(fileno=fd)) for dp_rank, fd in seat.peers}
    for link in peers.values():
        link.read_into(inbox)
    logger.info("ready after %.2f s", info.load_s)
    front.send(("ready", replace(info, backends={**info.backends, "ranks": ranks})))
    board.watch(seat.config.stall_limit_s, 0.0 if is_first else _STALL_GRACE_S, on_stall)
    Leader(engine, seat.place, board, (front, followers, peers), inbox).run()
