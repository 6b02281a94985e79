"""Which MoE backend a profiler saw: kernel names, matched to the plan, counted against layers.

Receives the bodies of `/v1/evidence` (counts of one prefill and one decode step, per rank) and
`/v1/backends` (the plan); returns the backend's name. The names below are this side's own list,
so that the server is not asked to vouch for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Backend -> kernels that only its expert GEMMs launch. The first that matches is it; `cpu` has
# plain matrix products, which others launch as well, and is told by what is not there.
_KERNELS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("flashinfer_trtllm", r"bmm_\w*Bfloat16\w*sm100"),
        # On Hopper its grouped GEMM is CUTLASS's own, as torch's is; the rows it spreads are not.
        (
            "flashinfer_cutlass",
            r"MoeFCGemm|cutlass.*GroupGemm.*Moe|moeGemm|fused_moe.*cutlass"
            r"|cutlass_kernels::expandInputRowsKernel",
        ),
        ("aiter", r"aiter.*fmoe|ck_moe_stage[12]|kernel_moe_gemm"),
        ("sonicmoe", r"sonicmoe|quack"),
        ("triton", r"moe_(?:gate_up|down)(?:_gemv)?_kernel|fused_moe_kernel"),
        ("cpu_native", r"moeserve::cpu_native_experts"),
        ("torch_grouped_mm", r"aten::_grouped_mm|2at4cuda.*GroupProblemShape"),
    )
)
_PRODUCTS = ("aten::mm", "aten::mv")
_PHASES = ("prefill", "decode")


def backend_of(counts: Mapping[str, int], num_layers: int) -> str:
    """Backend of one step on one rank, "" if none is seen in every layer."""
    for name, pattern in _KERNELS:
        if sum(n for kernel, n in counts.items() if pattern.search(kernel)) >= num_layers:
            return name
    # Every dense layer is one `linear` and one product; experts come on top, two GEMMs each.
    products = sum(counts.get(kernel, 0) for kernel in _PRODUCTS)
    return "cpu" if products - counts.get("aten::linear", 0) >= 2 * num_layers else ""


def executed_backend(evidence: Any, plan: Any) -> tuple[str, dict[str, object]]:
    """The backend that ran.

    Args:
        evidence: Body of `/v1/evidence`.
        plan: `moe` of `/v1/backends`: `backend`, and `ranges` of {max_tokens, backend}.

    Returns:
        The plan's name where every rank and phase ran what the plan says; else the names that
        were seen, joined by "+"; "" where nothing is recognised. And what was seen, per rank.
    """
    try:
        num_layers = int(evidence["num_moe_layers"])
        ranks = list(evidence["ranks"])
        seen: dict[str, object] = {}
        names: list[str] = []
        is_as_planned = bool(ranks) and num_layers > 0
        for rank in ranks:
            for phase in _PHASES:
                name = backend_of(rank[phase]["counts"], num_layers)
                wanted = _planned(plan, int(rank[phase]["num_tokens"]))
                is_as_planned = is_as_planned and bool(name) and name == wanted
                seen[f"rank {rank['rank']} {phase}"] = name or "not recognised"
                names.append(name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return "", {"unreadable": f"{type(error).__name__}: {error}"}
    if is_as_planned:
        return str(plan["backend"]), seen
    if not all(names):
        return "", seen
    return "+".join(sorted(set(names))), seen


def _planned(plan: Any, num_tokens: int) -> str:
    ranges = plan["ranges"]
    for entry in ranges:
        if num_tokens <= int(entry["max_tokens"]):
            return str(entry["backend"])
    return str(ranges[-1]["backend"])
