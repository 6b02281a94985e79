"""Plots as inline SVG, written by hand: no script, no font, no file besides the page.

Receives numbers and labels, returns markup in which every label is escaped. Colours come from
the page's style sheet by class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from evalsuite.report.text import visible

ROW = 24
LABEL = 330
CHARACTER = 7.2
WIDTH = 520
MARGIN = 20


@dataclass(frozen=True)
class IntervalRow:
    """One row of an interval plot; values as fractions, `floor` None where there is none."""

    label: str
    value: float
    low: float
    high: float
    floor: float | None = None
    css: str = ""


def _open(width: float, height: float, title: str) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    text = escape(title)
    return f'<svg class="plot" {size} role="img" aria-label="{text}"><title>{text}</title>'


def _short(label: str, size: int = 46) -> str:
    text = visible(label)
    return text if len(text) <= size else "…" + text[-size + 1 :]


def _label_width(labels: Sequence[str]) -> float:
    """Room for the longest label, so that short ones leave no empty half of a small screen."""
    longest = max(len(_short(label)) for label in labels)
    return min(LABEL, 20 + CHARACTER * longest)


def _ticks(low: float, high: float) -> list[float]:
    span = high - low
    step = next(s for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if span / s <= 8)
    first = int(low / step) * step
    return [first + i * step for i in range(12) if low <= first + i * step <= high]


def intervals(rows: Sequence[IntervalRow], title: str) -> Markup:
    """Accuracy with its interval per row; a vertical mark is the floor."""
    if not rows:
        return Markup("")
    values = [x for r in rows for x in (r.low, r.high, r.floor) if x is not None]
    low, high = min(values), max(values)
    pad = max(0.005, 0.06 * (high - low))
    low, high = max(0.0, low - pad), min(1.0, high + pad)
    left = _label_width([row.label for row in rows])

    def x(value: float) -> str:
        return f"{left + (value - low) / (high - low) * WIDTH:.1f}"

    height = ROW * len(rows) + 2 * MARGIN
    parts = [_open(left + WIDTH + MARGIN, height, title)]
    for tick in _ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="4" y2="{height - MARGIN}"/>'
            f'<text class="tick" x="{x(tick)}" y="{height - 5}">{100 * tick:.1f}</text>'
        )
    for number, row in enumerate(rows):
        y = MARGIN + ROW * number
        parts.append(
            f'<text class="label" x="{left - 8}" y="{y + 4}">{escape(_short(row.label))}</text>'
            f'<line class="bar {escape(row.css)}" x1="{x(row.low)}" x2="{x(row.high)}" '
            f'y1="{y}" y2="{y}"/>'
            f'<circle class="dot {escape(row.css)}" cx="{x(row.value)}" cy="{y}" r="4"/>'
        )
        if row.floor is not None:
            parts.append(
                f'<line class="floor" x1="{x(row.floor)}" x2="{x(row.floor)}" '
                f'y1="{y - 8}" y2="{y + 8}"/>'
            )
    return Markup("".join([*parts, "</svg>"]))


def bars(
    rows: Sequence[tuple[str, float, str]], title: str, unit: str, halves: Sequence[float] = ()
) -> Markup:
    """Signed bars from a zero line.

    Args:
        rows: (label, value, css class).
        title: Read out in place of the plot.
        unit: Behind each value.
        halves: Half the width of each value's interval; none where not given.
    """
    if not rows:
        return Markup("")
    room = _label_width([label for label, _, _ in rows])
    widths = list(halves) or [0.0] * len(rows)
    ends = [abs(row[1]) + half for row, half in zip(rows, widths, strict=True)]
    largest = max(1e-9, *ends)
    zero = room + WIDTH / 2
    height = ROW * len(rows) + MARGIN
    parts = [_open(room + WIDTH + 110, height, title)]
    for number, (label, value, css) in enumerate(rows):
        y = MARGIN / 2 + ROW * number
        scale = WIDTH / 2 / largest
        length = abs(value) * scale
        start = zero if value >= 0 else zero - length
        parts.append(
            f'<text class="label" x="{room - 8}" y="{y + 12}">{escape(_short(label))}</text>'
            f'<rect class="block {escape(css)}" x="{start:.1f}" y="{y:.1f}" width="{length:.1f}" '
            f'height="14"/><text class="value" x="{zero + WIDTH / 2 + 6:.1f}" y="{y + 12}">'
            f"{value:+.2f} {escape(unit)}</text>"
        )
        if half := widths[number]:
            left, right = (zero + (value + side * half) * scale for side in (-1, 1))
            parts.append(
                f'<line class="whisker" x1="{left:.1f}" x2="{right:.1f}" '
                f'y1="{y + 7:.1f}" y2="{y + 7:.1f}"/>'
            )
    parts.append(f'<line class="floor" x1="{zero}" x2="{zero}" y1="0" y2="{height}"/>')
    return Markup("".join([*parts, "</svg>"]))


def trend(points: Sequence[tuple[str, float]], floor: float | None, title: str) -> Markup:
    """Accuracy over runs, oldest first; "" for fewer than two."""
    if len(points) < 2:
        return Markup("")
    values = [value for _, value in points] + ([floor] if floor is not None else [])
    low, high = min(values), max(values)
    pad = max(0.005, 0.1 * (high - low))
    low, high = low - pad, high + pad
    width, height = 420, 90

    def xy(number: int, value: float) -> tuple[float, float]:
        return (
            10 + number / (len(points) - 1) * (width - 70),
            8 + (high - value) / (high - low) * (height - 16),
        )

    places = [xy(number, value) for number, (_, value) in enumerate(points)]
    parts = [_open(width, height, title)]
    if floor is not None:
        y = xy(0, floor)[1]
        parts.append(f'<line class="floor" x1="10" x2="{width - 60}" y1="{y:.1f}" y2="{y:.1f}"/>')
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    parts.append(f'<polyline class="trend" points="{path}"/>')
    for (a, b), (name, value) in zip(places, points, strict=True):
        parts.append(
            f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3">'
            f"<title>{escape(visible(name))}: {value:.4f}</title></circle>"
        )
    parts.append(
        f'<text class="value" x="{width - 52}" y="{places[-1][1] + 4:.1f}">{points[-1][1]:.4f}'
        "</text></svg>"
    )
    return Markup("".join(parts))
