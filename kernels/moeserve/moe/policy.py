"""The order of preference, as one table; the oracle walks it, a golden test holds it.

Priorities are relations between backends, so no backend carries a number of its own. Upstream's
order is kept among upstream's members: on Hopper Triton comes first (vllm#44220), on Blackwell
FlashInfer TRTLLM, then CUTLASS, then Triton. Data parallelism moves nothing to the back
(upstream: vllm#36838): what made that necessary, duplicate ids of NaN rows, ends in the router.
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
            T is `ANY`. Below the last range only backends with the layout of the last range's
            choice are taken.
        applies: The condition as a predicate.
    """

    platform: str
    condition: str
    ranges: tuple[tuple[int, tuple[str, ...]], ...]
    applies: Callable[[MoESpec], bool] = lambda spec: True


TABLE: tuple[Rule, ...] = (
    Rule("cpu", "any layer", ((ANY, ("cpu",)),)),
    # The two have no experts in this tree: a backend of another package is named explicitly.
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
