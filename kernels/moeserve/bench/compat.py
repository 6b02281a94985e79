"""`moeserve bench compat`: the same 200 greedy requests to two servers, and where they differ.

Receives argv with two base URLs (the second is the reference); prints a Markdown table by kind of
request and every difference, and returns 1 if there is one. Requests are `compat_load.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from moeserve.bench.compat_load import Probe, make_probes
from moeserve.bench.serve_client import new_session
from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError
from moeserve.server.tokenizer import load_tokenizer
from moeserve.tiny import MODEL_NAME, model_dir

# Two float32 engines that add in another order differ by some 1e-5 in a log-probability.
LOGPROB_TOLERANCE = 1e-3
_REQUEST_TIMEOUT_S = 600.0
_MOST_SHOWN = 200


@dataclass
class Choice:
    """One choice of a reply, streamed or not."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: object = None
    logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    alternatives: list[dict[str, float]] = field(default_factory=list)
    prompt_alternatives: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Reply:
    """What a server said, without ids and times."""

    status: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Difference:
    """One field in which two replies differ."""

    probe: int
    name: str
    ours: str
    theirs: str


def main(argv: Sequence[str]) -> int:
    """Compare two servers."""
    parser = CommandParser("bench compat")
    parser.add_argument("--base-url", action="append", required=True, help="twice; last: reference")
    parser.add_argument("--model", default=MODEL_NAME, help="name in requests")
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--save-result", type=Path, help="JSON with both sides of each difference")
    options = parser.parse_args(list(argv))
    if len(options.base_url) != 2:
        raise UsageError(f"--base-url: want two, got {len(options.base_url)}")
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    probes = make_probes(load_tokenizer(model_dir()))
    sides = [
        await _ask_all(url.rstrip("/"), probes, options.model, options.max_concurrency)
        for url in options.base_url
    ]
    differences = [list(compare(i, *pair)) for i, pair in enumerate(zip(*sides, strict=True))]
    print(table(probes, sides, differences))
    shown = [difference for found in differences for difference in found]
    for one in shown[:_MOST_SHOWN]:
        print(f"- {probes[one.probe].kind}, request {one.probe}: {one.name}: "
              f"{one.ours} / {one.theirs}")  # fmt: skip
    if options.save_result:
        rows = [
            {"kind": probes[d.probe].kind, "body": probes[d.probe].body, **vars(d)} for d in shown
        ]
        options.save_result.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if shown else 0


async def _ask_all(url: str, probes: list[Probe], model: str, max_concurrency: int) -> list[Reply]:
    gate = asyncio.Semaphore(max_concurrency)
    async with new_session() as session:

        async def ask(probe: Probe) -> Reply:
            async with gate:
                return await _ask(session, url, probe, model)

        return list(await asyncio.gather(*map(ask, probes)))


async def _ask(session: aiohttp.ClientSession, url: str, probe: Probe, model: str) -> Reply:
    body = {"model": model, **probe.body}
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    try:
        async with session.post(url + probe.path, json=body, timeout=timeout) as response:
            raw = (await response.read()).decode("utf-8")
            status = response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UsageError(f"{url}: {type(error).__name__}: {error}") from None
    if status != 200:
        return Reply(status, error=raw[:300])
    reply = Reply(status)
    for part in _parts(raw, is_stream=bool(probe.body.get("stream"))):
        if usage := part.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            reply.usage = tuple(usage[name] for name in names)
        for choice in part.get("choices", []):
            if "prompt_logprobs" not in probe.body:
                # vLLM sends it with echo as well, as a second copy.
                choice.pop("prompt_logprobs", None)
            _add(reply.choices.setdefault(choice["index"], Choice()), choice)
    return reply


def _parts(raw: str, *, is_stream: bool) -> Iterator[dict[str, Any]]:
    if not is_stream:
        yield json.loads(raw)
        return
    for line in raw.splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


def _add(choice: Choice, part: dict[str, Any]) -> None:
    message = part.get("message") or part.get("delta") or {}
    choice.text += part.get("text") or message.get("content") or ""
    choice.finish_reason = part.get("finish_reason") or choice.finish_reason
    choice.stop_reason = part.get("stop_reason") or choice.stop_reason
    logprobs = part.get("logprobs") or {}
    for item in logprobs.get("content") or []:
        choice.tokens.append(item["token"])
        choice.logprobs.append(item["logprob"])
        choice.alternatives.append({top["token"]: top["logprob"] for top in item["top_logprobs"]})
    if "token_logprobs" in logprobs:
        choice.tokens += logprobs["tokens"]
        choice.logprobs += logprobs["token_logprobs"]
        choice.offsets += logprobs["text_offset"]
        choice.alternatives += [top or {} for top in logprobs["top_logprobs"] or []]
    for position in part.get("prompt_logprobs") or []:
        entries = position or {}
        choice.prompt_alternatives.append({key: item["logprob"] for key, item in entries.items()})


