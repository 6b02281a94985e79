"""The selector of the unquantized MoE layer: which backend, in which layout, built how.

Receives a `MoESpec`, a name or "auto", and the environment; returns a `Plan`. The order of
preference is `policy.py`; what a backend can do it says itself. Numerical truth is not here but in
`reference.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from moeserve.errors import Unsupported, UsageError
from moeserve.moe.backends.base import Backend
from moeserve.moe.backends.registry import Registry, registry
from moeserve.moe.dispatch import MoEKernel
from moeserve.moe.platforms import check_platform
from moeserve.moe.policy import ANY, rule_for
from moeserve.moe.spec import MoESpec, MoEWeights, Plan, Rejection, Support
from moeserve.parallel import Parallel

logger = logging.getLogger(__name__)
AUTO = "auto"


def select_unquantized_moe_backend(
    spec: MoESpec,
    requested: str | None = AUTO,
    platform: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Plan:
    """Chooses the backends of a layer; an explicit request is honoured or raises.

    Args:
        spec: The layer.
        requested: A backend's name, or "auto" (None means the same).
        platform: Overrides `spec.platform`.
        env: The field's environment switches; they count only under "auto".

    Returns:
        The plan, with every refusal and its reason.

    Raises:
        UsageError: A name, platform or switch that is unknown.
        Unsupported: The request cannot be served, or nothing can serve the layer.
    """
    name = canonical_name(requested)
    spec = replace(spec, platform=check_platform(platform or spec.platform))
    backends = registry()
    plan = _explicit(spec, name, backends) if name != AUTO else _automatic(spec, backends)
    _log_once(plan, backends)
    return plan


def canonical_name(requested: str | None) -> str:
    """The name in this tree's spelling: "FlashInfer CUTLASS" is "flashinfer_cutlass".

    Raises:
        UsageError: No backend has that name.
    """
    if requested is None:
        return AUTO
    name = requested.strip().lower().replace(" ", "_").replace("-", "_")
    known = registry().names
    if name == AUTO or name in known:
        return name
    close = get_close_matches(name, (AUTO, *known), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(
        f"moe_backend={requested!r} is not supported for unquantized MoE. "
        f"Expected one of {[AUTO, *known]}.{hint}"
    )


def ask(spec: MoESpec, name: str, backends: Registry) -> Support:
    """A backend's answer, or the reason why it could not even be loaded."""
    if name in backends.broken:
        return Support(False, backends.broken[name])
    return backends.get(name).supports(spec)


def _explicit(spec: MoESpec, name: str, backends: Registry) -> Plan:
    answer = ask(spec, name, backends)
    if not answer.ok:
        raise Unsupported(
            f"Unquantized MoE backend {name} does not support the deployment configuration "
            f"since {answer.reason}."
        )
    return Plan(
        ranges=((spec.max_num_tokens, name),),
        layout=backends.get(name).layout,
        reason=f"{name} was asked for by name",
        requested=name,
        considered=(name,),
    )


def _automatic(spec: MoESpec, backends: Registry) -> Plan:
    rule = rule_for(spec)
    considered: list[str] = []
    rejected: dict[str, Rejection] = {}
    chosen: list[tuple[int, str]] = []
    layout = None
    for largest, names in reversed(rule.ranges):
        for name in names:
            if name not in considered:
                considered.append(name)
                answer = ask(spec, name, backends)
                if not answer.ok:
                    rejected[name] = Rejection(name, answer.reason)
            if name in rejected or layout not in (None, backends.get(name).layout):
                continue
            layout = backends.get(name).layout
            chosen.insert(0, (largest or spec.max_num_tokens, name))
            break
    if layout is None:
        raise Unsupported(
            "No Unquantized MoE backend supports the deployment configuration. "
            + _reasons(spec, tuple(rejected.values()))
        )
    return Plan(
        ranges=_merged(chosen),
        layout=layout,
        reason=f"first supported on {spec.platform} ({rule.condition})",
        considered=tuple(considered),
        rejected=tuple(rejected.values()),
    )


def _merged(chosen: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Neighbouring ranges of one backend become one."""
    merged: list[tuple[int, str]] = []
    for largest, name in chosen:
        if merged and merged[-1][1] == name:
            merged.pop()
        merged.append((largest, name))
    return tuple(merged)


def _reasons(spec: MoESpec, rejected: tuple[Rejection, ...]) -> str:
    if not rejected:
        return (
            f"Platform {spec.platform} has no backend in this build: install one that registers "
            "under moeserve.moe_backends, and ask for it by name."
        )
    return " ".join(f"{r.backend}: {r.reason}." for r in rejected)


_logged: set[Plan] = set()


def _log_once(plan: Plan, backends: Registry) -> None:
    """Says the choice and every refusal, once for all layers that share the plan."""
    if plan in _logged:
        return
    _logged.add(plan)
    title = backends.get(plan.primary).traits.title
    logger.info(
        "Using %s Unquantized MoE backend out of potential backends: %s.",
        title,
        list(plan.considered),
    )
    logger.info("MoE plan %s: %s", plan.ranges, plan.reason)
    for rejection in plan.rejected:
        logger.info("MoE backend %s not used: %s", rejection.backend, rejection.reason)


def convert_to_unquantized_kernel_format(plan: Plan | Backend, weights: MoEWeights) -> MoEWeights:
    """Weights from the checkpoint layout into the plan's; in place, once, exact.

    Args:
        plan: The plan, or one backend.
        weights: In the checkpoint layout, or converted already (then nothing is done).

    Returns:
        The same memory, perhaps under another shape, with `layout` set.
    """
    backend = registry().get(plan.primary) if isinstance(plan, Plan) else plan
    return backend.prepare(weights)


def make_unquantized_moe_kernel(
    spec: MoESpec, plan: Plan, parallel: Parallel | None = None
) -> MoEKernel:
    """The layer's kernel: prepare and finalise around the experts of the plan.

    Args:
        spec: The layer, with the platform that the plan was made for.
        plan: The oracle's answer.
        parallel: The ranks; None is a single one.
    """
    experts = {name: registry().get(name) for _, name in plan.ranges}
    return MoEKernel(spec, plan, experts, parallel or Parallel())
