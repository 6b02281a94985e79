"""The verdict table that ends a run in the terminal.

Receives verdicts, prints with rich; colours only where the terminal has them. What does not fit
a terminal's width is left out column by column, and where not even the narrowest table fits, a
verdict becomes a few short lines: nothing is folded in the middle of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from evalsuite.report.text import (
    accuracy_cell,
    asked_cell,
    backend_cell,
    follow_up,
    interval_cell,
    margin_cell,
    points,
    speed_cell,
    visible,
)
from evalsuite.verdict import Status, Verdict

# Where there is no terminal: wide enough for every column beside a long name.
LOG_WIDTH = 200
_STYLE = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.INCONCLUSIVE: "yellow",
    Status.SKIP: "dim",
}


@dataclass(frozen=True)
class _Column:
    """One column.

    Attributes:
        title: Its head.
        cell: What a verdict has there.
        rank: 0 always stays; of the others the highest goes first where the width is short.
        is_right: Numbers that are compared down the column.
    """

    title: str
    cell: Callable[[Verdict], str]
    rank: int = 0
    is_right: bool = False


def _drop(verdict: Verdict) -> str:
    drop = points(verdict.detectable_drop)
    return drop if drop == "-" else f"{drop} points"


def _floor(verdict: Verdict) -> str:
    return "-" if verdict.floor is None else f"{verdict.floor:g}"


_COLUMNS = (
    _Column("job", lambda v: visible(v.job_id)),
    _Column("verdict", lambda v: v.status.value),
    _Column("accuracy", accuracy_cell),
    _Column("95 % interval", interval_cell, rank=1),
    _Column("floor", _floor),
    _Column("margin", margin_cell, rank=2),
    _Column("sees drop", _drop, rank=4),
    _Column("asked", lambda v: visible(asked_cell(v)), rank=3),
    _Column("ran", lambda v: visible(backend_cell(v))),
    _Column("questions/s", speed_cell, rank=5, is_right=True),
    _Column("time", lambda v: f"{v.duration_s:.1f} s", rank=6, is_right=True),
)


def verdict_table(verdicts: Sequence[Verdict], max_rank: int = 6) -> Table:
    """Build the table; every text is literal, so no reply or log line is read as markup."""
    table = Table(title=None, show_lines=False)
    columns = [column for column in _COLUMNS if column.rank <= max_rank]
    for column in columns:
        justify = "right" if column.is_right else "left"
        table.add_column(column.title, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    for verdict in verdicts:
        cells = [Text(column.cell(verdict)) for column in columns]
        cells[1].stylize(_STYLE[verdict.status])
        table.add_row(*cells)
    return table


def _fitting_table(verdicts: Sequence[Verdict], console: Console) -> Table | None:
    """The table with as many columns as the console holds, None where it holds too few."""
    for max_rank in sorted({column.rank for column in _COLUMNS}, reverse=True):
        table = verdict_table(verdicts, max_rank)
        if Measurement.get(console, console.options.update(width=10_000), table).maximum <= (
            console.width
        ):
            return table
    return None


def _short_lines(verdict: Verdict) -> list[Text]:
    """One verdict for a terminal that is too narrow for any table."""
    head = Text(verdict.status.value, style=_STYLE[verdict.status])
    head.append(f" {visible(verdict.job_id)}", style="default")
    lines = [head]
    if verdict.accuracy is not None:
        lines.append(Text(f"  accuracy {accuracy_cell(verdict)}, floor {_floor(verdict)}"))
        lines.append(Text(f"  95 % {interval_cell(verdict)}, margin {margin_cell(verdict)}"))
    if verdict.status is not Status.SKIP:
        asked, ran = visible(asked_cell(verdict)), visible(backend_cell(verdict))
        lines.append(Text(f"  asked for {asked}, ran {ran}"))
    return lines


def screen() -> Console:
    """The terminal; a log is no narrow one, and its lines must not be cut down to 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def print_verdicts(verdicts: Sequence[Verdict], console: Console | None = None) -> None:
    """Print the table, then reasons of what did not pass, remarks, log tails and next steps."""
    console = console or screen()
    table = _fitting_table(verdicts, console)
    if table is not None:
        console.print(table)
    else:
        for verdict in verdicts:
            console.print(*_short_lines(verdict), sep="\n")
    for verdict in verdicts:
        if verdict.status is not Status.PASS:
            console.print(Text(f"{verdict.job_id}: {verdict.status}: {visible(verdict.reason)}"))
        for warning in verdict.warnings:
            console.print(Text(f"{verdict.job_id}: note: {visible(warning)}", style="dim"))
        for line in verdict.log_tail:
            console.print(Text(f"  | {visible(line)}"))
        for line in follow_up(verdict):
            # Not folded: it is to be copied.
            console.print(Text(f"  {line}"), soft_wrap=True)
