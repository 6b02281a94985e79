"""Figures of the server for Prometheus, under the names that the field scrapes.

Receives timings of sequences from `sequences.py` and reads the engine's counters when it is asked;
returns the text of `/metrics`. Names that begin with `vllm:` mean what they mean there; `moeserve:`
names are ours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from moeserve.engine.client import EngineStats
from moeserve.server.sequences import Choice

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0, 160.0)  # fmt: skip
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
            1.0, 2.5, 5.0, 10.0)  # fmt: skip
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
              50.0, 60.0, 120.0, 240.0, 480.0, 960.0)  # fmt: skip
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)

# (name, help, field of EngineStats)
_GAUGES = (
    ("vllm:num_requests_running", "Sequences in the batch.", "num_running"),
    ("vllm:num_requests_waiting", "Sequences in the queue.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", "cache_usage"),
)
_COUNTERS = (
    ("vllm:num_preemptions", "Sequences that gave their pages back.", "num_preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "prefix_query_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found.", "prefix_hit_tokens"),
    ("moeserve:padding_rows", "Rows of padding run through the model.", "padding_rows"),
    ("moeserve:nan_rows", "Router rows with a NaN.", "nan_rows"),
    ("moeserve:steps", "Engine steps.", "num_steps"),
)
# (attribute, name, help, bounds)
_HISTOGRAMS = (
    ("first", "vllm:time_to_first_token_seconds", "From arrival to the first token.",
     _FIRST_TOKEN_S),
    ("inter", "vllm:inter_token_latency_seconds", "From one token of a sequence to the next.",
     _TOKEN_S),
    ("per_output", "vllm:time_per_output_token_seconds", "The same, by its earlier name.",
     _TOKEN_S),
    ("whole", "vllm:e2e_request_latency_seconds", "From arrival to the end of a sequence.",
     _REQUEST_S),
    ("prompt_lengths", "vllm:request_prompt_tokens", "Prompt tokens of sequences that ended.",
     _LENGTHS),
    ("output_lengths", "vllm:request_generation_tokens", "Tokens made by sequences that ended.",
     _LENGTHS),
)  # fmt: skip


class _Histogram:
    """Counts by bucket for one thread: the library's, with its locks, costs more than a token."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, model_name: str) -> Metric:
        labels = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([model_name], buckets, self._sum)
        return family


class Metrics:
    """All figures of one server; an `Observer` of sequences.

    Args:
        model_name: Label of every figure.
        read_stats: Returns the engine's counters, None while there is no engine.
    """

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats | None]) -> None:
        self._read_stats = read_stats
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self._registry)

        # Counted as they are made, not when a sequence ends: of a long answer, or of one that
        # nobody waited for, they would come late or never.
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._success = counter("vllm:request_success", "Sequences ended.", "finished_reason")
        self._failures = counter("moeserve:request_failure", "Requests that failed.", "status")
        self._disconnects = counter("moeserve:client_disconnects", "Clients gone.").labels(
            model_name
        )
        self._histograms = {
            key: _Histogram(name, text, bounds) for key, name, text, bounds in _HISTOGRAMS
        }

    def first_token(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Count a prompt that was read, and the time to the first token."""
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_tokens
        self._histograms["first"].observe(seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Count the time between two events of a sequence, shared by its tokens."""
        self._num_output_tokens += num_tokens
        self._histograms["inter"].observe(seconds / num_tokens, num_tokens)
        self._histograms["per_output"].observe(seconds / num_tokens, num_tokens)

    def finished(self, choice: Choice, seconds: float) -> None:
        """Count a sequence that ended."""
        if not choice.num_tokens:  # it was asked for its prompt alone
            self._num_prompt_tokens += len(choice.prompt.ids)
        self._histograms["whole"].observe(seconds)
        self._histograms["prompt_lengths"].observe(len(choice.prompt.ids))
        self._histograms["output_lengths"].observe(choice.num_tokens)
        self._success.labels(self._model_name, choice.finish_reason or "").inc()

    def failed(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._failures.labels(self._model_name, str(status)).inc()

    def disconnected(self) -> None:
        """Count a client that went away before its answer."""
        self._disconnects.inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's counters; called by the registry."""
        stats = self._read_stats() or EngineStats()
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], float(getattr(stats, field)))
            yield gauge
        counted = [(name, text, getattr(stats, field)) for name, text, field in _COUNTERS]
        counted.append(("vllm:prompt_tokens", "Prompt tokens read.", self._num_prompt_tokens))
        counted.append(("vllm:generation_tokens", "Tokens made.", self._num_output_tokens))
        for name, text, value in counted:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], float(value))
            yield family
        for histogram in self._histograms.values():
            yield histogram.family(self._model_name)

    def text(self) -> bytes:
        """Return the exposition text."""
        return bytes(generate_latest(self._registry))
