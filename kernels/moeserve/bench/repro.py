"""The command `moeserve repro duplicate-experts`: the routing that crashed a kernel, everywhere.

Three inputs, each through every backend that can run here, each backend in a process of its own
because the fault was an illegal memory access: all tokens with the same first expert, 10 % of the
rows all NaN, and ids that name one expert K times (which the router never makes; it is given to the
experts directly). Prints a table or JSON; returns 0 where every run gave the right numbers, 1 where
one did not or the one backend asked for ran nothing. FP8 is asked for as well, and refused with the
backend's reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError
from moeserve.moe.backends.base import Routed, Unrouted
from moeserve.moe.backends.registry import registry
from moeserve.moe.oracle import ask, convert_to_unquantized_kernel_format
from moeserve.moe.platforms import detect_platform
from moeserve.moe.reference import reference_experts
from moeserve.moe.routing import TopK, route
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec

CASES = ("one_expert", "nan_rows", "duplicate_ids")
SCENARIOS = ("duplicate-experts",)
# Share of rows that are NaN, as in the router's benchmark of vllm#39593.
NAN_SHARE = 0.1
CHILD_LIMIT_S = 600
# ‖out - ref‖ / ‖ref‖; the bound of BF16 in the project's kernel tests.
MAX_RELATIVE_ERROR = 0.01


@dataclass(frozen=True)
class ReproRow:
    """Outcome of one backend on one input.

    Attributes:
        backend: Its name.
        dtype: "bfloat16" or "float8_e4m3fn".
        case: One of `CASES`; "" where the backend refused before any.
        outcome: "ok", "wrong", "crashed", "untried" (after a crash) or "refused".
        detail: Error, exit status or reason.
    """

    backend: str
    dtype: str
    case: str
    outcome: str
    detail: str


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 where a backend crashed, was wrong, or refused its name.

    Raises:
        UsageError: Words that cannot be meant.
    """
    parser = CommandParser("repro")
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--moe-backend", help="only this one")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(list(argv))
    if args.tokens < 1:
        raise UsageError(f"repro: --tokens {args.tokens}: at least 1")
    if args.child:
        _run_child(args.moe_backend, args.tokens)
        return 0
    names = [args.moe_backend] if args.moe_backend else list(registry().names)
    unknown = [name for name in names if name not in registry().names]
    if unknown:
        raise UsageError(f"repro: {registry().unknown(unknown[0])}")
    rows: list[ReproRow] = []
    for name in names:
        shown = run_backend(name, args.tokens)
        rows += shown
        if not args.json:  # at once: a backend may take minutes to build
            print("\n".join(map(_line, shown)), flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    outcomes = {row.outcome for row in rows}
    # A backend that was asked for by name and ran nothing has shown nothing.
    is_unshown = bool(args.moe_backend) and "ok" not in outcomes
    return 1 if is_unshown or outcomes & {"wrong", "crashed"} else 0


def _line(row: ReproRow) -> str:
    return f"{row.backend:20} {row.dtype:14} {row.case:14} {row.outcome:8} {row.detail}"


def layer_spec(dtype: torch.dtype = torch.bfloat16) -> MoESpec:
    """A small layer whose sizes every backend's limits allow, on this machine."""
    return MoESpec(16, 256, 128, RoutingSpec(4), dtype=dtype, platform=detect_platform())


def run_backend(name: str, num_tokens: int) -> list[ReproRow]:
    """All cases of one backend, in a child process."""
    fp8 = torch.float8_e4m3fn
    refusal = ask(layer_spec(fp8), name, registry()).reason
    rows = [ReproRow(name, "float8_e4m3fn", "", "refused", refusal)]
    answer = ask(layer_spec(), name, registry())
    if not answer.ok:
        return [ReproRow(name, "bfloat16", "", "refused", answer.reason), *rows]
    command = [sys.executable, "-m", "moeserve", "repro", SCENARIOS[0], "--child"]
    command += ["--moe-backend", name, "--tokens", str(num_tokens)]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False
        )
        output, ending = child.stdout, f"exit status {child.returncode}"
        last = child.stderr.strip().splitlines()[-1:] or [""]
        ending = f"{ending} {last[0]}".strip()
    except subprocess.TimeoutExpired:
        output, ending = "", f"no end within {CHILD_LIMIT_S} s"
    done = [ReproRow(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    missing = [c for c in CASES if c not in {row.case for row in done}]
    crashed = [ReproRow(name, "bfloat16", case, "crashed", ending) for case in missing[:1]]
    untried = [ReproRow(name, "bfloat16", case, "untried", ending) for case in missing[1:]]
    return [*done, *crashed, *untried, *rows]


def _run_child(name: str, num_tokens: int) -> None:
    """One line of JSON per case, at once: a crash must not take the earlier ones along."""
    # The reference is a chain of small products: many threads would only wait for each other.
    torch.set_num_threads(1)
    spec = layer_spec()
    device = torch.device("cpu" if spec.platform == "cpu" else "cuda")
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * scale
        return values.to(device=device, dtype=spec.dtype)

    E, H, I = spec.num_experts, spec.hidden_size, spec.intermediate_size
    x = random(num_tokens, H)
    w13, w2 = random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
    backend = registry().get(name)
    weights = convert_to_unquantized_kernel_format(backend, MoEWeights(w13.clone(), w2.clone()))
    for case in CASES:
        logits, topk = routed_case(case, spec, num_tokens, device)
        if backend.traits.takes == "logits":
            if case == "duplicate_ids":
                detail = "takes logits; no ids can be given to it"
                print(json.dumps(asdict(ReproRow(name, "bfloat16", case, "ok", detail))))
                continue
            out = backend.apply_logits(spec, x, Unrouted(logits), weights)
        else:
            scratch = torch.empty(
                backend.workspace_bytes(spec, num_tokens), dtype=torch.uint8, device=device
            )
            out = backend.apply(spec, x, Routed(topk.ids, topk.weights), weights, scratch)
        # Copying waits for the device, so that a wild access ends here and not later.
        reference = reference_experts(
            spec, x.cpu(), topk.weights.cpu(), topk.ids.cpu(), w13.cpu(), w2.cpu()
        )
        row = _judge(name, case, out.cpu(), reference)
        print(json.dumps(asdict(row)), flush=True)


def routed_case(
    case: str, spec: MoESpec, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, TopK]:
    """Logits [T, E] of a case, and the choices that come of them."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_tokens, spec.num_experts, generator=generator)
    logits[:, 0] = 10.0
    if case == "nan_rows":
        logits[: max(1, int(NAN_SHARE * num_tokens))] = torch.nan
    topk = route(logits, spec.routing)
    if case == "duplicate_ids":
        topk = TopK(topk.weights, torch.zeros_like(topk.ids))
    return logits.to(device), TopK(topk.weights.to(device), topk.ids.to(device))


def _judge(name: str, case: str, out: torch.Tensor, reference: torch.Tensor) -> ReproRow:
    error = float((out.double() - reference).norm() / reference.norm())
    is_right = error <= MAX_RELATIVE_ERROR  # False for NaN as well
    detail = f"relative error {error:.2e}"
    return ReproRow(name, "bfloat16", case, "ok" if is_right else "wrong", detail)
