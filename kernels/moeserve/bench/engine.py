"""`moeserve bench engine`: an engine in this process under closed loads, without HTTP.

Receives argv: options of this command, and MODEL with the server's options for everything else.
Prints the time of each load, the experts that steps touch and, with `--profile`, where a decode
step goes (`engine_profile.py`); returns 0. What HTTP adds is `moeserve bench serve`.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from moeserve.args import parse
from moeserve.bench.engine_load import LOADS, Figures, Load, make_prompts, read_load, run_load
from moeserve.bench.engine_profile import (
    PROFILES,
    TOUCHED,
    Batch,
    Profile,
    Touched,
    experts_touched,
    fits,
    profile_step,
)
from moeserve.bench.timing import check_parent
from moeserve.command_parser import CommandParser
from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.errors import UsageError

# The first load would pay for what is met for the first time, so one like it runs before.
WARM_UP = Load("warm-up", 128, 2, 24, tag="w")
_MAX_LINES = 22


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: Words that cannot be meant, or a request that the engine did not answer.
    """
    args, server_argv = _parser().parse_known_args(list(argv))
    loads = _loads(args.loads)
    check_parent("bench engine: --json", args.json)
    config = _config(server_argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    body = _describe(config)
    began = time.perf_counter()
    engine = Engine(config)
    ready_s = time.perf_counter() - began
    print(f"engine ready after {ready_s:.1f} s; at most {engine.limits.max_num_seqs} sequences")
    figures = _run_loads(engine, loads)
    touched = [experts_touched(engine, batch) for batch in TOUCHED if fits(engine, batch)]
    _print_touched(touched)
    profiles = _run_profiles(engine) if args.profile else []
    if args.json:
        body |= {
            "ready_s": ready_s,
            "max_num_seqs": engine.limits.max_num_seqs,
            "loads": [asdict(one) for one in figures],
            "experts": [asdict(one) for one in touched],
            "profiles": [asdict(one) for one in profiles],
        }
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "bench engine", usage="moeserve bench engine MODEL [server options] [options]"
    )
    add = parser.add_argument
    add(
        "--loads", default=",".join(LOADS), help=f"of {', '.join(LOADS)}, or REQUESTSxINxOUT[@OPEN]"
    )
    add("--profile", action="store_true", help="where a decode step's time goes")
    add("--json", type=Path, help="write all numbers here")
    return parser


def _loads(text: str) -> list[Load]:
    loads = [read_load(word) for word in text.split(",") if word]
    if not loads:
        raise UsageError("bench engine: --loads: name at least one")
    for at, load in enumerate(loads):
        if load.keeps_cache and (not at or loads[at - 1].tag != load.tag):
            raise UsageError(f"bench engine: --loads: {load.name} comes right after its prompts")
    return loads


def _config(server_argv: list[str]) -> EngineConfig:
    if not server_argv or server_argv[0].startswith("-"):
        raise UsageError("bench engine: MODEL comes first, then the server's options")
    config = parse(server_argv).engine
    if config.num_ranks > 1:
        raise UsageError(
            f"bench engine: {config.num_ranks} ranks; one runs in this process, "
            "`moeserve bench serve` measures a server of several"
        )
    return config


def _describe(config: EngineConfig) -> dict[str, object]:
    """The machine, and its ceilings where it has a GPU; printed too."""
    body: dict[str, object] = {
        "device": "cpu",
        "torch": torch.__version__,
        "model": config.model,
        "is_deterministic": config.is_deterministic,
    }
    if config.device != "cpu" and torch.cuda.is_available():
        from moeserve.bench.timing import ceilings

        rates = ceilings()
        torch.cuda.empty_cache()
        body |= {"device": torch.cuda.get_device_name(), "ceilings": rates}
        print(
            f"{body['device']}, torch {torch.__version__}: copy {rates['copy_tb_s']:.2f} TB/s, "
            f"read {rates['read_tb_s']:.2f} TB/s, matmul {rates['matmul_tflop_s']:.0f} TFLOP/s"
        )
    return body


def _run_loads(engine: Engine, loads: Sequence[Load]) -> list[Figures]:
    vocab_size = engine.runner.spec.vocab_size
    limit = engine.limits.max_model_len
    prompts = {load.name: make_prompts(load, vocab_size) for load in loads}
    for load in loads:
        longest = max(len(prompt) for prompt in prompts[load.name]) + load.output_len
        if longest > limit:
            raise UsageError(f"bench engine: {load.name}: {longest} tokens; the limit is {limit}")
    print(
        f"{'load':>20} {'seconds':>8} {'out tok/s':>10} {'total':>10} {'TPOT ms':>8} {'TTFT ms':>9}"
    )
    figures = []
    for load in loads:
        if not load.keeps_cache:
            warm = WARM_UP.of(min(WARM_UP.num_requests, load.num_requests))
            run_load(engine, warm, make_prompts(warm, vocab_size))
            engine.pool.drop_cache()
        one = run_load(engine, load, prompts[load.name])
        print(
            f"{one.name:>20} {one.seconds:8.2f} {one.output_tok_s:10.1f} {one.total_tok_s:10.1f} "
            f"{one.tpot_ms:8.3f} {one.ttft_ms:9.1f}"
        )
        figures.append(one)
    return figures


def _print_touched(touched: Sequence[Touched]) -> None:
    if touched:
        print("experts touched in a layer of a decode step: mean (least to most)")
    for one in touched:
        print(f"  {one.batch.label:>22}: {one.mean:.1f} ({one.least} to {one.most})")


def _run_profiles(engine: Engine) -> list[Profile]:
    profiles = []
    for batch in PROFILES:
        if not fits(engine, batch):
            print(f"{batch.label}: left out, more than this engine's limits")
            continue
        one = profile_step(engine, batch)
        _print_profile(batch, one)
        profiles.append(one)
    return profiles


def _print_profile(batch: Batch, found: Profile) -> None:
    print(
        f"{batch.label}: step {found.step_ms:.2f} ms, the host waits {found.wait_ms:.2f} ms of it, "
        f"kernels {found.kernels_ms:.2f} ms"
    )
    for line in found.kernels[:_MAX_LINES]:
        each = line.us / line.calls
        print(f"  {line.us:9.1f} us {line.calls:7.1f} x {each:8.2f}  {line.name[:70]}")
