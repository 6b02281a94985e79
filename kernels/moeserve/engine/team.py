"""How ranks keep step: TP followers repeat what their leader does, DP leaders step together.

Receives the front's messages at each DP rank's leader (tp 0) and drives its `Engine`; one message a
step goes from a leader to its followers, who hold the same requests in the same order and so
schedule the same steps. Greedy tokens agree by construction, because all ranks of a row hold the
same gathered logits, and the message carries a checksum of them; drawn tokens are the leader's.

DP ranks that share experts must enter each other's collectives. A leader that has tokens tells the
others how many before its step; whoever hears of a step joins it, without tokens where it has none,
and nobody else ever waits. On a GPU that happens while the step before is still running.

Processes and sockets are made in `ranks.py`.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from moeserve.engine.batch import SharedStep
from moeserve.engine.board import Board
from moeserve.engine.link import Inbox, Link, LinkLost
from moeserve.engine.profiling import can_profile, profile
from moeserve.engine.wire import Message
from moeserve.parallel import Place
from moeserve.runner.sampler import Sampled

if TYPE_CHECKING:
    from moeserve.engine.engine import Engine
    from moeserve.engine.host_steps import Step
    from moeserve.engine.scheduler import StepPlan


class Ended(Exception):
    """The front ended the server while this rank waited for others."""


class Team(Protocol):
    """What an engine asks of the other ranks in each step."""

    def agree(self, plan: StepPlan) -> SharedStep | None:
        """Tell and learn what runs now; None where no expert is shared or nobody has a token."""
        ...

    def sampled(self, step: Step) -> Sampled | None:
        """The step's tokens, the same on every rank of the row."""
        ...


class _Tokens:
    """Checksum of all greedy tokens so far."""

    def __init__(self) -> None:
        self.checksum = 0

    def greedy(self, step: Step) -> Sampled | None:
        chosen = step.sampled()
        if chosen is not None:
            self.checksum = zlib.crc32(array("q", chosen.tokens).tobytes(), self.checksum)
        return chosen


def _is_greedy(step: Step) -> bool:
    return all(row.is_greedy for row in step.rows)


