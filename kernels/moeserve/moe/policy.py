"""The order of preference, as one table; the oracle walks it, a golden test holds it.

Priorities are relations between backends, so no backend carries a number of its own. Upstream's
order is kept among upstream's members: on Hopper Triton comes first (vllm#44220), on Blackwell
FlashInfer TRTLLM, then CUTLASS, then Triton; on ROCm AITER, then Triton. Data parallelism moves
nothing to the back (upstream: vllm#36838): what made that necessary, duplicate ids of NaN rows,
ends in the router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.moe.spec import MoESpec

# One past every T that a layer is asked for; stands for `spec.max_num_tokens`.
ANY = 0


@dataclass(frozen=True)
class Rule:
    """One row of the table; the first row whose platform and condition fit is taken.

    Attributes:
        platform: One of `spec.PLATFORMS`.
        condition: In words, for tables and logs.
        ranges: (largest T, names in order of preference), ascending in T; the last one's largest
            T is `ANY`. The last range chooses first, and the others only among backends with the
            layout of its choice.
        applies: The condition as a predicate.
    """

    platform: str
    condition: str
    ranges: tuple[tuple[int, tuple[str, ...]], ...]
    applies: Callable[[MoESpec], bool] = lambda spec: True


_HOPPER = ("triton", "torch_grouped_mm", "flashinfer_trtllm", "flashinfer_cutlass", "sonicmoe")
_BLACKWELL = ("flashinfer_trtllm", "flashinfer_cutlass", "triton", "torch_grouped_mm")

TABLE: tuple[Rule, ...] = (
    Rule(
        "cuda-sm90",
        "any layer",
        ((ANY, _HOPPER),),
    ),
    # CUTLASS hangs on a B200 where I is no multiple of 128, and TRTLLM refuses (vllm#51492).
    Rule(
        "cuda-sm100",
        "I no multiple of 128",
        ((ANY, ("flashinfer_trtllm", "triton", "torch_grouped_mm", "flashinfer_cutlass")),),
        lambda spec: spec.intermediate_size % 128 != 0,
    ),
    Rule("cuda-sm100", "any layer", ((ANY, _BLACKWELL),)),
    Rule("cuda-sm120", "any layer", ((ANY, _BLACKWELL),)),
    Rule("rocm", "any layer", ((ANY, ("aiter", "triton")),)),
    Rule("xpu", "any layer", ((ANY, ("triton",)),)),
    Rule("cpu", "any layer", ((ANY, ("cpu_native", "cpu", "torch_grouped_mm")),)),
    # The two have no experts in this tree: a backend of another package is asked for by name.
    Rule("tpu", "any layer", ((ANY, ()),)),
    Rule("oot", "any layer", ((ANY, ()),)),
)


def rule_for(spec: MoESpec) -> Rule:
    """The row of the table for a layer.

    Raises:
        LookupError: No row; the table has one for every platform, so this is a fault in it.
    """
    for rule in TABLE:
        if rule.platform == spec.platform and rule.applies(spec):
            return rule
    raise LookupError(f"no rule of the policy covers platform {spec.platform!r}")
