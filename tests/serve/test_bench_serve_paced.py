"""`moeserve bench serve` against a server whose latencies are known, and against odd streams.

Measured on two cores, 8 open requests: the client's TTFT is 0.5 to 2 ms above the server's own,
its TPOT and ITL within 0.5 %. The bounds leave room for a machine that does other things.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from fake_server import Action, FakeServer
from paced_server import PacedServer, Schedule, Sent, paced_server

from moeserve.__main__ import main
from moeserve.bench.serve_client import Outcome, Pace, Target, new_session, run_load, send
from moeserve.bench.serve_load import Ask
from moeserve.bench.serve_report import summarise

NUM_OPEN, NUM_PROMPTS = 8, 16
PLAIN = Schedule(num_chunks=16)
VARIANTS = {
    "a token a chunk": (PLAIN, "openai"),
    "four tokens a chunk": (Schedule(num_chunks=16, tokens_per_chunk=4), "openai"),
    "usage long after the last token": (Schedule(num_chunks=16, end_s=0.2), "openai"),
    "a connection a request": (Schedule(num_chunks=16, is_closing=True), "openai"),
    "lines that end in CR LF": (Schedule(num_chunks=16, line_end="\r\n"), "openai"),
    "chat, the role 80 ms before a token": (PLAIN, "openai-chat"),
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def bench(server: PacedServer, folder: Path, *argv: str) -> tuple[dict[str, object], list[Sent]]:
    """Run the command; return its result and what the server really did."""
    command = ["bench", "serve", "--base-url", server.url, "--num-prompts", str(NUM_PROMPTS)]
    command += ["--ignore-eos", "--save-result", "--result-dir", str(folder), *argv]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--result-filename", "out.json"]
    assert main(command) == 0
    result: dict[str, object] = json.loads((folder / "out.json").read_text())
    return result, server.sent()


@pytest.mark.parametrize("name", VARIANTS)
def test_figures_are_the_server_s_own(tmp_path: Path, name: str) -> None:
    schedule, backend = VARIANTS[name]
    asked = ["--input-len", "8"]
    if backend == "openai-chat":
        asked = ["--dataset", "minigsm", "--num-shots", "0", "--output-len", "16"]
    with paced_server(schedule) as server:
        result, sent = bench(
            server, tmp_path, "--backend", backend, "--max-concurrency", str(NUM_OPEN), *asked
        )
    assert len(sent) == NUM_PROMPTS
    assert min(one.ttft_s for one in sent) >= schedule.ttft_s
    num_tokens = schedule.num_chunks * schedule.tokens_per_chunk
    assert result["output_lens"] == [num_tokens] * NUM_PROMPTS
    ttft_ms, e2el_ms = (
        1e3 * statistics.median(getattr(one, what) for one in sent) for what in ("ttft_s", "e2el_s")
    )
    # A client sees a token later than it was sent, never earlier.
    assert ttft_ms < result["median_ttft_ms"] < ttft_ms * 1.05
    assert e2el_ms < result["median_e2el_ms"] < e2el_ms * 1.03
    assert result["mean_tpot_ms"] == pytest.approx(1e3 * schedule.tpot_s, rel=0.03)
    assert result["mean_itl_ms"] == pytest.approx(1e3 * schedule.itl_s, rel=0.03)
    assert result["p99_itl_ms"] < 2e3 * schedule.itl_s
    busy_s = max(one.moments[-1] for one in sent) + schedule.end_s - sent[0].arrived
    assert result["duration"] == pytest.approx(busy_s, rel=0.03)
    assert result["request_throughput"] == pytest.approx(NUM_PROMPTS / busy_s, rel=0.03)
    assert result["output_throughput"] == pytest.approx(num_tokens * NUM_PROMPTS / busy_s, rel=0.03)


def test_a_clock_starts_when_its_request_leaves_and_not_in_the_queue(tmp_path: Path) -> None:
    with paced_server(Schedule(num_chunks=4)) as server:
        result, sent = bench(server, tmp_path, "--max-concurrency", "4", "--input-len", "8")
    starts = result["start_times"]
    assert isinstance(starts, list)
    gaps = [one.arrived - start for start, one in zip(sorted(starts), sent, strict=True)]
    assert min(gaps) > 0
    assert statistics.median(gaps) < 0.01
    open_most = max(
        sum(other.arrived <= one.arrived <= other.moments[-1] for other in sent) for one in sent
    )
    assert open_most == 4


def test_requests_are_offered_at_the_rate_that_was_asked() -> None:
    with paced_server(Schedule(ttft_s=0.02, itl_s=0.001, num_chunks=2)) as server:
        target = Target(server.url, "paced")
        asks = [Ask([1, 2], 2)] * 60
        _, duration = asyncio.run(run_load(target, asks, Pace(rate=100.0, seed=3)))
        sent = server.sent()
    # Poisson gaps: as long as their mean on the whole, and not even.
    assert duration == pytest.approx(0.6 + 0.021, abs=0.03)
    arrivals = [one.arrived for one in sent]
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert 0.6 < statistics.pstdev(gaps) / statistics.fmean(gaps) < 1.5


def one_of(stream: bytes, *, is_chat: bool = False) -> Outcome:
    """Send one request to a server that answers with these bytes and closes."""

    async def ask(url: str) -> Outcome:
        async with new_session() as session:
            return await send(session, Target(url, "fake", is_chat), Ask("?", 4))

    with FakeServer(lambda request: Action(raw=HEAD + stream)) as server:
        return asyncio.run(ask(server.url))


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(words: str) -> bytes:
    return event({"choices": [{"index": 0, "text": words}]})


def delta(**fields: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}})


def test_odd_but_whole_streams_are_read() -> None:
    marked = b": ping\n\nid: 7\nevent: token\n" + text("a") + text("b") + USAGE
    for end in (b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]"):
        outcome = one_of(marked + end)
        assert (outcome.error, outcome.text, outcome.num_output) == ("", "ab", 9)
        assert len(outcome.itls) == 1
    unnamed = event({"choices": [{"text": "a"}], "error": None}) + b"data: [DONE]\n\n"
    assert (one_of(unnamed).error, one_of(unnamed).num_output) == ("", 1)


def test_thoughts_and_calls_are_tokens_and_the_role_is_none() -> None:
    stream = delta(role="assistant", content="") + delta(reasoning_content="hm")
    stream += delta(reasoning="so", content=None) + delta(content="4")
    stream += delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]) + delta()
    outcome = one_of(stream + USAGE + b"data: [DONE]\n\n", is_chat=True)
    assert (outcome.error, outcome.text) == ("", "hmso4")
    assert len(outcome.itls) == 3


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (text("a"), "the stream ended early"),
        (USAGE + b"data: [DONE]\n\n", "no token came"),
        (text("a") + event({"error": {"message": "no luck"}}), "no luck"),
        (text("a") + event([1]), "no chunk of a stream: [1]"),
        (event({"choices": [{"index": 0}]}), "no chunk of a stream"),
        (event({"choices": [], "usage": "much"}), "no chunk of a stream"),
        (b"data: {broken\n\n", "JSONDecodeError"),
    ],
)
def test_a_broken_stream_is_a_failed_request_and_not_the_end(stream: bytes, error: str) -> None:
    assert error in one_of(stream).error


def test_the_peak_counts_tokens_and_not_chunks() -> None:
    outcome = Outcome(start=1.0, ttft=0.1, itls=[0.1] * 4, latency=0.5, num_input=2, num_output=20)
    assert summarise([outcome], 0.5).peak_output == 20
