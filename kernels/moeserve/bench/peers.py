"""`moeserve bench peers`: moeserve and vLLM on this machine, the same loads in the same run.

Receives argv; starts each server, alternates between them load by load and round by round, and
prints Markdown tables of medians with ratios. A peer that is not installed is left out with the
reason. `--soak N` then sends moeserve all of MiniGSM N times at concurrency 1,000 and shows its
memory after each round. Sending is `serve_client.py`, figures are `serve_report.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeserve.bench.peer_server import (
    PeerCommand,
    PeerServer,
    moeserve_command,
    vllm_command,
)
from moeserve.bench.serve_client import Pace, Target, run_load
from moeserve.bench.serve_load import Ask, LoadOptions, make_load
from moeserve.bench.serve_report import Summary, summarise
from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError
from moeserve.tiny import MODEL_NAME

_SOAK_QUESTIONS, _SOAK_CONCURRENCY = 1319, 1000


@dataclass(frozen=True)
class Load:
    """What is sent, how often, how many at once.

    Attributes:
        title: A row of the table.
        options: Requests.
        max_concurrency: Open at most.
    """

    title: str
    options: LoadOptions
    max_concurrency: int


LOADS = {
    "one": Load(
        "concurrency 1: 8 requests, 64 in, 128 out",
        LoadOptions("random", 8, input_len=64, output_len=128, ignore_eos=True),
        1,
    ),
    "many": Load(
        "concurrency 32: 128 requests, 64 in, 128 out",
        LoadOptions("random", 128, input_len=64, output_len=128, ignore_eos=True),
        32,
    ),
    "minigsm": Load(
        "concurrency 32: 330 MiniGSM questions, 5 shots, until they end",
        LoadOptions("minigsm", 330, output_len=256),
        32,
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark of one command line."""
    parser = CommandParser("bench peers")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over these")
    parser.add_argument("--loads", default=",".join(LOADS), help="comma-separated; may be empty")
    parser.add_argument("--only-moeserve", action="store_true", help="no peer")
    parser.add_argument("--soak", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--save-result", type=Path, help="JSON with every round")
    options = parser.parse_args(list(argv))
    names = [name for name in options.loads.split(",") if name]
    if unknown := [name for name in names if name not in LOADS]:
        raise UsageError(f"--loads {unknown[0]}: want some of {', '.join(LOADS)}")
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        return _run(options, names, Path(folder))


def _run(options: argparse.Namespace, names: list[str], folder: Path) -> int:
    commands = [moeserve_command()]
    if not options.only_moeserve:
        try:
            commands.append(vllm_command())
        except UsageError as error:
            print(f"vLLM is left out: {error}", file=sys.stderr)
    saved: dict[str, object] = {"load_average_before": os.getloadavg()}
    with contextlib.ExitStack() as stack:
        servers = []
        for number, command in enumerate(commands):
            servers.append(_start(command, folder / f"{number}.log", stack))
        columns = [server.name for server in servers]
        print(_row(["", *columns, "ratio"][: len(columns) + (len(columns) > 1) + 1]))
        print("|---" * (len(columns) + (len(columns) > 1) + 1) + "|")
        starts = [server.startup_s for server in servers]
        print(_line("start to first reply, s", starts, is_more_better=False))
        for name in names:
            load = LOADS[name]
            rounds = _alternate(servers, load, options.rounds)
            _print_load(load, rounds)
            saved[name] = rounds
        memory = [sum(server.resident_mib().values()) for server in servers]
        print(_line("resident memory of all processes, MiB", memory, is_more_better=False))
        saved["startup_s"], saved["resident_mib"] = starts, memory
        for server in servers[1:]:
            server.stop()
        if options.soak:
            saved["soak"] = _soak(servers[0], options.soak)
    saved["load_average_after"] = os.getloadavg()
    if options.save_result:
        options.save_result.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    print(f"\nload average {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")
    return 0


def _start(command: PeerCommand, log: Path, stack: contextlib.ExitStack) -> PeerServer:
    try:
        server = PeerServer(command, log)
    except UsageError as error:
        tail = log.read_text(errors="replace")[-1500:] if log.is_file() else ""
        raise UsageError(f"{error}\n{tail}") from None
    stack.callback(server.stop)
    return server


def _alternate(
    servers: list[PeerServer], load: Load, num_rounds: int
) -> list[list[dict[str, float]]]:
    """Figures [server][round]; a first round that does not count warms caches and compilers."""
    asks = make_load(load.options)
    found: list[list[dict[str, float]]] = [[] for _ in servers]
    for number in range(-1, num_rounds):
        for index, server in enumerate(servers):
            before = server.cpu_seconds()
            summary = _send(server, asks, load)
            spent = server.cpu_seconds() - before
            if number >= 0:
                per_token = {"cpu_ms_per_token": 1e3 * spent / summary.num_output}
                found[index].append({**_figures(summary), **per_token})
    return found


def _send(server: PeerServer, asks: Sequence[Ask], load: Load) -> Summary:
    extra: dict[str, object] = {"temperature": 0}
    if load.options.ignore_eos:
        extra["ignore_eos"] = True
    target = Target(server.base_url, MODEL_NAME, extra=extra)
    pace = Pace(max_concurrency=load.max_concurrency)
    outcomes, duration = asyncio.run(run_load(target, asks, pace))
    summary = summarise(outcomes, duration)
    if len(summary.answered) < len(outcomes):
        error = next(outcome.error for outcome in outcomes if outcome.error)
        raise UsageError(f"{server.name}: {len(outcomes) - len(summary.answered)} failed: {error}")
    return summary


def _figures(summary: Summary) -> dict[str, float]:
    return {
        "output_tok_s": summary.output_rate,
        "req_s": summary.request_rate,
        "mean_ttft_ms": summary.spreads["ttft"].mean,
        "mean_tpot_ms": summary.spreads["tpot"].mean,
    }


def _print_load(load: Load, rounds: list[list[dict[str, float]]]) -> None:
    titles = {
        "output_tok_s": "output tok/s",
        "req_s": "requests/s",
        "mean_ttft_ms": "mean TTFT, ms",
        "mean_tpot_ms": "mean TPOT, ms",
        "cpu_ms_per_token": "processor time an output token, all processes, ms",
    }
    print(
        _row(
            [f"**{load.title}**", *("" for _ in rounds), ""][: len(rounds) + 1 + (len(rounds) > 1)]
        )
    )
    for key, title in titles.items():
        values = [statistics.median(one[key] for one in side) for side in rounds]
        print(_line(title, values, is_more_better=key.endswith("_s")), flush=True)


def _line(title: str, values: list[float], *, is_more_better: bool) -> str:
    """A row with the advantage of the first over the second, above 1 is better."""
    cells = [title, *map(_number, values)]
    if len(values) > 1:
        above, below = values[:2] if is_more_better else values[1::-1]
        # Processor time is counted in ticks of 10 ms: a short load may take none.
        cells.append(f"{above / below:.2f}×" if below else "")
    return _row(cells)


def _number(value: float) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _soak(server: PeerServer, num_rounds: int) -> list[dict[str, object]]:
    """All of MiniGSM at once, again and again: everything answered, nothing kept."""
    asks = make_load(LoadOptions("minigsm", _SOAK_QUESTIONS, output_len=256))
    target = Target(server.base_url, MODEL_NAME, extra={"temperature": 0})
    found: list[dict[str, object]] = []
    print(f"\n{_SOAK_QUESTIONS} MiniGSM questions, concurrency {_SOAK_CONCURRENCY}:\n")
    print(_row(["round", "answered", "output tok/s", "p50 / p99 latency, s", "pages in use after",
                "resident, MiB"]))  # fmt: skip
    print("|---" * 6 + "|")
    for number in range(1, num_rounds + 1):
        pace = Pace(max_concurrency=_SOAK_CONCURRENCY)
        outcomes, duration = asyncio.run(run_load(target, asks, pace))
        summary = summarise(outcomes, duration)
        latency = summary.spreads["e2el"]
        memory = server.resident_mib()
        usage = server.metric("vllm:kv_cache_usage_perc")
        found.append(
            {
                "answered": len(summary.answered),
                "resident_mib": memory,
                "kv_cache_usage": usage,
                "p50_latency_ms": latency.median,
                "p99_latency_ms": latency.percentiles[0][1],
                **_figures(summary),
            }
        )
        cells = [
            str(number),
            f"{len(summary.answered)} of {len(outcomes)}",
            f"{summary.output_rate:,.0f}",
            f"{latency.median / 1e3:.1f} / {latency.percentiles[0][1] / 1e3:.1f}",
            f"{usage:.1%}",
            " + ".join(f"{value:.0f}" for value in memory.values()),
        ]
        print(_row(cells), flush=True)
    return found
