"""A comparison in the terminal, as Markdown, and as one self-contained page.

Receives `Comparison`s; the first table has the form lm-eval prints. The numbers are made in
`compare.py`.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalsuite.compare import Comparison, Pair, scores
from evalsuite.report import svg
from evalsuite.report.html import MAX_FLIPS, environment, style_sheet
from evalsuite.report.markdown import cell, fenced, table
from evalsuite.report.terminal import screen
from evalsuite.report.text import visible

# lm-eval's columns, one row per contender and filter.
SCORE_HEADER = ("Tasks", "run", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
PAIR_HEADER = (
    "A", "B", "B - A (points)", "paired SE", "p (two-sided)", "p (Holm)", "flips", "same text",
)  # fmt: skip
# Flips printed in the terminal and in Markdown; the page has more, the ledgers all.
SHOWN_FLIPS = 5
ALPHA = 0.05
Z_95 = 1.96


def letters(comparison: Comparison) -> dict[str, str]:
    """Label -> a letter that stands for it where columns are narrow."""
    labels = [one.label for one in comparison.contenders]
    names = string.ascii_uppercase if len(labels) <= 26 else [f"R{i}" for i in range(len(labels))]
    return dict(zip(labels, names, strict=False))


def score_rows(comparison: Comparison, names: Mapping[str, str] | None = None) -> list[list[str]]:
    """Rows of the first table; `names` replaces the contenders' labels."""
    return [
        [
            one.result.task,
            (names or {}).get(one.label, one.label),
            score.metric + (" *" if score.metric == comparison.metric else ""),
            one.num_fewshot,
            "exact_match",
            "↑",
            f"{score.value:.4f}",
            "±",
            f"{score.stderr:.4f}",
        ]
        for one in comparison.contenders
        for score in scores(one)
    ]


def pair_rows(comparison: Comparison, names: Mapping[str, str] | None = None) -> list[list[str]]:
    """Rows of the second table; `names` replaces the contenders' labels."""
    return [
        [
            (names or {}).get(pair.first, pair.first),
            (names or {}).get(pair.second, pair.second),
            f"{100 * pair.difference + 0.0:+.2f}",
            f"{100 * pair.stderr:.2f}",
            f"{pair.p_value:.4g}",
            f"{pair.p_holm:.4g}",
            _flip_counts(pair),
            "-" if pair.num_same_text < 0 else f"{pair.num_same_text}/{pair.n}",
        ]
        for pair in comparison.pairs
    ]


def _flip_counts(pair: Pair) -> str:
    lost = sum(flip.was_right for flip in pair.flips)
    return f"{lost} lost, {len(pair.flips) - lost} gained"


def render_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the Markdown text."""
    parts = []
    for comparison in comparisons:
        parts += [
            f"## {cell(comparison.title)}",
            table(SCORE_HEADER, score_rows(comparison)),
            f"\\* the metric that is compared: {cell(comparison.metric)}",
            table(PAIR_HEADER, pair_rows(comparison)),
        ]
        for pair in comparison.pairs:
            for flip in pair.flips[:SHOWN_FLIPS]:
                parts += [
                    f"### question {flip.index}: {cell(pair.first)} "
                    f"{'right' if flip.was_right else 'wrong'}, {cell(pair.second)} "
                    f"{'right' if flip.is_right else 'wrong'}, gold {cell(flip.target)}",
                    fenced(flip.before),
                    fenced(flip.after),
                ]
    return "\n\n".join(parts) + "\n"


def print_comparison(comparisons: Sequence[Comparison], console: Console | None = None) -> None:
    """Print both tables and the first flips of each pair, the two replies side by side."""
    console = console or screen()
    for comparison in comparisons:
        console.print(Text(visible(comparison.title), style="bold"))
        names = letters(comparison)
        for label, letter in names.items():
            console.print(Text(f"{letter} = {visible(label)}"))
        console.print(_rich(SCORE_HEADER, score_rows(comparison, names)))
        console.print(_rich(PAIR_HEADER, pair_rows(comparison, names)))
        for pair in comparison.pairs:
            if not pair.flips:
                continue
            shown = pair.flips[:SHOWN_FLIPS]
            rows = [
                [str(flip.index), flip.target, flip.before.strip(), flip.after.strip()]
                for flip in shown
            ]
            console.print(Text(f"first {len(shown)} of {len(pair.flips)} flips"))
            console.print(_rich(("question", "gold", names[pair.first], names[pair.second]), rows))


def _rich(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(show_lines=False)
    for name in header:
        made.add_column(Text(visible(name)), overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(text)) for text in row))
    return made


def _colour(pair: Pair) -> str:
    """Class of a bar: a difference that the number of pairs does not explain has a colour."""
    if pair.p_holm > ALPHA:
        return ""
    return "FAIL" if pair.difference < 0 else "PASS"


def render_html(comparisons: Sequence[Comparison]) -> str:
    """Return one page with tables, interval and margin plots, and flips side by side."""
    sections = []
    for comparison in comparisons:
        rows = [
            svg.IntervalRow(one.label, score.value, *score.interval)
            for one in comparison.contenders
            for score in scores(one)
            if score.metric == comparison.metric
        ]
        margins = [
            (f"{pair.second} - {pair.first}", 100 * pair.difference, _colour(pair))
            for pair in comparison.pairs
        ]
        halves = [100 * Z_95 * pair.stderr for pair in comparison.pairs]
        sections.append(
            {
                "title": comparison.title,
                "metric": comparison.metric,
                "score_rows": score_rows(comparison),
                "pair_rows": pair_rows(comparison),
                "intervals": svg.intervals(rows, "accuracy with 95 % interval"),
                "margins": svg.bars(margins, "difference in points", "points", halves),
                "pairs": comparison.pairs,
            }
        )
    return (
        environment()
        .get_template("compare.html.j2")
        .render(
            css=style_sheet(),
            sections=sections,
            score_header=SCORE_HEADER,
            pair_header=PAIR_HEADER,
            max_flips=MAX_FLIPS,
        )
    )
