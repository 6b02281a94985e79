"""Starts and ends the server: socket, engine, uvicorn, signals, exit code.

Receives a `ServeConfig`; returns the exit status. The socket listens before the model is loaded,
so the port is known at once (`--port-file`, log) and `/health` says 503 until the engine is ready.
The first SIGTERM or SIGINT ends gracefully, the second at once; an engine that dies ends the
server with status 1.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from moeserve.args import ServeConfig
from moeserve.engine.client import EngineClient
from moeserve.engine.config import EngineConfig
from moeserve.errors import MoeserveError
from moeserve.server.app import build_app
from moeserve.server.chat import ChatTemplate
from moeserve.server.connection import bounded_protocol
from moeserve.server.folder import read_folder
from moeserve.server.open_files import LoopErrors, raise_file_limit
from moeserve.server.params import ModelContext
from moeserve.server.service import Service
from moeserve.server.tokenizer import byte_tokenizer

logger = logging.getLogger("moeserve.server")
StartEngine = Callable[[EngineConfig], Awaitable[EngineClient]]
# Replies to sequences that were ended by force still have to reach their clients.
_FLUSH_S = 5.0
_WATCH_INTERVAL_S = 0.25
# A thread that reads a large request keeps the interpreter no longer than this: at the default of
# 5 ms the event loop would wait that long each time it comes back from the kernel.
_SWITCH_INTERVAL_S = 0.0005


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher has the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's handlers as they are."""
        yield


def _call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[[int], None], number: int
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, number)


async def _start_engine(config: EngineConfig) -> EngineClient:
    # Late, so that the socket listens before anything heavy is imported.
    from moeserve.engine.process import start_engine

    return await start_engine(config)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        OSError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves Nagle's algorithm on: 40 ms a request.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(4096)
    except OSError:
        sock.close()
        raise
    sock.set_inheritable(False)
    return sock


def write_port_file(path: Path, port: int) -> None:
    """Write `{"port": N}` so that a reader sees either nothing or all of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps({"port": port}) + "\n", encoding="utf-8")
    beside.replace(path)


def serve(config: ServeConfig, start: StartEngine | None = None) -> int:
    """Run the server until it is told to end; return its exit status.

    Args:
        config: All options.
        start: Starts the engine; None is `engine.process.start_engine`.
    """
    _log_to_stderr(config)
    for note in config.notes:
        logger.info("%s", note)
    try:
        sock = listen(config.host, config.port)
    except (OSError, OverflowError) as error:
        logger.error("cannot listen on %s:%d: %s", config.host, config.port, error)
        return 1
    port = sock.getsockname()[1]
    if config.port_file:
        try:
            write_port_file(Path(config.port_file), port)
        except OSError as error:
            logger.error("--port-file %s: cannot be written: %s", config.port_file, error)
            return 1
    host = f"[{config.host}]" if ":" in config.host else config.host
    logger.info("listening on http://%s:%d", host, port)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    return asyncio.run(_Launcher(config, sock, start).run())


def uvicorn_config(service: Service) -> uvicorn.Config:
    """Return the options of the HTTP side."""
    config = service.config
    return uvicorn.Config(
        build_app(service),
        http=bounded_protocol(config.limits),
        ws="none",
        lifespan="off",
        loop="asyncio",
        access_log=config.has_access_log,
        log_config=None,
        server_header=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=int(_FLUSH_S) + 1,  # the grace is over by then
        h11_max_incomplete_event_size=config.limits.max_header_bytes,
        backlog=4096,
    )


class _Launcher:
    """One run of the server."""

    def __init__(
        self, config: ServeConfig, sock: socket.socket, start: StartEngine | None = None
    ) -> None:
        self._config = config
        self._start = start or _start_engine
        self._sock = sock
        self._service = Service(config)
        self._engine: EngineClient | None = None
        self._exit_status = 0
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._uvicorn = HttpServer(uvicorn_config(self._service))

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors(raise_file_limit()))
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not the loop's own handlers, which end with it: a late second signal must not kill
            # a process that is about to exit with its status.
            signal.signal(number, lambda number, _: _call_soon(loop, self._on_signal, number))
        http = asyncio.create_task(self._uvicorn.serve(sockets=[self._sock]))
        life = asyncio.create_task(self._live())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({http, life, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if http.done() and not self._stop.is_set():
            self._fail(f"the HTTP side ended: {http.exception()}")
        await self._shut_down(life, http)
        stopped.cancel()
        logger.info("ended with status %d", self._exit_status)
        return self._exit_status

    async def _live(self) -> None:
        """Load the engine, serve, and watch it; returns when there is nothing more to serve."""
        try:
            await self._load()
        except (MoeserveError, OSError, ValueError) as error:
            self._fail(f"the model could not be loaded: {error}")
            return
        except Exception:
            # The process boundary: a fault of this package's own must still end with status 1.
            logger.exception("a fault while loading")
            self._fail("the model could not be loaded")
            return
        # The engine is another process: its death is seen by asking, not by an event.
        while self._engine is not None and self._engine.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_INTERVAL_S)
        if not self._stop.is_set():
            self._fail("the engine has ended")

    def _fail(self, message: str) -> None:
        logger.error("%s", message)
        self._service.status = "failed"
        self._exit_status = 1

    async def _load(self) -> None:
        start = time.perf_counter()
        config = self._config
        logger.info("loading %s", config.engine.model)
        starting = asyncio.ensure_future(self._start(config.engine))
        try:
            folder = await asyncio.to_thread(read_folder, config)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        self._engine = engine = await starting
        tokenizer = folder.tokenizer or byte_tokenizer(engine.info.vocab_size)
        context = ModelContext(engine.info, tokenizer, config.limits, folder.sampling_defaults)
        chat = ChatTemplate(folder.chat_template, tokenizer.names, config.limits)
        # What is loaded stays; collections need not walk it again.
        gc.collect()
        gc.freeze()
        self._service.ready(engine, context, chat)
        logger.info(
            "ready after %.1f s: %s, context %d tokens, %d KV pages of %d tokens",
            time.perf_counter() - start,
            ", ".join(config.served_names),
            engine.info.max_model_len,
            engine.info.num_pages,
            engine.info.page_size,
        )

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        name = signal.Signals(number).name
        if self._num_signals == 1:
            logger.info("%s: stopping; %d sequences are open", name, self._service.num_open)
            self._stop.set()
        else:
            logger.info("%s again: stopping at once", name)
            self._uvicorn.force_exit = True
            if self._engine is not None:
                self._hurry = asyncio.ensure_future(self._engine.shutdown(0.0))

    async def _shut_down(self, life: asyncio.Task[None], http: asyncio.Task[None]) -> None:
        """Refuse new work, let open requests end, then end the engine and the HTTP side."""
        if self._service.status != "failed":
            self._service.status = "stopping"
        if not life.done() and self._engine is None:
            life.cancel()  # still loading
            await asyncio.gather(life, return_exceptions=True)
        if self._engine is not None:
            # The socket listens all the while: probes and clients are told, and /metrics shows
            # what is still open.
            await self._engine.shutdown(self._config.shutdown_grace_s)
        self._uvicorn.should_exit = True
        await asyncio.gather(http, return_exceptions=True)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await self._service.close()


def _log_to_stderr(config: ServeConfig) -> None:
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    if not config.has_access_log:
        logging.getLogger("uvicorn.access").setLevel("WARNING")
