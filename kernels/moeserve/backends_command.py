"""The command `moeserve backends MODEL`: which MoE backend would serve, and why not the others.

Receives argv and the environment; prints a table or JSON without loading the model. Returns 0 where
there is a plan, 1 where the named backend cannot serve or nothing can, 2 for what cannot be meant.
The table itself is `moe/report.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence

import torch

from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError
from moeserve.models.config import ModelSpec, load_model_spec
from moeserve.moe.platforms import check_platform, detect_platform
from moeserve.moe.report import backend_report, render, support_table
from moeserve.moe.spec import PLATFORMS, MoESpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Args:
        argv: Words after `backends`.
        env: Switches of the field; None reads the process's environment.

    Raises:
        UsageError: A word, model, platform or switch that cannot be meant.
    """
    args = _parser().parse_args(list(argv))
    if args.support_table:
        print(support_table(), end="")
        return 0
    if args.model is None:
        raise UsageError("backends: MODEL is missing (a folder with a config.json, or a preset)")
    platform = check_platform(args.platform) if args.platform else detect_platform()
    model = load_model_spec(args.model)
    if not model.num_moe_layers:
        raise UsageError(f"{args.model}: a dense model; it has no MoE layer to choose for")
    spec = _moe_spec(model, args)
    environment = os.environ if env is None else env
    report = backend_report(spec, args.moe_backend, platform, environment)
    print(json.dumps(report.to_json(), indent=2) if args.json else render(report))
    return 0 if report.plan is not None else 1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "backends", description="Say which MoE backend would serve a model, and why not the others."
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder with a config.json, or a preset")
    add("--platform", help=f"one of {', '.join(PLATFORMS)}; default: this machine")
    add("--moe-backend", default="auto", help="a backend's name, or auto")
    add("--dtype", choices=sorted(DTYPES), help="default: the checkpoint's")
    add("-tp", "--tensor-parallel-size", type=int, default=1)
    add("-dp", "--data-parallel-size", type=int, default=1)
    add("--enable-expert-parallel", action="store_true")
    add("--deterministic", action="store_true", help="refuse what depends on the batch")
    add("--cuda-graphs", action="store_true", help="refuse what cannot be captured")
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--json", action="store_true")
    add("--support-table", action="store_true", help="the README's table; needs no model")
    return parser


def _moe_spec(model: ModelSpec, args: argparse.Namespace) -> MoESpec:
    tp, dp = args.tensor_parallel_size, args.data_parallel_size
    if tp < 1 or dp < 1:
        raise UsageError(f"backends: parallel sizes are at least 1, got tp={tp} dp={dp}")
    if args.max_num_batched_tokens < 1:
        raise UsageError(
            f"backends: --max-num-batched-tokens {args.max_num_batched_tokens}: at least 1"
        )
    moe_tp = 1 if args.enable_expert_parallel else tp
    if model.moe_intermediate_size % moe_tp:
        raise UsageError(
            f"--tensor-parallel-size={tp} does not divide the experts' width "
            f"{model.moe_intermediate_size}"
        )
    return MoESpec(
        num_experts=model.num_experts,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size // moe_tp,
        routing=model.routing,
        dtype=DTYPES[args.dtype or model.dtype],
        ep_size=dp * tp if args.enable_expert_parallel else 1,
        tp_size=moe_tp,
        dp_size=dp,
        is_deterministic=args.deterministic,
        needs_graph=args.cuda_graphs,
        max_num_tokens=args.max_num_batched_tokens,
        shared_intermediate_size=model.shared_expert_size // tp,
    )
