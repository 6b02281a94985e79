"""The selector of the unquantized MoE layer: which backend, in which layout, built how.

Receives a `MoESpec`, a name or "auto", and the environment; returns a `Plan`. The order of
preference is `policy.py`; what a backend can do it says itself. Numerical truth is not here but in
`reference.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches

import torch

from moeserve.errors import Unsupported, UsageError
from moeserve.moe.backends.base import Backend
from moeserve.moe.backends.registry import Registry, registry
from moeserve.moe.dispatch import MoEKernel, Workspace
from moeserve.moe.platforms import check_platform
from moeserve.moe.policy import rule_for
from moeserve.moe.spec import MoESpec, MoEWeights, Plan, Rejection, Support
from moeserve.moe.switches import Switches, read_switches
from moeserve.parallel import Parallel

logger = logging.getLogger(__name__)
AUTO = "auto"
# Names of the field's `--moe-backend` that exist for quantized weights only, or for a form of the
# experts that this tree does not have; refused as known rather than as a typing error.
OTHER_NAMES = {
    "batched_triton": "experts on per-expert batches are not part of this build",
    "deep_gemm": "it computes FP8 experts only",
    "cutlass": "it computes quantized experts only; the BF16 one is 'flashinfer_cutlass'",
    "flashinfer_cutedsl": "it computes NVFP4 experts only",
    "marlin": "it computes quantized experts only",
    "emulation": "it computes quantized experts only",
    "humming": "it computes quantized experts only",
    "xpu": "this build has no experts for XPU",
}


def select_unquantized_moe_backend(
    spec: MoESpec,
    requested: str | None = AUTO,
    platform: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Plan:
    """Chooses the backends of a layer; an explicit request is honoured or raises.

    A name is checked on every platform alike, and so is a switch: none is swallowed because the
    platform has only one choice.

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
    if name != AUTO:
        plan = _explicit(spec, (name,), backends, f"{name} was asked for by name")
    else:
        switches = read_switches(env or {}, spec.platform)
        if switches.note:
            logger.info("%s", switches.note)
        plan = _by_switches(spec, switches, backends)
    _log_once(plan, backends)
    return plan


def canonical_name(requested: str | None) -> str:
    """The name in this tree's spelling: "FlashInfer CUTLASS" is "flashinfer_cutlass".

    Raises:
        UsageError: No backend has that name.
    """
    if requested is None:
        return AUTO
    name = requested.strip().lower().replace(" ", "_").replace("-", "_").removeprefix("rocm_")
    known = registry().names
    if name == AUTO or name in known:
        return name
    if name in OTHER_NAMES:
        hint = f" {name}: {OTHER_NAMES[name]}."
    else:
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
    if name not in backends.names:
        return Support(False, "not part of this build")
    return backends.get(name).supports(spec)


def _explicit(
    spec: MoESpec, names: tuple[str, ...], backends: Registry, why: str, failure: str = ""
) -> Plan:
    """The first of the names that is supported; nothing else is tried."""
    rejected: list[Rejection] = []
    for name in names:
        answer = ask(spec, name, backends)
        if answer.ok:
            return Plan(
                ranges=((spec.max_num_tokens, name),),
                layout=backends.get(name).layout,
                reason=why,
                requested=name,
                considered=names,
                rejected=tuple(rejected),
            )
        rejected.append(Rejection(name, answer.reason))
    if failure:
        raise Unsupported(f"{failure} {_reasons(rejected)}")
    raise Unsupported(
        f"Unquantized MoE backend {names[0]} does not support the deployment configuration "
        f"since {rejected[0].reason} ({why})."
    )


def _by_switches(spec: MoESpec, switches: Switches, backends: Registry) -> Plan:
    if switches.demanded:
        why = f"asked for by {switches.source}"
        return _explicit(spec, switches.demanded, backends, why, switches.failure)
    return _automatic(spec, switches.removed, backends)


def _automatic(spec: MoESpec, removed: Mapping[str, str], backends: Registry) -> Plan:
    """Walks the policy's row; ranges of one plan share a layout."""
    rule = rule_for(spec)
    names = dict.fromkeys(name for _, row in reversed(rule.ranges) for name in row)
    rejected: dict[str, Rejection] = {}
    for name in names:
        answer = (
            Support(False, f"taken out by {removed[name]}")
            if name in removed
            else ask(spec, name, backends)
        )
        if not answer.ok:
            rejected[name] = Rejection(name, answer.reason)
    chosen: list[tuple[int, str]] = []
    layout = ""
    for largest, row in reversed(rule.ranges):
        usable = (name for name in row if name not in rejected)
        if layout:
            usable = (name for name in usable if backends.get(name).layout == layout)
        name = next(usable, "")
        if name:
            layout = backends.get(name).layout
            chosen.insert(0, (largest or spec.max_num_tokens, name))
    if not chosen:
        raise Unsupported(
            "No Unquantized MoE backend supports the deployment configuration. "
            + (_reasons(rejected.values()) or _bring_your_own(spec))
        )
    return Plan(
        ranges=_merged(chosen, spec.max_num_tokens),
        layout=layout,
        reason=f"first supported on {spec.platform} ({rule.condition})",
        considered=tuple(names),
        rejected=tuple(rejected.values()),
    )


def _merged(chosen: list[tuple[int, str]], max_num_tokens: int) -> tuple[tuple[int, str], ...]:
    """Ascending ranges up to `max_num_tokens`; neighbours of one backend become one."""
    merged: list[tuple[int, str]] = []
    for largest, name in chosen:
        if merged and merged[-1][0] >= max_num_tokens:
            break
        if merged and merged[-1][1] == name:
            merged.pop()
        merged.append((min(largest, max_num_tokens), name))
    # Where the last range has no choice of its own, the one before it reaches to the end.
    merged[-1] = (max_num_tokens, merged[-1][1])
    return tuple(merged)


def _reasons(rejected: Iterable[Rejection]) -> str:
    return " ".join(f"{r.backend}: {r.reason}." for r in rejected)


def _bring_your_own(spec: MoESpec) -> str:
    return (
        f"Platform {spec.platform} has no backend in this build: install one that registers "
        "under moeserve.moe_backends, and ask for it by name."
    )


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
    logger.info("MoE plan %s: %s", list(plan.ranges), plan.reason)
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
    spec: MoESpec,
    plan: Plan,
    device: torch.device | str = "cpu",
    *,
    parallel: Parallel | None = None,
    workspace: Workspace | None = None,
) -> MoEKernel:
    """The layer's kernel: prepare and finalise around the experts of the plan.

    Args:
        spec: The layer.
        plan: The oracle's answer.
        device: Where the layer's weights are.
        parallel: The ranks; None is a single one.
        workspace: Scratch that all layers of the device share; None makes one for this layer.

    Raises:
        Unsupported: A backend of the plan cannot work with the transport of these ranks.
        ValueError: Spec and ranks disagree.
    """
    parallel = parallel or Parallel()
    if (spec.ep_size, spec.ep_rank) != (parallel.ep_size, parallel.ep_rank):
        raise ValueError(
            f"the spec says expert rank {spec.ep_rank} of {spec.ep_size}, the grid "
            f"{parallel.ep_rank} of {parallel.ep_size}"
        )
    experts = {name: registry().get(name) for _, name in plan.ranges}
    return MoEKernel(spec, plan, experts, torch.device(device), parallel, workspace or Workspace())
