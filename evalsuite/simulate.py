"""`python -m evalsuite.simulate`: tables and plot of the gates' error rates.

Receives the number of draws and a Markdown file; replaces the text between its two marks and
writes the plot beside it. The process that is simulated is `simulation.py`.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

from evalsuite.files import write_text
from evalsuite.gates.paired import PairedPlan
from evalsuite.report.markdown import table
from evalsuite.simulation import (
    GATES,
    Cell,
    detectable,
    fail_rates,
    plan_rates,
    upper_rate,
)

BEGIN = "<!-- simulation: begin (made by a command, do not edit) -->"
END = "<!-- simulation: end -->"
DROPS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05)
NOISES = (0.005, 0.01, 0.02, 0.035, 0.05, 0.10)
SIZES = (200, 500, 1319)
PLOT_NOISE, PLOT_SIZE = 0.035, 1319
COLOURS = ("#1a7f37", "#0b6bcb", "#8e24aa", "#b26a00", "#c62828")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}" if 0 < rate < 0.0995 else f"{100 * rate:.0f}"


def false_alarm_table(draws: int, seed: int) -> str:
    """Rates at no drop, in per cent; ours with their 95 % upper bound."""
    rows = []
    for n in SIZES:
        for noise in NOISES:
            rates = fail_rates(Cell(0.0, noise, n), draws, seed)
            cells = [
                f"{_percent(rate)} (≤ {100 * upper_rate(rate, draws):.2f})"
                for rate in rates.values()
            ]
            rows.append([str(n), f"{100 * noise:g}", *cells])
    return table(["questions", "noise D (%)", *GATES], rows)


def detection_table(draws: int, seed: int) -> str:
    """Detection in per cent over drops, for every noise and size."""
    rows = []
    for n in SIZES:
        for noise in NOISES:
            for drop in DROPS[1:]:
                rates = fail_rates(Cell(drop, noise, n), draws, seed)
                rows.append(
                    [str(n), f"{100 * noise:g}", f"{100 * drop:g}", *map(_percent, rates.values())]
                )
    return table(["questions", "noise D (%)", "true drop (points)", *GATES], rows)


def stated_table(draws: int, seed: int) -> str:
    """The drop that a verdict states at 80 % power, and how often it is really seen."""
    rows = []
    for n in SIZES:
        for noise in NOISES:
            row = [str(n), f"{100 * noise:g}"]
            for name, alpha in (("paired 5 %", 0.05), ("paired 0.1 %", 0.001)):
                drop = detectable(alpha, noise, n)
                seen = fail_rates(Cell(drop, noise, n), draws, seed)[name]
                row += [f"{100 * drop:.2f}", _percent(seen)]
            rows.append(row)
    header = ["questions", "noise D (%)", "stated drop, 5 %", "seen (%)", "stated drop, 0.1 %"]
    return table([*header, "seen (%)"], rows)


def plan_table(draws: int, seed: int) -> str:
    """The real gate with up to four repeats against a baseline of four."""
    plan = PairedPlan(alpha=0.05, power=0.8, max_repeats=4)
    rows = []
    for drop in (0.0, 0.01, 0.02):
        found = plan_rates(Cell(drop, 0.035, 1319), plan, 4, draws, seed)
        rows.append(
            [
                f"{100 * drop:g}",
                f"{_percent(found.fail_rate)} (≤ {100 * upper_rate(found.fail_rate, draws):.1f})",
                f"{found.mean_repeats:.2f}",
            ]
        )
    return table(["true drop (points)", "FAIL (%)", "repeats on average"], rows)


def plot(draws: int, seed: int) -> str:
    """Detection over true drop as SVG, one line a gate."""
    left, top, width, height = 60, 20, 560, 300
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 220} '
        f'{top + height + 50}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for share in (0, 25, 50, 75, 100):
        y = top + height * (1 - share / 100)
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#d5d9df"/>'
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{share} %</text>'
        )
    drops = [step / 400 for step in range(21)]
    for drop in range(6):
        x = left + width * drop / 5
        parts.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{drop}</text>')
    rates = [fail_rates(Cell(drop, PLOT_NOISE, PLOT_SIZE), draws, seed) for drop in drops]
    for number, (name, colour) in enumerate(zip(GATES, COLOURS, strict=True)):
        path = " ".join(
            f"{left + width * drop / 0.05:.1f},{top + height * (1 - rate[name]):.1f}"
            for drop, rate in zip(drops, rates, strict=True)
        )
        y = top + 20 + 22 * number
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<line x1="{left + width + 12}" x2="{left + width + 36}" y1="{y}" y2="{y}" '
            f'stroke="{colour}" stroke-width="2"/>'
            f'<text x="{left + width + 42}" y="{y + 4}">{name}</text>'
        )
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">true drop in '
        f"points ({PLOT_SIZE} questions, noise {100 * PLOT_NOISE:g} %)</text></svg>\n"
    )
    return "".join(parts)


def render(draws: int, plan_draws: int, seed: int, plot_name: str) -> str:
    """Return the text between the marks."""
    start = time.perf_counter()
    parts = [
        f"![Share of builds failed over the true drop]({plot_name})",
        "### False alarms: per cent of unchanged builds that fail (95 % upper bound)",
        false_alarm_table(draws, seed),
        "### Stated drop at 80 % power, and how often the gate really sees it",
        stated_table(draws, seed),
        "### Repeats by plan: 5 % over up to four looks, 1,319 questions, noise 3.5 %",
        plan_table(plan_draws, seed),
        "### Detection: per cent of builds with a true drop that fail",
        detection_table(draws, seed),
    ]
    took = time.perf_counter() - start
    command = (
        f"python -m evalsuite.simulate --draws {draws} --plan-draws {plan_draws} --seed {seed} "
        "--out docs/verdicts.md"
    )
    parts.insert(
        0,
        f"{draws:,} pairs of runs a cell ({plan_draws:,} for the plan), on {_cpu_name()}, "
        f"{os.cpu_count()} cores, {took:.0f} s:\n\n```\n{command}\n```",
    )
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Run the simulation and write the section and the plot."""
    parser = argparse.ArgumentParser(prog="python -m evalsuite.simulate", description=__doc__)
    parser.add_argument("--draws", type=int, default=100_000, help="pairs of runs a cell")
    parser.add_argument("--plan-draws", type=int, default=1000, help="builds for the plan's table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Markdown file with the two marks; else stdout")
    args = parser.parse_args(argv)
    if args.out is None:
        print(render(args.draws, args.plan_draws, args.seed, "verdicts.svg"))
        return 0
    text = args.out.read_text(encoding="utf-8") if args.out.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        parser.error(f"{args.out} lacks the marks {BEGIN!r} and {END!r}")
    plot_path = args.out.with_suffix(".svg")
    section = render(args.draws, args.plan_draws, args.seed, plot_path.name)
    write_text(plot_path, plot(args.draws, args.seed))
    write_text(args.out, f"{before}{BEGIN}\n\n{section}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
