"""`LaunchSpec` -> `RunningServer`: started, ready, watched, and ended with its whole tree.

Receives how to start (from `engines/`), where to log and how long to wait; returns a server
that lists the expected model, is alive and owns its port. Which job talks to it is
`pipeline.py`; the process itself is `leash.py`; looking at it is `readiness.py`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evalsuite import server_log
from evalsuite.attach import Patience, wait_for
from evalsuite.engines.base import LaunchSpec
from evalsuite.errors import ServerError
from evalsuite.gpu_memory import GpuMemory
from evalsuite.launching import api_key_of, child_env, describe_exit, hold_port, read_port
from evalsuite.leash import Leash
from evalsuite.masking import mask_command, mask_file, secret_arguments, secret_values
from evalsuite.processes import is_running
from evalsuite.readiness import FOREIGN, ProgressWatch, probe

# A port that we reserved can still be lost; a server that says so gets another one.
# Of a command line that cannot be meant: argparse (and so vLLM and SGLang), click, moeserve.
_USAGE_EXIT = 2
_ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE|errno 98\b", re.IGNORECASE)
_PORT_ATTEMPTS = 3
# Ready is noticed this soon at first, and a slow start is not drowned in probes.
_END_NEWS_S = 5.0
_POLL_MIN_S, _POLL_MAX_S = 0.03, 0.5


@dataclass(frozen=True)
class StartSettings:
    """Everything about a start that is not the command.

    Attributes:
        log_path: File that receives the server's output.
        startup_limit_s: From the start to ready, monotonic clock.
        absent_limit_s: The part of it in which nothing may listen at an external server's
            address; None for all of it.
        environ: The suite's own environment, handed down by the entry file.
        grace_s: Seconds between TERM and KILL when it is stopped.
        log_limit_bytes: Beyond this size the middle of the log is dropped.
        on_wait: Called a few times a second with (seconds waited, what is seen).
        memory: Watches GPU memory; None where there is none to watch.
    """

    log_path: Path
    startup_limit_s: float
    environ: Mapping[str, str]
    grace_s: float = 10.0
    log_limit_bytes: int = 256 * 1024 * 1024
    on_wait: Callable[[float, str], None] | None = None
    memory: GpuMemory | None = None
    absent_limit_s: float | None = None


@dataclass
class RunningServer:
    """A ready server; stop it by `stop()` or as a context manager.

    Attributes:
        base_url: Root, without "/v1".
        model: Name to put into requests.
        command: Argv and extra environment, secrets masked.
        secrets: Values to mask in whatever is written about this server.
        api_key: Bearer token it asks for, "" for none.
        startup_s: Start to ready; 0 for an external server.
        leash: The supervised process, None for an external server.
        log_path: Its log, None for an external server.
        memory: Watches GPU memory, as in `StartSettings`.
        on_wait: Hears of the wait for that memory after the stop.
    """

    base_url: str
    model: str
    command: str = ""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    api_key: str = field(default="", repr=False)
    startup_s: float = 0.0
    leash: Leash | None = None
    log_path: Path | None = None
    memory: GpuMemory | None = None
    on_wait: Callable[[float, str], None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the server process lives (an external one is taken to)."""
        return self.leash is None or not self.leash.ended.is_set()

    def log_text(self) -> str:
        """First and last megabytes of the log, cleaned and masked."""
        return server_log.text(self.log_path, self.secrets) if self.log_path else ""

    def log_tail(self) -> list[str]:
        """The last lines of the log, cleaned and masked."""
        return server_log.tail(self.log_path, self.secrets) if self.log_path else []

    def died(self, phase: str) -> ServerError:
        """The error that says how it ended."""
        code = self.leash.exit_code if self.leash else None
        return self.fault(f"{phase}: the server process ended{describe_exit(code)}", code)

    def fault(self, reason: str, exit_code: int | None = None) -> ServerError:
        """An error with everything that is known of this server."""
        return ServerError(
            reason,
            command=self.command,
            exit_code=exit_code,
            log_tail=self.log_tail(),
            log_path=str(self.log_path or ""),
        )

    def stop(self) -> None:
        """End the whole tree, wait for it and for its GPU memory; harmless when repeated.

        Raises:
            ServerError: A process survived KILL, or GPU memory stayed in use.
        """
        if self.leash is None:
            return
        self.leash.stop()
        if self.log_path is not None:
            mask_file(self.log_path, self.secrets)
        if self.leash.survivors:
            survivors = ", ".join(map(str, self.leash.survivors))
            raise self.fault(f"stop: processes {survivors} survived KILL")
        if self.memory is not None and (held := self.memory.wait_free(self.on_wait)):
            raise ServerError(f"stop: {held}", command=self.command)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(spec: LaunchSpec, settings: StartSettings) -> RunningServer:
    """Start a server and wait until it is ready.

    Raises:
        ConfigError: An external server that no wait can make the expected one.
        ServerError: It could not be started, died, is not the expected one, or was not ready
            in time. Nothing of it is left running then.
    """
    if spec.base_url:
        return _attach(spec, settings)
    if settings.memory is not None and (held := settings.memory.wait_free(settings.on_wait)):
        raise ServerError(f"start: {held}")
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        try:
            return _start_once(spec, settings)
        except ServerError as error:
            # Only a port that we chose can be exchanged for another.
            is_ours = any("{port}" in word for word in spec.port_args)
            is_taken = FOREIGN in error.reason or any(
                _ADDRESS_IN_USE.search(line) for line in error.log_tail
            )
            if not (is_ours and is_taken and attempt < _PORT_ATTEMPTS):
                raise
    raise AssertionError("the last attempt returns or raises")


