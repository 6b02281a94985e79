"""`moeserve bench router`: the router's time, with and without NaN rows, beside what else there is.

Receives token, expert and top-k counts; returns 0. Variants: the fused kernel, the fused kernel
after a separate `nan_to_num` (what sanitising outside costs), and torch's softmax with topk. Times
are p20, p50 and p80 over graph replays of 20 calls each, launch overhead of the host excluded.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from moeserve.bench.timing import check_parent, replay_times_us
from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError
from moeserve.moe.spec import RoutingSpec
from moeserve.triton_kernels.router import route

SIZES = ((1, 128, 8), (128, 128, 8), (1024, 128, 8), (8192, 128, 8), (128, 8, 2), (8192, 16, 1),
         (128, 60, 4), (8192, 60, 4), (128, 256, 8))  # fmt: skip
CALLS = 20


@dataclass(frozen=True)
class Row:
    """One variant at one size; times in microseconds a call."""

    tokens: int
    experts: int
    top_k: int
    scoring: str
    nan_share: float
    variant: str
    p20: float
    p50: float
    p80: float


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: Words that cannot be meant, or no CUDA GPU here.
    """
    parser = CommandParser("bench router")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="every count with every other; default 128")
    add("--experts", type=int, nargs="+", help="default 128")
    add("--top-k", type=int, nargs="+", help="default 8; with none of the three, a fixed list")
    add("--nan-share", type=float, nargs="+", default=[0.0, 0.1], help="of rows; default 0 and 0.1")
    add("--scoring", nargs="+", choices=("softmax", "sigmoid"), default=["softmax", "sigmoid"])
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--json", type=Path, help="write all numbers here")
    args = parser.parse_args(list(argv))
    if any(not 0.0 <= share <= 1.0 for share in args.nan_share):
        raise UsageError(f"bench router: --nan-share {args.nan_share}: shares are 0 to 1")
    sizes = sizes_of(args.tokens, args.experts, args.top_k)
    check_parent("bench router: --json", args.json)
    if not torch.cuda.is_available():
        raise UsageError("bench router: this needs a CUDA GPU; torch sees none here")
    print(f"{torch.cuda.get_device_name()}, {args.dtype}, microseconds a call")
    print(f"{'T':>6} {'E':>4} {'K':>2} {'scoring':>8} {'NaN':>5} {'variant':>22} "
          f"{'p20':>7} {'p50':>7} {'p80':>7}")  # fmt: skip
    rows = []
    for T, E, K in sizes:
        for scoring in args.scoring:
            for share in args.nan_share:
                rows += _bench_one((T, E, K), scoring, share, getattr(torch, args.dtype))
    if args.json:
        body = {"device": torch.cuda.get_device_name(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    return 0


def sizes_of(
    tokens: Sequence[int] | None, experts: Sequence[int] | None, top_k: Sequence[int] | None
) -> list[tuple[int, int, int]]:
    """(T, E, K) of every table row: the product of what was given, or the fixed list.

    Raises:
        UsageError: A size that no router has.
    """
    if not tokens and not experts and not top_k:
        return list(SIZES)
    sizes = list(product(tokens or [128], experts or [128], top_k or [8]))
    for T, E, K in sizes:
        if T < 1 or not 1 <= K <= E:
            raise UsageError(
                f"bench router: tokens {T}, experts {E}, top-k {K}: want T >= 1 and 1 <= K <= E"
            )
    return sizes


def _bench_one(
    size: tuple[int, int, int], scoring: str, share: float, dtype: torch.dtype
) -> list[Row]:
    T, E, K = size
    routing = RoutingSpec(K, scoring)  # type: ignore[arg-type]  # argparse checked the choice
    logits = [torch.randn(T, E, device="cuda", dtype=dtype) for _ in range(CALLS)]
    for one in logits:
        one[torch.rand(T, device="cuda") < share] = float("nan")
    out = (torch.empty(T, K, device="cuda"), torch.empty(T, K, device="cuda", dtype=torch.int32))
    squash = torch.softmax if scoring == "softmax" else lambda x, _: torch.sigmoid(x)

    def separate(one: torch.Tensor) -> object:
        return route(torch.nan_to_num(one, nan=float("-inf")), routing, out=out)

    def in_torch(one: torch.Tensor) -> object:
        return torch.topk(squash(one.float(), -1), K, dim=-1)

    variants: dict[str, Callable[[torch.Tensor], object]] = {
        "fused": lambda one: route(one, routing, out=out),
        "nan_to_num, then fused": separate,
        "torch": in_torch,
    }
    rows = []
    for name, run in variants.items():
        calls = [lambda one=one, run=run: run(one) for one in logits]
        times = sorted(us / CALLS for us in replay_times_us(calls, 50))
        p20, p50, p80 = times[len(times) // 5], statistics.median(times), times[len(times) * 4 // 5]
        print(f"{T:6d} {E:4d} {K:2d} {scoring:>8} {share:5.2f} {name:>22} "
              f"{p20:7.2f} {p50:7.2f} {p80:7.2f}")  # fmt: skip
        rows.append(Row(T, E, K, scoring, share, name, p20, p50, p80))
    return rows
