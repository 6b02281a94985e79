"""`moeserve bench serve`: how fast an OpenAI server answers a load, or several the same one.

Receives argv; prints the report and returns the exit status (1 if any request failed). Prompts are
`serve_load.py`, sending is `serve_client.py`, figures are `serve_report.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from moeserve.bench.serve_client import Outcome, Pace, Target, new_session, run_load
from moeserve.bench.serve_load import DATASETS, Ask, LoadOptions, make_load
from moeserve.bench.serve_report import Summary, report, side_by_side, summarise, to_json
from moeserve.command_parser import CommandParser
from moeserve.errors import UsageError
from moeserve.server.tokenizer import Tokenizer, load_tokenizer

_METRICS = ("ttft", "tpot", "itl", "e2el")
# Random ids without any knowledge of the vocabulary stay below this.
_SAFE_VOCAB = 1000
# One process reads every stream: above this share of a core it may be what is measured.
_BUSY_SHARE = 0.9


def main(argv: Sequence[str]) -> int:
    """Run the benchmark of one command line."""
    options = _parser().parse_args(list(argv))
    _check(options)
    return asyncio.run(_run(options))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("bench serve")
    add = parser.add_argument
    add("--base-url", action="append", help="server; repeat to compare several (ratios: last = 1)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--backend", choices=("openai", "openai-chat", "vllm"), default="openai")
    add("--model", help="name in requests; default: the first that the server lists")
    add("--api-key", default="")
    add("--dataset-name", "--dataset", dest="dataset", choices=DATASETS, default="random")
    add("--dataset-path", default="", help="folder with GSM8K's train.jsonl and test.jsonl")
    add("--num-prompts", type=int, default=1000)
    add("--random-input-len", "--input-len", dest="input_len", type=int, default=1024)
    add("--random-output-len", "--output-len", dest="output_len", type=int, help="default 128; "
        "256 for questions")  # fmt: skip
    add("--random-range-ratio", dest="range_ratio", type=float, default=0.0)
    add("--num-shots", type=int, default=5, help="of gsm8k and minigsm")
    add("--tokenizer", default="", help="model folder: random prompts are sent as text")
    add("--vocab-size", type=int, default=0, help="of random ids; default: asked of the server")
    add("--request-rate", type=float, default=math.inf, help="requests a second; inf: at once")
    add("--max-concurrency", type=int, default=0, help="open requests at most; 0: no bound")
    add("--num-warmups", type=int, default=0)
    add("--ignore-eos", action="store_true")
    add("--temperature", type=float, default=0.0)
    add("--extra-body", type=json.loads, default={}, help="JSON laid over every request")
    add("--seed", type=int, default=0)
    add("--percentile-metrics", default="ttft,tpot,itl", help=f"of {','.join(_METRICS)}")
    add("--metric-percentiles", default="99")
    add("--save-result", action="store_true")
    add("--result-dir", type=Path, default=Path())
    add("--result-filename", default="")
    add("--disable-tqdm", action="store_true", help="no progress line")
    return parser


def _check(options: argparse.Namespace) -> None:
    least = {"num_prompts": 1, "input_len": 1, "output_len": 1, "num_shots": 0, "num_warmups": 0}
    for name, low in {**least, "max_concurrency": 0, "vocab_size": 0}.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError(f"--{name.replace('_', '-')} {value}: want at least {low}")
    _percentiles(options.metric_percentiles)
    if not options.request_rate > 0:
        raise UsageError(f"--request-rate {options.request_rate}: want more than 0, or inf")
    if not 0 <= options.range_ratio < 1:
        raise UsageError(f"--random-range-ratio {options.range_ratio}: want 0 to below 1")
    metrics = options.percentile_metrics.split(",")
    if not set(metrics) <= set(_METRICS):
        raise UsageError(f"--percentile-metrics {options.percentile_metrics}: of {_METRICS}")
    if not isinstance(options.extra_body, dict):
        raise UsageError("--extra-body: want a JSON object")


def _percentiles(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [math.nan]
    if not all(0 < share <= 100 for share in shares):
        raise UsageError(f"--metric-percentiles {text}: want numbers above 0 up to 100, e.g. 50,99")
    return shares


async def _run(options: argparse.Namespace) -> int:
    urls = options.base_url or [f"http://{options.host}:{options.port}"]
    targets = [await _target(url, options) for url in urls]
    asks = make_load(await _load_options(options, targets[0]))
    pace = Pace(options.request_rate, options.max_concurrency, options.seed)
    shares = _percentiles(options.metric_percentiles)
    summaries: list[Summary] = []
    for target in targets:
        if options.num_warmups:
            warm = [asks[place % len(asks)] for place in range(options.num_warmups)]
            await _checked_warm_up(target, warm, options.max_concurrency)
        tick = None if options.disable_tqdm else _Progress(len(asks))
        cpu_s = time.process_time()
        outcomes, duration = await run_load(target, asks, pace, tick)
        client_share = (time.process_time() - cpu_s) / duration
        summary = summarise(outcomes, duration, shares)
        summaries.append(summary)
        if len(targets) > 1:
            print(f"\n{target.base_url} ({target.model})")
        print(report(summary, options.percentile_metrics.split(",")))
        _print_errors(outcomes)
        if client_share > _BUSY_SHARE:
            print(f"the client was busy {client_share:.0%} of the time: a faster server would not "
                  "show", file=sys.stderr)  # fmt: skip
        if options.save_result:
            own = {**to_json(summary), "client_cpu_share": client_share}
            _save(options, target, own, len(targets) > 1)
    if len(targets) > 1:
        print("\n" + side_by_side(urls, summaries))
    return 1 if any(len(s.answered) < len(s.outcomes) for s in summaries) else 0


async def _target(url: str, options: argparse.Namespace) -> Target:
    extra: dict[str, object] = {"temperature": options.temperature}
    if options.ignore_eos:
        extra["ignore_eos"] = True
    target = Target(
        base_url=url.rstrip("/").removesuffix("/v1"),
        model=options.model or "",
        is_chat=options.backend == "openai-chat",
        api_key=options.api_key,
        extra={**extra, **options.extra_body},
    )
    if target.model:
        return target
    listed = await _get(target, "/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not models:
        raise UsageError(f"{url}: no server that lists its models answers there; give --model")
    model = str(models[0]["id"])
    return Target(target.base_url, model, target.is_chat, target.api_key, target.extra)


async def _get(target: Target, path: str) -> object:
    """Return the JSON at a path of the server, None if there is none."""
    try:
        async with (
            new_session() as session,
            session.get(target.base_url + path, headers=target.headers) as response,
        ):
            value: object = await response.json() if response.status == 200 else None
            return value
    except (aiohttp.ClientError, OSError, ValueError):
        return None


async def _load_options(options: argparse.Namespace, target: Target) -> LoadOptions:
    tokenizer: Tokenizer | None = None
    vocab_size = options.vocab_size
    if options.tokenizer:
        tokenizer = load_tokenizer(Path(options.tokenizer))
        vocab_size = vocab_size or len(tokenizer.table)
    if not vocab_size and options.dataset in ("random", "gsm8k-shaped"):
        info = await _get(target, "/tokenizer_info")
        known = info.get("vocab_size") if isinstance(info, dict) else None
        vocab_size = known if isinstance(known, int) else _SAFE_VOCAB
    default_output = 128 if options.dataset == "random" else 256
    return LoadOptions(
        dataset=options.dataset,
        num_prompts=options.num_prompts,
        seed=options.seed,
        input_len=options.input_len,
        output_len=options.output_len or default_output,
        range_ratio=options.range_ratio,
        dataset_path=options.dataset_path,
        num_shots=options.num_shots,
        ignore_eos=options.ignore_eos,
        vocab_size=vocab_size or _SAFE_VOCAB,
        tokenizer=tokenizer,
    )


async def _checked_warm_up(target: Target, asks: list[Ask], max_concurrency: int) -> None:
    outcomes, _ = await run_load(target, asks, Pace(max_concurrency=max_concurrency))
    if all(outcome.error for outcome in outcomes):
        raise UsageError(f"{target.url}: every warm-up failed, the first: {outcomes[0].error}")


class _Progress:
    """A line on stderr, rewritten at most four times a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = self._last = time.monotonic()

    def __call__(self, num_done: int) -> None:
        now = time.monotonic()
        is_last = num_done == self._total
        if not sys.stderr.isatty() or (now - self._last < 0.25 and not is_last):
            return
        self._last = now
        rate = num_done / max(now - self._start, 1e-9)
        end = "\n" if is_last else ""
        print(f"\r{num_done}/{self._total}  {rate:.1f} req/s", end=end, file=sys.stderr)


def _print_errors(outcomes: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for error in list(dict.fromkeys(errors))[:5]:
        print(f"failed ({errors.count(error)} times): {error}", file=sys.stderr)


def _save(
    options: argparse.Namespace, target: Target, own: dict[str, object], is_one_of_many: bool
) -> None:
    rate = options.request_rate
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "base_url": target.base_url,
        "model_id": target.model,
        "dataset_name": options.dataset,
        "num_prompts": options.num_prompts,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "max_concurrency": options.max_concurrency or None,
        "seed": options.seed,
        **own,
    }
    name = options.result_filename or f"{result['date']}-{target.model.replace('/', '-')}.json"
    path = options.result_dir / name
    if is_one_of_many:
        place = target.base_url.split("://")[-1].replace(":", "-").replace("/", "-")
        path = path.with_name(f"{path.stem}-{place}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"saved {path}", file=sys.stderr)