def _attach(spec: LaunchSpec, settings: StartSettings) -> RunningServer:
    """An external server: waited for, nothing started, nothing stopped.

    Raises:
        ConfigError: It cannot become the expected one, whatever the wait.
        ServerError: It was not ready in time.
    """
    api_key = spec.env.get("OPENAI_API_KEY", "")
    base_url = spec.base_url.rstrip("/").removesuffix("/v1")
    absent_limit_s = settings.absent_limit_s
    if absent_limit_s is None:
        absent_limit_s = settings.startup_limit_s
    patience = Patience(settings.startup_limit_s, absent_limit_s, settings.on_wait)
    wait_for(base_url, spec.served_model, patience, api_key)
    secrets = (api_key,) if api_key else ()
    return RunningServer(base_url, spec.served_model, api_key=api_key, secrets=secrets)


def _start_once(spec: LaunchSpec, settings: StartSettings) -> RunningServer:
    with contextlib.ExitStack() as stack:
        port = 0
        if any("{port}" in word for word in spec.port_args):
            port = hold_port(stack)
        port_file = settings.log_path.with_suffix(".port").resolve()
        port_file.unlink(missing_ok=True)
        argv = spec.argv + tuple(
            word.replace("{port}", str(port)).replace("{port_file}", str(port_file))
            for word in spec.port_args
        )
        env = child_env(spec, settings.environ)
        secrets = (*secret_values(env), *secret_arguments(argv))
        server = RunningServer(
            base_url="",
            model=spec.served_model,
            command=mask_command(argv, spec.env, secrets),
            secrets=secrets,
            api_key=api_key_of(argv, env),
            leash=Leash(argv, env, settings.log_path, settings.grace_s, settings.log_limit_bytes),
            log_path=settings.log_path,
            memory=settings.memory,
            on_wait=settings.on_wait,
        )
        # From here on whatever is raised, an interrupt included, ends the tree first.
        guard = stack.enter_context(contextlib.ExitStack())
        guard.callback(server.stop)
        _wait_ready(server, port, port_file, settings)
        guard.pop_all()
        port_file.unlink(missing_ok=True)
        return server


def _wait_ready(server: RunningServer, port: int, port_file: Path, settings: StartSettings) -> None:
    leash = server.leash
    assert leash is not None
    started = time.monotonic()
    deadline = started + settings.startup_limit_s
    leash.start()
    if leash.start_error:
        raise ServerError(
            f"start: cannot run the server: {leash.start_error}", command=server.command
        )
    watch = ProgressWatch()
    pause_s = _POLL_MIN_S
    detail = "not listening yet"
    while True:
        now = time.monotonic()
        if leash.wait_ended(min(pause_s, deadline - now)):
            raise _died_at_start(server)
        pause_s = min(pause_s * 1.3, _POLL_MAX_S)
        pids = leash.tree()
        watch.look(pids, settings.log_path)
        port = port or read_port(port_file)
        if port:
            server.base_url = f"http://127.0.0.1:{port}"
            left_s = max(deadline - time.monotonic(), 0.1)
            seen = probe(
                server.base_url,
                server.model,
                pids=pids,
                timeout_s=min(1.0, left_s),
                api_key=server.api_key,
            )
            detail = seen.detail
            if seen.state == "ready" and not is_running(leash.pid):
                # Something of its tree answers, but the server itself has ended; the word of it
                # is on its way.
                leash.wait_ended(_END_NEWS_S)
                raise _died_at_start(server)
            if seen.state == "ready":
                server.startup_s = time.monotonic() - started
                return
            if seen.state in ("foreign", "wrong_model"):
                error = server.fault(f"start: {seen.detail}")
                error.is_config_fault = seen.state == "wrong_model"
                raise error
        waited_s = time.monotonic() - started
        if settings.on_wait is not None:
            settings.on_wait(waited_s, watch.describe())
        if waited_s >= settings.startup_limit_s:
            raise server.fault(
                f"ready: not ready within startup_max_wait_seconds "
                f"{settings.startup_limit_s:g}: {detail}; {watch.describe()}"
            )


def _died_at_start(server: RunningServer) -> ServerError:
    leash = server.leash
    assert leash is not None
    error = server.died("start")
    if leash.left:
        error.reason += (
            f", leaving processes {', '.join(map(str, leash.left))} behind; "
            "a server must stay in the foreground"
        )
    elif leash.exit_code == 0:
        error.reason += " before it was ready"
    elif leash.exit_code == _USAGE_EXIT:
        error.reason += ": it refuses its command line"
        error.is_config_fault = True
    return error
