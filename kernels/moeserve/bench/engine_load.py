"""The loads of `moeserve bench engine`: prompts from fixed seeds, and a closed run of them.

Receives a load's name or its numbers and an `Engine`; returns `Figures`. Every request is greedy,
runs to its full length and is timed on the host, when the step that made its token has landed.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace

from moeserve.bench.serve_shape import NUM_GSM8K, gsm8k_shaped, random_ids
from moeserve.engine.engine import Engine
from moeserve.engine.events import StepOutput
from moeserve.engine.request import Request, SamplingParams
from moeserve.errors import UsageError

_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)(?:@(\d+))?")


@dataclass(frozen=True)
class Load:
    """Requests that are sent together.

    Attributes:
        name: In tables.
        num_requests: How many.
        input_len: Tokens of a prompt; 0 for prompts shaped like GSM8K's.
        output_len: Tokens of a reply.
        max_open: Requests open at once; 0 for all.
        tag: Seed of the prompts.
        keeps_cache: Prefixes that the load before it left are found again.
    """

    name: str
    num_requests: int
    input_len: int
    output_len: int
    max_open: int = 0
    tag: str = ""
    keeps_cache: bool = False

    def of(self, num_requests: int) -> Load:
        """The same with another number of requests."""
        return replace(self, num_requests=num_requests)


LOADS = {
    load.name: load
    for load in (
        Load("b128", 128, 2, 512, tag="a"),
        Load("b1", 1, 2, 256, tag="b"),
        Load("in1000", 256, 1000, 128, tag="c"),
        Load("gsm256", NUM_GSM8K, 0, 256, max_open=256, tag="gsm"),
        Load("gsmall", NUM_GSM8K, 0, 256, tag="gsm"),
        Load("gsmall-cached", NUM_GSM8K, 0, 256, tag="gsm", keeps_cache=True),
    )
}


@dataclass(frozen=True)
class Figures:
    """What a load took.

    Attributes:
        name: The load's.
        num_requests: Answered, each in full.
        input_tokens: Of all prompts.
        output_tokens: Of all replies.
        seconds: From the first request to the last token.
        output_tok_s: Output tokens a second.
        total_tok_s: Input and output tokens a second.
        tpot_ms: Mean over requests of the time a token after the first; 0 where there is none.
        ttft_ms: Mean time to the first token since the load began, so queueing counts.
        num_steps: Engine steps.
        num_preemptions: Sequences that lost their pages to others.
    """

    name: str
    num_requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    output_tok_s: float
    total_tok_s: float
    tpot_ms: float
    ttft_ms: float
    num_steps: int
    num_preemptions: int


@dataclass
class _Times:
    """When each request's first and last token came, and how many did."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    num_ended: int = 0

    def take(self, out: StepOutput, now: float) -> None:
        for request_id in out.ids:
            self._add(request_id, 1, now)
        for event in out.events:
            if event.error:
                raise UsageError(f"bench engine: a request failed: {event.error}")
            if event.token_ids:
                self._add(event.request_id, len(event.token_ids), now)
            self.num_ended += event.finish_reason is not None

    def _add(self, request_id: str, count: int, now: float) -> None:
        self.first.setdefault(request_id, now)
        self.last[request_id] = now
        self.count[request_id] = self.count.get(request_id, 0) + count


def read_load(word: str) -> Load:
    """One of `LOADS` by name, or a load of random prompts from `REQUESTSxINxOUT[@OPEN]`.

    Raises:
        UsageError: Neither.
    """
    if word in LOADS:
        return LOADS[word]
    match = _SHAPE.fullmatch(word)
    if match is None:
        raise UsageError(
            f"bench engine: --loads {word}: want {', '.join(LOADS)} or REQUESTSxINxOUT[@OPEN]"
        )
    num_requests, input_len, output_len, max_open = (int(part or 0) for part in match.groups())
    if min(num_requests, input_len, output_len) < 1:
        raise UsageError(f"bench engine: --loads {word}: numbers are at least 1")
    return Load(word, num_requests, input_len, output_len, max_open, tag=word)


def make_prompts(load: Load, vocab_size: int) -> list[tuple[int, ...]]:
    """The prompts of a load, the same in every run."""
    count = load.num_requests
    if load.input_len:
        return [random_ids(load.input_len, (load.tag, i), vocab_size) for i in range(count)]
    return gsm8k_shaped(count, load.tag, vocab_size)


def greedy_request(name: str, prompt: tuple[int, ...], num_tokens: int) -> Request:
    """A request that runs to its full length."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return Request(name, prompt, sampling)


def run_load(engine: Engine, load: Load, prompts: list[tuple[int, ...]]) -> Figures:
    """Send a load and wait for the last token.

    Args:
        engine: Without open requests.
        load: What is sent.
        prompts: Of `make_prompts`.

    Raises:
        UsageError: A request ended with an error.
    """
    waiting = [
        greedy_request(f"{load.name} {i}", prompt, load.output_len)
        for i, prompt in enumerate(prompts)
    ][::-1]
    most = load.max_open or len(prompts)
    times, num_sent, num_steps = _Times(), 0, 0
    preemptions = engine.stats().num_preemptions
    begin = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and num_sent - times.num_ended < most:
            engine.add(waiting.pop())
            num_sent += 1
        out = engine.step()
        num_steps += 1
        times.take(out, time.perf_counter())
    seconds = time.perf_counter() - begin
    count, first = times.count, times.first
    gaps = [(times.last[i] - first[i]) / (count[i] - 1) for i in first if count[i] > 1]
    num_in, num_out = sum(map(len, prompts)), sum(count.values())
    return Figures(
        name=load.name,
        num_requests=times.num_ended,
        input_tokens=num_in,
        output_tokens=num_out,
        seconds=seconds,
        output_tok_s=num_out / seconds,
        total_tok_s=(num_in + num_out) / seconds,
        tpot_ms=1e3 * sum(gaps) / len(gaps) if gaps else 0.0,
        ttft_ms=1e3 * sum(at - begin for at in first.values()) / len(first),
        num_steps=num_steps,
        num_preemptions=engine.stats().num_preemptions - preemptions,
    )
