"""The engine process: reads messages, steps the engine, sends what happened.

Started by `process.py` with one end of a socket pair. A thread reads the socket, so that the API
process is never blocked by a long step and its death is noticed during one; the main thread owns
the engine. Torch is imported here and not in the API process.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from moeserve.engine.wire import Message, Outbox, Unpacker, pack, receive
from moeserve.runner.compile_process import CompileProcess

if TYPE_CHECKING:
    from moeserve.engine.config import EngineConfig
    from moeserve.engine.engine import Engine
    from moeserve.engine.events import StepOutput

logger = logging.getLogger("moeserve.engine")
# A step that is still running this long after the API process went away is not waited for.
ORPHAN_GRACE_S = 2.0


def main(fd: int, started_at: float) -> None:
    """Run until the API process says so or goes away.

    Args:
        fd: Inherited end of the socket pair.
        started_at: `time.time()` at which the API process began to start this one.
    """
    # Both reach the whole process group; the API process lets requests finish and then ends this
    # one through the socket, which also closes when the API process is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine: %(message)s")
    sock = socket.socket(fileno=fd)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sock, inbox), daemon=True).start()
    kind, *rest = inbox.get()
    if kind != "start":
        return
    config, other_fds = rest
    logging.getLogger().setLevel(config.log_level.upper())
    if config.num_ranks > 1:
        from moeserve.engine import ranks
        from moeserve.engine.link import Link

        ranks.run_first(config, Link(sock), inbox, other_fds, started_at)
        return
    try:
        engine = _load(sock, config, started_at)
        if engine is not None:
            _loop(sock, inbox, engine)
    except OSError:
        # It may have ended over a fault of its own while this process was loading.
        logger.info("the API process is gone")


def _read(sock: socket.socket, inbox: queue.SimpleQueue[Message]) -> None:
    unpacker = Unpacker()
    while (messages := receive(sock, unpacker)) is not None:
        for message in messages:
            inbox.put(message)
    inbox.put(("end", None))
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def _load(sock: socket.socket, config: EngineConfig, started_at: float) -> Engine | None:
    from moeserve.errors import MoeserveError

    # Before torch is imported, so that both import at the same time.
    compiling = None if config.device == "cpu" else CompileProcess.start_if_useful()
    try:
        from moeserve.engine.engine import Engine

        engine = Engine(config, compiling=compiling)
    except MoeserveError as error:
        sock.sendall(pack(("failed", type(error).__name__, str(error))))
        return None
    except Exception as error:
        # The process boundary: whatever went wrong has to reach the API process as data.
        logger.exception("the engine could not start")
        sock.sendall(pack(("failed", "EngineError", f"{type(error).__name__}: {error}")))
        return None
    finally:
        if compiling is not None:
            compiling.close()
    load_s = time.time() - started_at
    logger.info("ready after %.2f s", load_s)
    sock.sendall(pack(("ready", engine.info(load_s))))
    return engine


def _loop(sock: socket.socket, inbox: queue.SimpleQueue[Message], engine: Engine) -> None:
    outbox = Outbox(sock)
    while True:
        wait = not engine.has_work
        if wait:
            outbox.flush()
        while wait or not inbox.empty():
            if not _handle(inbox.get(), outbox, engine):
                return
            wait = False
        if engine.has_work:
            out = _step(engine)
            outbox.put(("step", out.ids, out.tokens, out.events, engine.stats()))


def _step(engine: Engine) -> StepOutput:
    try:
        return engine.step()
    except Exception as error:
        # The process boundary: the requests of this step get an event, the others go on.
        logger.exception("a step failed")
        return engine.fail_step(f"the step failed: {type(error).__name__}: {error}")


def _handle(message: Message, outbox: Outbox, engine: Engine) -> bool:
    """Act on one message; False where it ends the process."""
    kind = message[0]
    if kind == "work":
        for request in message[1]:
            engine.add(request)
        for request_id in message[2]:
            engine.abort(request_id)
    elif kind == "profile":
        from moeserve.engine.profiling import profile

        try:
            result: dict[str, object] = profile(engine)
        except Exception as error:
            # The process boundary: a profiler that cannot run here must not end the server.
            logger.exception("profiling failed")
            result = {"error": f"{type(error).__name__}: {error}"}
        outbox.put(("profile", result))
    return str(kind) != "end"
