"""Outcomes of a serving benchmark → figures, under the field's names and in its layout.

Receives `Outcome`s; returns a `Summary`, its text report (the lines of `vllm bench serve`, in that
order), its JSON, and a table of several servers side by side. Percentiles interpolate linearly.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moeserve.bench.serve_client import Outcome

_WIDTH = 50
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(frozen=True)
class Spread:
    """Mean, median, standard deviation and percentiles of one latency, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Summary:
    """Figures of one run.

    Attributes:
        outcomes: Every request's.
        duration_s: From the first request to the last reply.
        spreads: By "ttft", "tpot", "itl", "e2el".
        peak_output: Most tokens in one second of the run.
        peak_concurrent: Most requests open within one second of the run.
    """

    outcomes: tuple[Outcome, ...]
    duration_s: float
    spreads: dict[str, Spread]
    peak_output: float
    peak_concurrent: int

    @property
    def answered(self) -> list[Outcome]:
        """Requests that were answered in full; only they count in rates and latencies."""
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def num_input(self) -> int:
        """Prompt tokens."""
        return sum(outcome.num_input for outcome in self.answered)

    @property
    def num_output(self) -> int:
        """Generated tokens."""
        return sum(outcome.num_output for outcome in self.answered)

    @property
    def request_rate(self) -> float:
        """Requests a second."""
        return len(self.answered) / self.duration_s

    @property
    def output_rate(self) -> float:
        """Generated tokens a second."""
        return self.num_output / self.duration_s

    @property
    def total_rate(self) -> float:
        """Prompt and generated tokens a second."""
        return (self.num_input + self.num_output) / self.duration_s


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` per cent lie; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(
    outcomes: Sequence[Outcome], duration_s: float, percentiles: Sequence[float] = (99.0,)
) -> Summary:
    """Return the figures of a run."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    samples = {
        "ttft": [outcome.ttft for outcome in answered],
        "tpot": [
            (outcome.latency - outcome.ttft) / (outcome.num_output - 1)
            for outcome in answered
            if outcome.num_output > 1
        ],
        "itl": [gap for outcome in answered for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in answered],
    }
    peak_output, peak_concurrent = _peaks(answered)
    return Summary(
        outcomes=tuple(outcomes),
        duration_s=duration_s,
        spreads={name: _spread(values, percentiles) for name, values in samples.items()},
        peak_output=peak_output,
        peak_concurrent=peak_concurrent,
    )


def _spread(values: list[float], percentiles: Sequence[float]) -> Spread:
    ms = [value * 1e3 for value in values]
    return Spread(
        mean=statistics.fmean(ms) if ms else 0.0,
        median=statistics.median(ms) if ms else 0.0,
        std=statistics.pstdev(ms) if ms else 0.0,
        percentiles=tuple((share, percentile(ms, share)) for share in percentiles),
    )


def _peaks(answered: list[Outcome]) -> tuple[float, int]:
    """Count tokens and open requests in each whole second of the run."""
    if not answered:
        return 0.0, 0
    first = min(outcome.start for outcome in answered)
    num_seconds = int(max(o.start + o.latency for o in answered) - first) + 1
    tokens, opened = [0.0] * num_seconds, [0] * num_seconds
    for outcome in answered:
        begin = outcome.start - first
        times = accumulate(outcome.itls, initial=begin + outcome.ttft)
        # A chunk may hold several; how many of the reply's it holds is not said.
        tokens_per_chunk = outcome.num_output / (len(outcome.itls) + 1)
        for moment in times:
            tokens[min(int(moment), num_seconds - 1)] += tokens_per_chunk
        for second in range(int(begin), int(begin + outcome.latency) + 1):
            opened[second] += 1
    return max(tokens), max(opened)


def report(summary: Summary, metrics: Sequence[str] = ("ttft", "tpot", "itl")) -> str:
    """Return the text report."""
    rows: list[tuple[str, str]] = [
        ("Successful requests:", str(len(summary.answered))),
        ("Failed requests:", str(len(summary.outcomes) - len(summary.answered))),
        ("Benchmark duration (s):", f"{summary.duration_s:.2f}"),
        ("Total input tokens:", str(summary.num_input)),
        ("Total generated tokens:", str(summary.num_output)),
        ("Request throughput (req/s):", f"{summary.request_rate:.2f}"),
        ("Output token throughput (tok/s):", f"{summary.output_rate:.2f}"),
        ("Peak output token throughput (tok/s):", f"{summary.peak_output:.2f}"),
        ("Peak concurrent requests:", f"{summary.peak_concurrent:.2f}"),
        ("Total token throughput (tok/s):", f"{summary.total_rate:.2f}"),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [f"{name:<40} {value:<10}".rstrip() for name, value in rows]
    for metric in metrics:
        spread, label = summary.spreads[metric], metric.upper()
        lines.append(f"{_TITLES[metric]:-^{_WIDTH}}")
        lines.append(f"{f'Mean {label} (ms):':<40} {spread.mean:<10.2f}".rstrip())
        lines.append(f"{f'Median {label} (ms):':<40} {spread.median:<10.2f}".rstrip())
        for share, value in spread.percentiles:
            lines.append(f"{f'P{share:g} {label} (ms):':<40} {value:<10.2f}".rstrip())
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def to_json(summary: Summary) -> dict[str, object]:
    """Return the figures under the field's names."""
    outcomes = summary.outcomes
    result: dict[str, object] = {
        "duration": summary.duration_s,
        "completed": len(summary.answered),
        "failed": len(outcomes) - len(summary.answered),
        "total_input_tokens": summary.num_input,
        "total_output_tokens": summary.num_output,
        "request_throughput": summary.request_rate,
        "request_goodput": None,
        "output_throughput": summary.output_rate,
        "total_token_throughput": summary.total_rate,
        "max_output_tokens_per_s": summary.peak_output,
        "max_concurrent_requests": summary.peak_concurrent,
        "input_lens": [outcome.num_input for outcome in outcomes],
        "output_lens": [outcome.num_output for outcome in outcomes],
        "ttfts": [round(outcome.ttft, 6) for outcome in outcomes],
        "itls": [[round(gap, 6) for gap in outcome.itls] for outcome in outcomes],
        "latencies": [round(outcome.latency, 6) for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
    for metric, spread in summary.spreads.items():
        result[f"mean_{metric}_ms"] = spread.mean
        result[f"median_{metric}_ms"] = spread.median
        result[f"std_{metric}_ms"] = spread.std
        for share, value in spread.percentiles:
            result[f"p{share:g}_{metric}_ms"] = value
    return result


def side_by_side(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    """Return a table of several servers; ratios are against the last, above 1 is better."""
    rows = [
        ("Output tok/s", [s.output_rate for s in summaries], True),
        ("Total tok/s", [s.total_rate for s in summaries], True),
        ("Requests/s", [s.request_rate for s in summaries], True),
        ("Mean TTFT ms", [s.spreads["ttft"].mean for s in summaries], False),
        ("Mean TPOT ms", [s.spreads["tpot"].mean for s in summaries], False),
        ("Median ITL ms", [s.spreads["itl"].median for s in summaries], False),
        ("Mean E2EL ms", [s.spreads["e2el"].mean for s in summaries], False),
    ]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for label, values, is_more_better in rows:
        base = values[-1]
        cells = []
        for value in values:
            ratio = _ratio(value, base) if is_more_better else _ratio(base, value)
            cells.append(f"{value:,.2f} ({ratio})")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}×" if base else "–"
