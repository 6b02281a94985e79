"""What every backend says to a layer, as a table: the oracle's answer with all its reasons.

Receives a `MoESpec`, a request and the environment; returns rows for `moeserve backends`, for
`/v1/backends` and for the README. Choosing is `oracle.py`; the command line is
`backends_command.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from moeserve.errors import Unsupported
from moeserve.moe.backends.registry import Registry, registry
from moeserve.moe.oracle import ask, select_unquantized_moe_backend
from moeserve.moe.policy import TABLE, rule_for
from moeserve.moe.spec import PLATFORMS, MoESpec, Plan

NEVER_EXECUTED = "never executed"


@dataclass(frozen=True)
class BackendRow:
    """One backend's answer.

    Attributes:
        name: As accepted by `--moe-backend`.
        order: Place in the order of preference, from 1; 0 for one that only its name chooses.
        is_supported: Its answer to the layer.
        reason: Why not, or "".
        tokens: Range of T that the plan gives to it, as "1-4096"; "" where it is not chosen.
        layout: Weight layout.
        note: "never executed" where this project has not run it, "out of tree" for another
            package's.
    """

    name: str
    order: int
    is_supported: bool
    reason: str
    tokens: str
    layout: str
    note: str


@dataclass(frozen=True)
class BackendReport:
    """The oracle's answer to one layer, with everything that was considered.

    Attributes:
        platform: Of the layer.
        condition: Row of the policy that applies.
        requested: What was asked for.
        plan: The answer; None where there is none.
        error: Why there is none.
        rows: In the order asked, then everything else that has a name.
    """

    platform: str
    condition: str
    requested: str
    plan: Plan | None
    error: str
    rows: tuple[BackendRow, ...]

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "platform": self.platform,
            "condition": self.condition,
            "requested": self.requested,
            "chosen": None if self.plan is None else self.plan.primary,
            "ranges": [] if self.plan is None else [list(r) for r in self.plan.ranges],
            "layout": "" if self.plan is None else self.plan.layout,
            "reason": self.error if self.plan is None else self.plan.reason,
            "backends": [asdict(row) for row in self.rows],
        }


def backend_report(
    spec: MoESpec,
    requested: str = "auto",
    platform: str | None = None,
    env: Mapping[str, str] | None = None,
) -> BackendReport:
    """Asks the oracle, and every backend on its own.

    Args:
        spec: The layer.
        requested: A name or "auto".
        platform: Overrides `spec.platform`.
        env: The field's switches.

    Raises:
        UsageError: An unknown name, platform or switch.
    """
    plan, error = None, ""
    try:
        plan = select_unquantized_moe_backend(spec, requested, platform, env)
    except Unsupported as unsupported:
        error = str(unsupported)
    # The platform's name was checked by the oracle.
    spec = replace(spec, platform=platform or spec.platform)  # type: ignore[arg-type]
    rule = rule_for(spec)
    backends = registry()
    preferred = list(dict.fromkeys(name for _, names in reversed(rule.ranges) for name in names))
    others = [name for name in backends.names if name not in preferred]
    removed = {} if plan is None else {r.backend: r.reason for r in plan.rejected}
    rows = [
        _row(spec, name, preferred.index(name) + 1 if name in preferred else 0, backends, removed)
        for name in [*preferred, *others]
    ]
    ranges = {} if plan is None else token_ranges(plan)
    return BackendReport(
        platform=spec.platform,
        condition=rule.condition,
        requested=requested,
        plan=plan,
        error=error,
        rows=tuple(replace(row, tokens=ranges.get(row.name, "")) for row in rows),
    )


def _row(
    spec: MoESpec, name: str, order: int, backends: Registry, removed: Mapping[str, str]
) -> BackendRow:
    answer = ask(spec, name, backends)
    is_known = name in backends.in_tree or name in backends.out_of_tree
    notes = []
    if name in backends.in_tree:
        traits = backends.get(name).traits
        has_run = traits.executed_on
        # Where it cannot run at all the reason says so, unless it has run nowhere.
        if not has_run or (spec.platform in traits.platforms and spec.platform not in has_run):
            notes.append(NEVER_EXECUTED)
    if name in backends.out_of_tree or name in backends.broken:
        notes.append("out of tree")
    return BackendRow(
        name=name,
        order=order,
        is_supported=answer.ok and name not in removed,
        reason=removed.get(name, answer.reason),
        tokens="",
        layout=backends.get(name).layout if is_known else "",
        note=", ".join(notes),
    )


def token_ranges(plan: Plan) -> dict[str, str]:
    """Name to the numbers of tokens it serves: {"cpu": "1-8192"}; several ranges are joined."""
    ranges: dict[str, str] = {}
    first = 1
    for largest, name in plan.ranges:
        text = f"{first}-{largest}"
        ranges[name] = f"{ranges[name]}, {text}" if name in ranges else text
        first = largest + 1
    return ranges


def render(report: BackendReport) -> str:
    """The report as text for a terminal."""
    head = [f"platform {report.platform} ({report.condition}), requested {report.requested}"]
    table = [("", "backend", "layout", "tokens", "answer")]
    for row in report.rows:
        answer = "supported" if row.is_supported else row.reason
        if row.note:
            answer += f" [{row.note}]"
        table.append((str(row.order or "-"), row.name, row.layout, row.tokens or "-", answer))
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    lines = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]
        )
        for line in table
    ]
    if report.plan is None:
        tail = f"no plan: {report.error}"
    else:
        tail = f"plan: {dict(token_ranges(report.plan))}, {report.plan.reason}"
    return "\n".join([*head, *(line.rstrip() for line in lines), tail])


def support_table() -> str:
    """Markdown: every backend of this tree against every platform; the README's table.

    A number is the place in the order of preference, "name" a backend that only its name chooses,
    "-" one that cannot run there.
    """
    in_tree = registry().in_tree
    lines = [
        f"| backend | {' | '.join(PLATFORMS)} | layout | dtypes | graph | deterministic "
        "| executed on |",
        "|" + "---|" * (len(PLATFORMS) + 6),
    ]
    for name, backend in sorted(in_tree.items()):
        traits = backend.traits
        cells = [_place(name, platform) for platform in PLATFORMS]
        dtypes = sorted(str(d).removeprefix("torch.") for d in traits.dtypes)
        lines.append(
            f"| `{name}` | {' | '.join(cells)} | {traits.layout} | {', '.join(dtypes)} "
            f"| {_yes(traits.is_graph_safe)} | {_yes(traits.is_deterministic)} "
            f"| {', '.join(sorted(traits.executed_on)) or NEVER_EXECUTED} |"
        )
    return "\n".join(lines) + "\n"


def _place(name: str, platform: str) -> str:
    if platform not in registry().in_tree[name].traits.platforms:
        return "-"
    names = _plain_order(platform)
    return str(names.index(name) + 1) if name in names else "name"


def _plain_order(platform: str) -> list[str]:
    """The order on a platform for a layer without special conditions."""
    rule = next(r for r in TABLE if r.platform == platform and r.condition == "any layer")
    return list(dict.fromkeys(name for _, names in reversed(rule.ranges) for name in names))


def _yes(value: bool) -> str:
    return "yes" if value else "no"