class Leader:
    """The rank of a row that talks to the front."""

    def __init__(
        self,
        engine: Engine,
        place: Place,
        board: Board,
        links: tuple[Link, Sequence[Link], Mapping[int, Link]],
        inbox: Inbox,
    ) -> None:
        """Take over an engine.

        Args:
            engine: This rank's.
            place: This rank's.
            board: Where steps are noted.
            links: To the front, to the followers of the row, and to the leaders of the other DP
                ranks that share experts, by DP rank.
            inbox: Receives the messages of the front and of the other leaders.
        """
        self._engine = engine
        self._place = place
        self._board = board
        self._front, self._followers, self._peers = links
        self._inbox = inbox
        self._calls: dict[int, deque[Message]] = {dp_rank: deque() for dp_rank in self._peers}
        self._later: deque[Message] = deque()
        self._new: list[object] = []
        self._aborted: list[str] = []
        self._tokens = _Tokens()
        self._is_profile_wanted = False
        self._is_profile_agreed = False
        engine.team = self

    def run(self) -> None:
        """Serve until the front says so or goes away."""
        try:
            while True:
                while not self._is_due() or self._later or not self._inbox.empty():
                    if not self._is_due():
                        self._tell_front(())
                    message = self._later.popleft() if self._later else self._inbox.get()
                    if not self._handle(message):
                        return
                self._step()
        except Ended:
            return
        finally:
            for link in self._followers:
                try:
                    link.send(("end",))
                except LinkLost:
                    continue

    def _is_due(self) -> bool:
        return (
            self._engine.has_work
            or self._is_profile_wanted
            or any(calls for calls in self._calls.values())
        )

    def _handle(self, message: Message) -> bool:
        """Act on one message; False where it ends the server."""
        kind = message[0]
        if kind == "work":
            for request in message[1]:
                self._engine.add(request)
            for request_id in message[2]:
                self._engine.abort(request_id)
            self._new += message[1]
            self._aborted += message[2]
        elif kind == "peer":
            self._calls[message[1]].append(message)
        elif kind == "profile":
            self._is_profile_wanted = True
        return str(kind) != "end"

    def _step(self) -> None:
        self._board.begin()
        had_work = self._engine.has_work
        out = self._engine.step()
        if self._is_profile_agreed:
            self._profile()
        self._board.end()
        if had_work or out:
            stats = self._engine.stats()
            # Never waits for the API process, which may be busy with a thousand prompts.
            self._tell_front(("step", out.ids, out.tokens, out.events, stats))

    def _tell_front(self, message: Message) -> None:
        """Send a message as far as it is taken at once; an empty one waits until all is taken."""
        try:
            if message:
                self._front.put(message)
            else:
                self._front.flush()
        except LinkLost as error:
            raise Ended from error

    def agree(self, plan: StepPlan) -> SharedStep | None:
        """See `Team.agree`."""
        wants_profile = self._is_profile_wanted and can_profile(self._engine)
        shared = None
        if not self._peers:
            self._is_profile_agreed = wants_profile
        elif plan or wants_profile or any(calls for calls in self._calls.values()):
            shared = self._exchange(plan, wants_profile)
        message = ("step", self._new, self._aborted, shared, self._tokens.checksum)
        for link in self._followers:
            link.send(message)
        self._new, self._aborted = [], []
        return shared

    def _exchange(self, plan: StepPlan, wants_profile: bool) -> SharedStep | None:
        mine = (plan.num_tokens, not plan.prefills, wants_profile)
        for link in self._peers.values():
            link.send(("peer", self._place.dp_rank, *mine))
        while not all(self._calls.values()):
            message = self._inbox.get()
            if message[0] == "peer":
                self._calls[message[1]].append(message)
            elif message[0] == "end":
                raise Ended
            else:
                self._later.append(message)
        told = {dp_rank: calls.popleft()[2:] for dp_rank, calls in self._calls.items()}
        told[self._place.dp_rank] = mine
        counts = tuple(told[dp_rank][0] for dp_rank in range(self._place.dp_size))
        self._is_profile_agreed = all(wants for _, _, wants in told.values())
        if not any(counts):
            return None
        return SharedStep(counts, all(is_decode for _, is_decode, _ in told.values()))

    def sampled(self, step: Step) -> Sampled | None:
        """See `Team.sampled`."""
        if _is_greedy(step):
            return self._tokens.greedy(step)
        chosen = step.sampled()
        if chosen is not None:
            message = ("tokens", chosen.tokens, chosen.bad_rows)
            for link in self._followers:
                link.send(message)
        return chosen

    def _profile(self) -> None:
        """Profile on every rank of the row at once, as all rows do now."""
        self._is_profile_wanted = self._is_profile_agreed = False
        for link in self._followers:
            link.send(("profile",))
        result = profile(self._engine, self._place)
        ranks = list(result["ranks"])  # type: ignore[call-overload]
        for link in self._followers:
            ranks += link.receive()[1]
        self._front.send(("profile", {**result, "ranks": ranks}))


class Follower:
    """A rank that does what the leader of its row does."""

    def __init__(self, engine: Engine, place: Place, board: Board, leader: Link) -> None:
        self._engine = engine
        self._place = place
        self._board = board
        self._leader = leader
        self._tokens = _Tokens()
        self._message: Message = ()
        engine.team = self

    def run(self) -> None:
        """Follow until the leader says so or goes away."""
        while True:
            message = self._leader.receive()
            if message[0] == "end":
                return
            if message[0] == "profile":
                self._board.begin()
                result = profile(self._engine, self._place)
                self._board.end()
                self._leader.send(("profile", result["ranks"]))
                continue
            self._message = message
            for request in message[1]:
                self._engine.add(request)
            for request_id in message[2]:
                self._engine.abort(request_id)
            self._board.begin()
            self._engine.step()
            self._board.end()

    def agree(self, plan: StepPlan) -> SharedStep | None:
        """See `Team.agree`; the leader has asked the others.

        Raises:
            RuntimeError: This rank has chosen other tokens than its leader.
        """
        _, _, _, shared, checksum = self._message
        if checksum != self._tokens.checksum:
            raise RuntimeError("this rank has chosen other tokens than the leader of its row")
        mine = shared.num_tokens[self._place.dp_rank] if shared is not None else None
        if mine is not None and mine != plan.num_tokens:
            raise RuntimeError(f"{plan.num_tokens} tokens scheduled where the leader has {mine}")
        assert shared is None or isinstance(shared, SharedStep)
        return shared

    def sampled(self, step: Step) -> Sampled | None:
        """See `Team.sampled`; drawn tokens come from the leader."""
        if _is_greedy(step):
            return self._tokens.greedy(step)
        _, tokens, bad_rows = self._leader.receive()
        chosen = Sampled(tokens, bad_rows, None, {})
        step.take(chosen)
        return chosen
