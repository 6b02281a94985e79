"""The engine in a process of its own, seen from asyncio: `start_engine` and `ProcessEngine`.

Receives `Request`s from `server/`, returns `TokenEvent`s; see `client.py` for the contract. The
other side of the socket is `worker.py`. No torch is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
from collections.abc import AsyncIterator
from functools import partial

from moeserve import errors
from moeserve.engine.client import EngineInfo, EngineStats
from moeserve.engine.config import EngineConfig
from moeserve.engine.dp import Lane, emptiest, merged_info, merged_profile, merged_stats
from moeserve.engine.request import FinishReason, Request, TokenEvent
from moeserve.engine.spawn import Spawned, spawn_engine
from moeserve.engine.streams import Connection, Stream, merged
from moeserve.engine.wire import Message

logger = logging.getLogger(__name__)
# How long a process that was told to end may take before it is killed.
EXIT_GRACE_S = 5.0
_KILLED = ": killed from outside; where nobody did, the machine ran out of memory"


class EngineError(errors.MoeserveError):
    """The engine process failed or went away."""


async def start_engine(config: EngineConfig, spawned: Spawned | None = None) -> ProcessEngine:
    """Start the engine process, or take one that is starting, and wait until it is loaded.

    Args:
        config: Options; carried to the process as they are.
        spawned: Of `spawn_engine` with the same options.

    Raises:
        MoeserveError: Of the class and with the text that the engine process gave; `EngineError`
            where it died without a word.
    """
    spawned = spawned or spawn_engine(config)
    client = ProcessEngine(spawned.process, len(spawned.socks))
    loop = asyncio.get_running_loop()
    for lane, sock in zip(client.lanes, spawned.socks, strict=True):
        sock.setblocking(False)
        await loop.create_connection(partial(_itself, lane.connection), sock=sock)
    try:
        await client.wait_ready()
    except BaseException:
        await client.close()
        raise
    return client


def _itself(connection: Connection) -> Connection:
    return connection


class ProcessEngine:
    """`EngineClient` over one process boundary, with a lane for each DP rank."""

    def __init__(self, process: subprocess.Popen[bytes], num_lanes: int = 1) -> None:
        self.info = EngineInfo(0, 0, (), 0, 0)
        self.lanes = [Lane() for _ in range(num_lanes)]
        for index, lane in enumerate(self.lanes):
            # Rank 0 sees every rank's death, ends them all and says why: it is the one to watch.
            on_lost = self.on_lost if index == 0 else _ignore
            lane.connection = Connection(partial(self.on_messages, lane), on_lost)
        self._process = process
        self._streams: dict[str, Stream] = {}
        self._last_words = ""
        self._is_stopping = False
        self._is_lost = False
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._profile: asyncio.Future[dict[str, object]] | None = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @property
    def connection(self) -> Connection:
        """To rank 0."""
        return self.lanes[0].connection

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def wait_ready(self) -> None:
        """Return once the model is loaded; raises what the engine process raised."""
        await self._ready

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Stream the events of one request; closing the iterator aborts it.

        Tokens that arrive while the reader is busy come together in one event.

        Raises:
            ValueError: The id is that of an open request.
        """
        if request.id in self._streams:
            raise ValueError(f"request id {request.id!r} is in use")
        if self._is_stopping or not self.is_alive():
            yield TokenEvent(request.id, finish_reason=FinishReason.ERROR, error=self._refusal())
            return
        lane = emptiest(self.lanes)
        stream = self._streams[request.id] = Stream(lane)
        lane.num_open += 1
        self._all_ended.clear()
        lane.new.append(request)
        self._flush_soon(lane)
        try:
            while True:
                if not stream.events:
                    stream.waiter = asyncio.get_running_loop().create_future()
                    await stream.waiter
                events, stream.events = stream.events, []
                for event in merged(events):
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            if not stream.is_ended:
                self._end_stream(request.id)
                lane.aborted.append(request.id)
                self._flush_soon(lane)

    def stats(self) -> EngineStats:
        """Counters of the last steps, with what has not been sent yet counted as waiting."""
        return merged_stats(self.lanes)

    def is_alive(self) -> bool:
        """Whether the engine process lives."""
        return not self._is_lost and self._process.poll() is None

    async def profile(self) -> dict[str, object]:
        """Run a prefill and a decode step under the profiler.

        Raises:
            EngineError: The process is gone or the profiler cannot run.
        """
        if not self.is_alive():
            raise EngineError(self._refusal())
        if self._profile is None:
            self._profile = asyncio.get_running_loop().create_future()
            for lane in self.lanes:
                lane.profile = None
                lane.connection.send(("profile",))
        result = await asyncio.shield(self._profile)
        if "error" in result:
            raise EngineError(f"profiling failed: {result['error']}")
        return result

    async def shutdown(self, grace_s: float) -> None:
        """Let open requests finish for `grace_s`, then end them with an event, then exit."""
        self._is_stopping = True
        if self._streams and self.is_alive():
            try:
                await asyncio.wait_for(self._all_ended.wait(), grace_s)
            except TimeoutError:
                logger.warning("%d requests are open after %.1f s", len(self._streams), grace_s)
        self._end_all("the server is shutting down")
        await self.close()

    async def close(self) -> None:
        """End the process, with force where it does not go by itself."""
        self._is_stopping = True
        for lane in self.lanes:
            lane.connection.send(("end",))
            lane.connection.close()
        try:
            await asyncio.to_thread(self._process.wait, EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def on_messages(self, lane: Lane, messages: list[Message]) -> None:
        """Sort everything that has arrived into the streams, then wake each reader once."""
        touched: set[Stream] = set()
        for message in messages:
            kind = message[0]
            if kind == "step":
                self._on_step(lane, message, touched)
            elif kind == "ready":
                lane.info = message[1]
                infos = [lane.info for lane in self.lanes if lane.info is not None]
                if len(infos) == len(self.lanes) and not self._ready.done():
                    self.info = merged_info(infos)
                    self._ready.set_result(None)
            elif kind == "failed":
                self._last_words = message[2]
                if not self._ready.done():
                    error_class = getattr(errors, message[1], EngineError)
                    self._ready.set_exception(error_class(message[2]))
            elif kind == "profile":
                lane.profile = message[1]
                profile = merged_profile(self.lanes)
                if self._profile is not None and profile is not None:
                    self._profile.set_result(profile)
                    self._profile = None
        for stream in touched:
            stream.wake()

    def _on_step(self, lane: Lane, message: Message, touched: set[Stream]) -> None:
        _, ids, tokens, events, lane.stats = message
        streams = self._streams
        for request_id, token in zip(ids, tokens, strict=True):
            stream = streams.get(request_id)
            if stream is not None:
                stream.events.append(TokenEvent(request_id, (token,)))
                touched.add(stream)
        for event in events:
            stream = streams.get(event.request_id)
            if stream is not None:
                stream.events.append(event)
                touched.add(stream)
                if event.finish_reason is not None:
                    self._end_stream(event.request_id)

    def on_lost(self) -> None:
        """The engine process is gone: every open request gets an error, whoever waits is told."""
        self._is_lost = True
        # The socket closes an instant before the exit code is there.
        if not self._is_stopping:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
        text = self._refusal()
        if self._ready.done() and not self._is_stopping:
            is_killed = self._process.poll() == -signal.SIGKILL
            logger.error("%s%s", text, _KILLED if is_killed else "")
        if not self._ready.done():
            self._ready.set_exception(EngineError(text))
        if self._profile is not None:
            self._profile.set_result({"error": text})
            self._profile = None
        self._end_all(text)

    def _refusal(self) -> str:
        if self._is_stopping:
            return "the server is shutting down"
        if self._last_words:
            return self._last_words
        code = self._process.poll()
        return f"the engine process is gone (exit code {'unknown' if code is None else code})"

    def _end_stream(self, request_id: str) -> None:
        stream = self._streams.pop(request_id)
        stream.is_ended = True
        stream.lane.num_open -= 1
        if not self._streams:
            self._all_ended.set()

    def _end_all(self, error: str) -> None:
        for request_id, stream in list(self._streams.items()):
            stream.events.append(
                TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=error)
            )
            self._end_stream(request_id)
            stream.wake()

    def _flush_soon(self, lane: Lane) -> None:
        """Send new and aborted requests once the loop has run what is ready: one message."""
        if not lane.is_flush_due:
            lane.is_flush_due = True
            asyncio.get_running_loop().call_soon(lane.flush)


def _ignore() -> None:
    """Nothing is to be done."""