def compare(number: int, ours: Reply, theirs: Reply) -> Iterator[Difference]:
    """Differences between two replies to one request."""
    if ours.status != theirs.status:
        told = [f"{side.status} {side.error[:160]}".strip() for side in (ours, theirs)]
        yield Difference(number, "status", *told)
        return
    if sorted(ours.choices) != sorted(theirs.choices):
        told = [str(sorted(side.choices)) for side in (ours, theirs)]
        yield Difference(number, "choices", *told)
        return
    if ours.usage != theirs.usage:
        yield Difference(number, "usage", str(ours.usage), str(theirs.usage))
    for index in sorted(ours.choices):
        a, b = ours.choices[index], theirs.choices[index]
        for name in ("text", "finish_reason", "stop_reason", "tokens", "offsets"):
            left, right = getattr(a, name), getattr(b, name)
            if left != right:
                yield Difference(number, name, *_around(left, right))
        if not _is_close(a, b):
            told = [str(side.logprobs or side.alternatives)[:300] for side in (a, b)]
            yield Difference(number, "logprobs", *told)


def _around(left: Any, right: Any) -> tuple[str, str]:
    """Both values from shortly before where they part."""
    if not (isinstance(left, (str, list)) and isinstance(right, type(left))):
        return repr(left), repr(right)
    shorter = min(len(left), len(right))
    start = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    start = max(start - 12, 0)
    return tuple(f"[{start}] {side[start : start + 40]!r}" for side in (left, right))  # type: ignore[return-value]


def _is_close(a: Choice, b: Choice) -> bool:
    return logprob_gap(a, b) <= LOGPROB_TOLERANCE


def logprob_gap(a: Choice, b: Choice) -> float:
    """Largest difference of two log-probabilities; infinite where only one side has a number."""
    gaps = [0.0 if len(a.logprobs) == len(b.logprobs) else math.inf]
    for left, right in zip(a.logprobs, b.logprobs, strict=False):
        gaps.append(_gap(left, right))
    for ours, theirs in (
        (a.alternatives, b.alternatives),
        (a.prompt_alternatives, b.prompt_alternatives),
    ):
        gaps += [0.0 if len(ours) == len(theirs) else math.inf]
        for tops, others in zip(ours, theirs, strict=False):
            # Two tokens that tie for the last place may stand in either.
            gaps += [0.0 if len(tops) == len(others) else math.inf]
            gaps += [_gap(tops[key], others[key]) for key in tops.keys() & others.keys()]
    return max(gaps)


def _gap(left: float | None, right: float | None) -> float:
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    return abs(left - right)


def table(
    probes: list[Probe], sides: list[list[Reply]], differences: list[list[Difference]]
) -> str:
    """Counts by kind, as Markdown."""
    lines = ["| requests | equal | texts | finish | usage | largest log-probability gap |"]
    lines.append("|---|---|---|---|---|---|")
    totals = [0, 0, 0, 0, 0]
    worst = 0.0
    for kind in dict.fromkeys(probe.kind for probe in probes):
        members = [i for i, probe in enumerate(probes) if probe.kind == kind]
        counts = [len(members), sum(not differences[i] for i in members)]
        for names in (("text",), ("finish_reason", "stop_reason"), ("usage",)):
            faults = ("status", "choices", *names)
            counts.append(sum(not any(d.name in faults for d in differences[i]) for i in members))
        gap = _worst_gap([(sides[0][i], sides[1][i]) for i in members])
        worst = max(worst, gap or 0.0)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        lines.append(_line(kind, counts, gap))
    return "\n".join([*lines, _line("all", totals, worst)])


def _worst_gap(pairs: list[tuple[Reply, Reply]]) -> float | None:
    """Largest gap between replies with equal tokens, None where nothing was reported."""
    gaps = [
        logprob_gap(ours.choices[index], theirs.choices[index])
        for ours, theirs in pairs
        for index in ours.choices.keys() & theirs.choices.keys()
        if ours.choices[index].logprobs or ours.choices[index].prompt_alternatives
    ]
    return max(gaps) if gaps else None


def _line(kind: str, counts: list[int], gap: float | None) -> str:
    cells = [f"{kind} ({counts[0]})", *map(str, counts[1:]), "" if gap is None else f"{gap:.1e}"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
