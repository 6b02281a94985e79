"""The verdict table that ends a run in the terminal.

Receives verdicts, prints with rich; colours only where the terminal has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalsuite.report.text import accuracy_cell, backend_cell, interval_cell, points, visible
from evalsuite.verdict import Status, Verdict

_STYLE = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.INCONCLUSIVE: "yellow",
    Status.SKIP: "dim",
}


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Build the table; every text is literal, so no reply or log line is read as markup."""
    table = Table(title=None, show_lines=False)
    for name in ("job", "verdict", "accuracy", "95 % interval", "floor", "sees drop", "backend"):
        table.add_column(name, overflow="fold", no_wrap=name in ("verdict", "floor"))
    table.add_column("time", justify="right")
    for verdict in verdicts:
        drop = points(verdict.detectable_drop)
        table.add_row(
            Text(visible(verdict.job_id)),
            Text(verdict.status.value, style=_STYLE[verdict.status]),
            Text(accuracy_cell(verdict)),
            Text(interval_cell(verdict)),
            Text("-" if verdict.floor is None else f"{verdict.floor:g}"),
            Text(drop if drop == "-" else f"{drop} points"),
            Text(visible(backend_cell(verdict))),
            Text(f"{verdict.duration_s:.1f} s"),
        )
    return table


def print_verdicts(verdicts: Sequence[Verdict], console: Console | None = None) -> None:
    """Print the table, then reasons of what did not pass, remarks and log tails."""
    console = console or Console()
    console.print(verdict_table(verdicts))
    for verdict in verdicts:
        if verdict.status is not Status.PASS:
            console.print(Text(f"{verdict.job_id}: {verdict.status}: {visible(verdict.reason)}"))
            for line in verdict.log_tail:
                console.print(Text(f"  | {visible(line)}"))
            if verdict.reproduce:
                console.print(Text(f"  reproduce: {visible(verdict.reproduce)}"))
        for warning in verdict.warnings:
            console.print(Text(f"{verdict.job_id}: note: {visible(warning)}", style="dim"))
