"""`moeserve bench startup`: from the start of a server to its first reply and to full speed.

Receives argv: options of this command, and everything else for the server it starts. Prints when
the server was ready, gave its first reply, and decoded at full speed; returns the exit status.
Requests are sent by `serve_client.py`; steady speed is `moeserve bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from moeserve.bench.serve_client import Outcome, Pace, Target, new_session, run_load, send
from moeserve.bench.serve_load import Ask
from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError

# Tokens are counted in windows of this length; full speed is the first one that reaches this
# share of the median of the load's second half.
WINDOW_S = 0.1
FULL_SPEED_SHARE = 0.9
_POLL_S = 0.02
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Startup:
    """Seconds from the start of the process.

    Attributes:
        ready_s: The server answers on its port.
        first_reply_s: The first request has its reply.
        full_speed_s: The load decodes at full speed.
        tokens_per_s: That speed.
    """

    ready_s: float
    first_reply_s: float
    full_speed_s: float
    tokens_per_s: float


def main(argv: Sequence[str]) -> int:
    """Measure one start."""
    options, server_argv = _parser().parse_known_args(list(argv))
    if not server_argv or server_argv[0].startswith("-"):
        raise UsageError("bench startup: the server's MODEL comes first, then its options")
    _check_options(options)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = asyncio.run(_measure(options, server_argv, Path(folder)))
        finally:
            log = Path(folder, "log")
            if options.server_log and log.is_file():
                shutil.copyfile(log, options.server_log)
    print(f"ready after            {found.ready_s:8.2f} s")
    print(f"first reply after      {found.first_reply_s:8.2f} s")
    print(f"full-speed decode after {found.full_speed_s:7.2f} s ({found.tokens_per_s:.0f} tok/s)")
    if options.json:
        Path(options.json).write_text(json.dumps(asdict(found), indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "bench startup", usage="moeserve bench startup MODEL [server options] [options]"
    )
    add = parser.add_argument
    add("--num-prompts", type=int, default=128, help="of the load that shows full speed")
    add("--output-len", type=int, default=128, help="tokens of each")
    add("--timeout-s", type=float, default=600.0, help="for the server to be ready")
    add("--json", default="", help="file to write the figures to")
    add("--server-log", default="", help="file to keep the server's log in: where its time went")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Refuse at once what a started server would only show minutes later."""
    if options.num_prompts < 1:
        raise UsageError(f"bench startup: --num-prompts {options.num_prompts}: at least 1")
    if options.output_len < 2:
        raise UsageError(
            f"bench startup: --output-len {options.output_len}: 2 or more shows a speed"
        )
    if not options.timeout_s > 0:
        raise UsageError(f"bench startup: --timeout-s {options.timeout_s}: more than 0")
    for flag, path in (("--json", options.json), ("--server-log", options.server_log)):
        parent = Path(path).absolute().parent
        if path and not parent.is_dir():
            raise UsageError(f"bench startup: {flag} {path}: no folder {parent}")


async def _measure(options: argparse.Namespace, server_argv: list[str], folder: Path) -> Startup:
    # `perf_counter` is the clock of the client's outcomes.
    start = time.perf_counter()
    with _server(server_argv, folder) as process:
        base_url = await _ready(process, folder, start + options.timeout_s)
        ready_s = time.perf_counter() - start
        async with new_session() as session:
            async with session.get(f"{base_url}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            target = Target(base_url, model, extra={"temperature": 0.0, "ignore_eos": True})
            first = await send(session, target, Ask([5, 6], 1))
        _check([first], folder)
        first_reply_s = first.start + first.latency - start
        asks = [Ask([5, 7 + i % 500], options.output_len) for i in range(options.num_prompts)]
        outcomes, _ = await run_load(target, asks, Pace())
    _check(outcomes, folder)
    at, speed = full_speed(outcomes)
    return Startup(ready_s, first_reply_s, at - start, speed)


@contextlib.contextmanager
def _server(argv: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server in a process group of its own, ended as a whole."""
    command = [sys.executable, "-P", "-m", "moeserve", *argv, "--port", "0"]
    command += ["--port-file", str(folder / "port")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _ready(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> str:
    """Wait until the server answers; returns its address."""
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() < deadline:
            if process.poll() is not None:
                raise UsageError(f"the server ended with {process.returncode}:\n{_tail(folder)}")
            port_file = folder / "port"
            if port_file.is_file():
                port = json.loads(port_file.read_text())["port"]
                base_url = f"http://127.0.0.1:{port}"
                # Listening, perhaps not yet ready.
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{base_url}/health") as response:
                        if response.status == 200:
                            return base_url
            await asyncio.sleep(_POLL_S)
    raise UsageError(f"the server was not ready in time:\n{_tail(folder)}")


def _check(outcomes: list[Outcome], folder: Path) -> None:
    wrong = next((outcome.error for outcome in outcomes if outcome.error), "")
    if wrong:
        raise UsageError(f"a request failed: {wrong}\n{_tail(folder)}")


def _tail(folder: Path) -> str:
    """The last 40 lines of the server's log."""
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-40:])


def full_speed(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """When a load first decoded at full speed, and that speed.

    Args:
        outcomes: Requests that were sent together; chunks after the first count as a token each.

    Returns:
        Time on the outcomes' clock, and tokens a second.
    """
    times: list[float] = []
    for outcome in outcomes:
        at = outcome.start + outcome.ttft
        for gap in outcome.itls:
            at += gap
            times.append(at)
    if not times:
        raise UsageError("bench startup: --output-len 2 or more shows a speed")
    begin = min(times)
    counts = [0] * (int((max(times) - begin) / WINDOW_S) + 1)
    for at in times:
        counts[int((at - begin) / WINDOW_S)] += 1
    # The last window is cut short by the end of the load.
    whole = counts[:-1] or counts
    steady = statistics.median(whole[len(whole) // 2 :])
    first = next(i for i, count in enumerate(whole) if count >= FULL_SPEED_SHARE * steady)
    return begin + first * WINDOW_S, steady / WINDOW_S
