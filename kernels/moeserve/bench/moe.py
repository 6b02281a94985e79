"""`moeserve bench moe`: every backend's layer time, error and share of the floor, on this GPU.

Receives shapes and token counts; returns 0. Weights and tokens are random and fresh, routing is
uniform or skewed, times are medians over graph replays that rotate inputs beyond the L2. The floor
is the larger of bytes over the read rate and operations over the matmul rate, both measured in the
same run. Every row begins with the card rested, so that none pays for the one before it. `--tune`
measures tile sizes instead (`tune.py`) and writes the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moeserve.bench.timing import ceilings, check_parent, graph_time_us
from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError
from moeserve.moe.backends.base import Routed
from moeserve.moe.backends.registry import registry
from moeserve.moe.oracle import ask, convert_to_unquantized_kernel_format
from moeserve.moe.platforms import detect_platform
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.moe.tuning import LayerShape, save_table, table_path

# E, H, I, K of the models' published configs.
SHAPES = {
    "qwen3-30b-a3b": LayerShape(128, 2048, 768, 8),
    "mixtral-8x7b": LayerShape(8, 4096, 14336, 2),
    "llama-4-scout": LayerShape(16, 5120, 8192, 1),
    "qwen3.5-35b-a3b": LayerShape(256, 2048, 512, 8),
}
TOKENS = (1, 8, 64, 128, 512, 2048, 8192, 16384)
L2_BYTES = 60e6
# A second of many tokens brings an H200 to its power limit, from 1,980 down to 1,300 MHz, and what
# is measured next takes up to a tenth longer; a quarter of a second later it does not.
REST_S = 0.25


@dataclass(frozen=True)
class Row:
    """One backend at one size.

    Attributes:
        shape: Name of the layer.
        routing: "uniform" or "skewed".
        tokens: T.
        backend: Its name.
        us: Median microseconds a layer; None where it refused or failed.
        error: ‖out - ref‖ / ‖ref‖ against float32.
        floor_us: Least time by bytes and operations.
        experts: Experts touched, the mean over the input sets.
        note: Why there is no time.
    """

    shape: str
    routing: str
    tokens: int
    backend: str
    us: float | None
    error: float | None
    floor_us: float
    experts: float
    note: str = ""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: Words that cannot be meant, or no CUDA GPU here.
    """
    args = _parse(argv)
    if not torch.cuda.is_available():
        raise UsageError("bench moe: this needs a CUDA GPU; torch sees none here")
    shapes = [args.shape] if args.shape else list(SHAPES)[:3]
    if args.tune:
        for name in shapes:
            _tune(SHAPES[name], args.tokens, args.out)
        return 0
    rates = ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {rates['copy_tb_s']:.2f} TB/s, "
        f"read {rates['read_tb_s']:.2f} TB/s, matmul {rates['matmul_tflop_s']:.0f} TFLOP/s"
    )
    rows: list[Row] = []
    for name in shapes:
        for routing in args.routing:
            rows += _bench_shape(name, routing, args.tokens or TOKENS, args.moe_backend, rates)
            if args.json:  # after each table, so that a run cut short keeps what it measured
                body = {"device": torch.cuda.get_device_name(), "ceilings": rates,
                        "rows": [asdict(row) for row in rows]}  # fmt: skip
                args.json.write_text(json.dumps(body, indent=1) + "\n")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("bench moe")
    parser.add_argument("--shape", choices=SHAPES, help="only this layer")
    parser.add_argument("--tokens", type=int, nargs="+", help="token counts")
    parser.add_argument("--moe-backend", help="only this backend")
    parser.add_argument("--routing", nargs="+", choices=("uniform", "skewed"),
                        help="default: uniform")  # fmt: skip
    parser.add_argument("--tune", action="store_true", help="measure tiles and write the table")
    parser.add_argument("--out", type=Path, help="folder for --tune (default: the package's)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    args = parser.parse_args(list(argv))
    if args.moe_backend and args.moe_backend not in registry().names:
        raise UsageError(f"bench moe: {registry().unknown(args.moe_backend)}")
    if args.tokens and min(args.tokens) < 1:
        raise UsageError(f"bench moe: --tokens {min(args.tokens)}: at least 1")
    # An option that changes nothing is refused: --tune measures tiles of Triton, uniform routing.
    for name in ("moe_backend", "routing", "json") if args.tune else ("out",):
        if getattr(args, name) is not None:
            word = "with" if args.tune else "without"
            raise UsageError(f"bench moe: --{name.replace('_', '-')} does nothing {word} --tune")
    args.routing = args.routing or ["uniform"]
    check_parent("bench moe: --json", args.json)
    return args


def _tune(shape: LayerShape, tokens: list[int] | None, out: Path | None) -> None:
    from moeserve.bench.tune import TOKENS as TUNED_TOKENS
    from moeserve.bench.tune import tune

    device = torch.cuda.get_device_name()
    path = table_path(device, shape)
    path = out / path.name if out else path
    meta: dict[str, object] = {
        "device": device, "torch": torch.__version__, "command": "moeserve bench moe --tune",
    }  # fmt: skip
    tune(
        shape,
        tuple(tokens or TUNED_TOKENS),
        keep=lambda entries: save_table(path, entries, meta),
    )
    print(f"wrote {path}")


def _bench_shape(
    name: str, routing: str, tokens: Sequence[int], only: str | None, rates: dict[str, float]
) -> list[Row]:
    shape = SHAPES[name]
    spec = MoESpec(
        shape.E, shape.H, shape.I, RoutingSpec(shape.K), platform=detect_platform(),
        max_num_tokens=max(tokens), needs_graph=True,
    )  # fmt: skip
    print(f"\n{name} E={shape.E} H={shape.H} I={shape.I} K={shape.K}, {routing} routing")
    print(f"{'T':>6} {'experts':>7} {'floor us':>9} {'backend':>20} {'us':>9} {'share':>6} error")
    rows = []
    for backend in [only] if only else list(registry().names):
        answer = ask(spec, backend, registry())
        if not answer.ok:
            print(f"{backend}: {answer.reason}")
            continue
        weights = _random_weights(shape)
        raw = MoEWeights(weights.w13.clone(), weights.w2.clone())
        converted = convert_to_unquantized_kernel_format(registry().get(backend), raw)
        for T in tokens:
            time.sleep(REST_S)
            rows.append(_bench_one(name, routing, spec, backend, (weights, converted), T, rates))
        del raw, converted, weights
        torch.cuda.empty_cache()
    return rows


def _random_weights(shape: LayerShape) -> MoEWeights:
    like = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    w13 = torch.empty(shape.E, 2 * shape.I, shape.H, **like)  # type: ignore[call-overload]
    w2 = torch.empty(shape.E, shape.H, shape.I, **like)  # type: ignore[call-overload]
    return MoEWeights(w13.normal_(std=shape.H**-0.5), w2.normal_(std=shape.I**-0.5))


def random_routed(shape: LayerShape, T: int, routing: str) -> Routed:
    """Uniform routing, or one where the first eighth of the experts draw most of the tokens."""
    logits = torch.randn(T, shape.E, device="cuda")
    if routing == "skewed":
        logits[:, : max(1, shape.E // 8)] += 2.0
    top = torch.topk(torch.softmax(logits, -1), shape.K, dim=-1)
    return Routed(top.indices.int(), top.values / top.values.sum(-1, keepdim=True))


def floor_us(shape: LayerShape, T: int, experts: float, rates: dict[str, float]) -> float:
    """The larger of bytes over the read rate and operations over the matmul rate."""
    num_bytes = experts * 3 * shape.H * shape.I * 2 + 2 * T * shape.H * 2
    operations = 6 * T * shape.K * shape.H * shape.I
    return max(num_bytes / rates["read_tb_s"], operations / rates["matmul_tflop_s"]) / 1e6


def _bench_one(
    name: str,
    routing: str,
    spec: MoESpec,
    backend_name: str,
    weights: tuple[MoEWeights, MoEWeights],
    T: int,
    rates: dict[str, float],
) -> Row:
    shape = SHAPES[name]
    plain, converted = weights
    touched_bytes = min(T * shape.K, shape.E) * 3 * shape.H * shape.I * 2
    sets = max(2, min(24, int(4 * L2_BYTES // touched_bytes) + 1))
    torch.manual_seed(T)  # every backend gets the same tokens and the same experts
    routed = [random_routed(shape, T, routing) for _ in range(sets)]
    x = [torch.randn(T, shape.H, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    experts = sum(torch.unique(r.topk_ids).numel() for r in routed) / sets
    floor = floor_us(shape, T, experts, rates)
    backend = registry().get(backend_name)
    size = backend.workspace_bytes(spec, T)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    calls = [
        lambda i=i: backend.apply(spec, x[i], routed[i], converted, workspace) for i in range(sets)
    ]
    try:
        us = graph_time_us(calls)
        error = relative_error(backend.apply(spec, x[0], routed[0], converted, workspace),
                               x[0], routed[0], plain)  # fmt: skip
    except (RuntimeError, NotImplementedError) as failure:  # one backend's fault ends one row
        note = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
        print(f"{T:6d} {experts:7.1f} {floor:9.1f} {backend_name:>20} {note}")
        return Row(name, routing, T, backend_name, None, None, floor, experts, note)
    print(
        f"{T:6d} {experts:7.1f} {floor:9.1f} {backend_name:>20} {us:9.1f} {floor / us:6.0%} "
        f"{error:.5f}"
    )
    return Row(name, routing, T, backend_name, us, error, floor, experts)


def relative_error(
    out: torch.Tensor, x: torch.Tensor, routed: Routed, weights: MoEWeights
) -> float:
    """‖out - ref‖ / ‖ref‖ over all tokens, the reference in float32.

    Args:
        out: [T, H].
        x: [T, H].
        routed: All experts local; -1 is nobody's slot.
        weights: In the checkpoint's layout, silu.
    """
    tokens, ids = x.float(), routed.topk_ids
    ref = torch.zeros_like(tokens)
    I = weights.w2.shape[2]
    for expert in torch.unique(ids[ids >= 0]).tolist():
        t, k = (ids == expert).nonzero(as_tuple=True)
        h = tokens[t] @ weights.w13[expert].float().T
        a = torch.nn.functional.silu(h[:, :I]) * h[:, I:]
        y = a @ weights.w2[expert].float().T
        ref.index_add_(0, t, y * routed.topk_weights[t, k][:, None])
    return float((out.float() - ref).norm() / ref.norm())
