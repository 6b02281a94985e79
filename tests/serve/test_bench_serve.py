from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from fake_engine import EOS, FakeEngine, live_server, piece_tokenizer, service_for

from moeserve.__main__ import main
from moeserve.bench.serve_client import Outcome
from moeserve.bench.serve_load import LoadOptions, make_load
from moeserve.bench.serve_report import percentile, report, side_by_side, summarise, to_json
from moeserve.errors import UsageError
from moeserve.server.tokenizer import load_tokenizer
from moeserve.tiny import model_dir

TOKENIZER = piece_tokenizer()
# Of the seed's report, in order.
LINES = [
    "Successful requests:",
    "Failed requests:",
    "Benchmark duration (s):",
    "Total input tokens:",
    "Total generated tokens:",
    "Request throughput (req/s):",
    "Output token throughput (tok/s):",
    "Peak output token throughput (tok/s):",
    "Peak concurrent requests:",
    "Total token throughput (tok/s):",
    "Time to First Token",
    "Mean TTFT (ms):",
    "Median TTFT (ms):",
    "P99 TTFT (ms):",
    "Time per Output Token (excl. 1st token)",
    "Mean TPOT (ms):",
    "Median TPOT (ms):",
    "P99 TPOT (ms):",
    "Inter-token Latency",
    "Mean ITL (ms):",
    "Median ITL (ms):",
    "P99 ITL (ms):",
]


def labels(text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        bare = line.strip("-=")
        if bare and "Serving Benchmark Result" not in bare:
            found.append(bare.split("  ")[0].strip())
    return found


def value_of(text: str, label: str) -> float:
    line = next(line for line in text.splitlines() if line.startswith(label))
    return float(line.removeprefix(label))


def outcome(start: float, gaps: list[float]) -> Outcome:
    return Outcome(
        start=start, ttft=0.1, itls=gaps, latency=0.1 + sum(gaps), num_input=4,
        num_output=len(gaps) + 1,
    )  # fmt: skip


def test_figures_by_hand() -> None:
    outcomes = [outcome(10.0, [0.1] * 9), outcome(10.5, [0.2] * 4), Outcome(error="gone")]
    summary = summarise(outcomes, 2.0, (50, 99))
    assert (summary.num_input, summary.num_output) == (8, 15)
    assert summary.output_rate == 7.5
    assert summary.total_rate == 11.5
    assert summary.spreads["tpot"].mean == pytest.approx(150)
    assert summary.spreads["itl"].mean == pytest.approx(1e3 * (0.9 + 0.8) / 13)
    # Second 0 holds nine tokens of the first and three of the second.
    assert (summary.peak_output, summary.peak_concurrent) == (12, 2)
    text = report(summary)
    assert value_of(text, "Successful requests:") == 2
    assert value_of(text, "Failed requests:") == 1
    assert to_json(summary)["errors"] == ["", "", "gone"]


def test_report_has_the_seed_s_lines_in_order() -> None:
    assert labels(report(summarise([outcome(0.0, [0.1])], 1.0))) == LINES


def test_percentiles_interpolate() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([5], 99) == 5
    assert percentile([], 99) == 0
    values = [float(v) for v in range(101)]
    assert percentile(values, 99) == statistics.quantiles(values, n=100, method="inclusive")[98]


def test_nothing_answered_is_zeros_and_not_an_exception() -> None:
    text = report(summarise([Outcome(error="x")], 1.0))
    assert value_of(text, "Total generated tokens:") == 0


def test_side_by_side_ratios_are_against_the_last() -> None:
    fast = summarise([outcome(0.0, [0.1] * 9)], 1.0)
    slow = summarise([outcome(0.0, [0.2] * 9)], 2.0)
    table = side_by_side(["a", "b"], [fast, slow])
    assert "| Output tok/s | 10.00 (2.00×) | 5.00 (1.00×) |" in table
    assert "| Mean TPOT ms | 100.00 (2.00×) | 200.00 (1.00×) |" in table


def test_random_load_is_exact_and_repeatable() -> None:
    options = LoadOptions("random", 20, seed=3, input_len=10, output_len=6, range_ratio=0.5)
    asks = make_load(options)
    assert asks == make_load(options)
    assert {len(ask.prompt) for ask in asks} <= set(range(5, 16))
    assert len({len(ask.prompt) for ask in asks}) > 1
    tiny = load_tokenizer(model_dir())
    texts = make_load(LoadOptions("random", 10, input_len=50, vocab_size=1024, tokenizer=tiny))
    lengths = [len(tiny.encode(str(ask.prompt))) for ask in texts]
    assert all(abs(length - 50) <= 2 for length in lengths)


def test_questions_have_their_shots_and_stops(tmp_path: Path) -> None:
    ask = make_load(LoadOptions("minigsm", 1, output_len=256))[0]
    assert isinstance(ask.prompt, str)
    assert ask.prompt.count("Question: ") == 6
    assert ask.prompt.endswith("\nAnswer:")
    assert ask.stops == ("Question", "Assistant:", "<|separator|>")
    assert make_load(LoadOptions("minigsm", 1, ignore_eos=True))[0].stops == ()
    with pytest.raises(UsageError, match=r"--dataset-path"):
        make_load(LoadOptions("gsm8k", 1))
    for name in ("train", "test"):
        row = json.dumps({"question": f"{name}?", "answer": "#### 1"})
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    asks = make_load(LoadOptions("gsm8k", 3, dataset_path=str(tmp_path)))
    assert [ask.prompt for ask in asks] == [
        "Question: train?\nAnswer: #### 1\n\nQuestion: test?\nAnswer:"
    ] * 3


def test_gsm8k_shaped_ids_begin_alike_and_need_no_tokenizer() -> None:
    options = LoadOptions("gsm8k-shaped", 20, seed=3, output_len=7, vocab_size=151_936)
    asks = make_load(options)
    assert asks == make_load(options)
    assert len({tuple(ask.prompt[:650]) for ask in asks}) == 1
    assert len({tuple(ask.prompt) for ask in asks}) == 20
    assert all(710 <= len(ask.prompt) <= 750 for ask in asks)
    assert all(isinstance(i, int) and 1000 <= i < 150_000 for ask in asks for i in ask.prompt)
    assert {(ask.max_tokens, ask.stops) for ask in asks} == {(7, ())}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(["bench", "serve", *argv])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_against_a_server_whose_speed_is_known(capsys, tmp_path: Path, backend: str) -> None:
    engine = FakeEngine(respond=lambda request: [65] * 50, step_s=0.02)
    with live_server(service_for(engine, TOKENIZER)) as url:
        argv = ["--base-url", url, "--num-prompts", "12", "--num-warmups", "3", "--ignore-eos"]
        argv += ["--random-output-len", "10", "--save-result", "--result-filename", "out.json"]
        argv += ["--result-dir", str(tmp_path), "--backend", backend, "--max-concurrency", "6"]
        if backend == "openai":
            argv += ["--random-input-len", "5", "--vocab-size", "200"]
        else:
            argv += ["--dataset", "minigsm", "--num-shots", "0", "--output-len", "10"]
        status, text = run(capsys, *argv)
    assert status == 0
    assert len(engine.seen) == 15
    assert all(request.sampling.ignore_eos for request in engine.seen)
    assert value_of(text, "Successful requests:") == 12
    assert value_of(text, "Total generated tokens:") == 120
    assert value_of(text, "Mean TPOT (ms):") > 18
    assert value_of(text, "Peak concurrent requests:") <= 12
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["completed"] == 12
    assert saved["output_lens"] == [10] * 12
    if backend == "openai":
        assert saved["total_input_tokens"] == 60
    assert [len(gaps) for gaps in saved["itls"]] == [9] * 12
    assert 0 < saved["client_cpu_share"] < 1
    assert set(saved) >= {
        "duration", "failed", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput", "input_lens", "ttfts", "start_times",
        "generated_texts", "errors", "max_output_tokens_per_s", "max_concurrent_requests",
        "mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99_e2el_ms",
    }  # fmt: skip


def test_two_servers_and_failures_are_shown(capsys) -> None:
    quick = FakeEngine(respond=lambda request: [65, 66, EOS])
    broken = FakeEngine(fail=lambda request: "no luck" if request.prompt_ids[0] > 100 else "")
    with (
        live_server(service_for(quick, TOKENIZER)) as one,
        live_server(service_for(broken, TOKENIZER)) as two,
    ):
        argv = ["--base-url", one, "--base-url", f"{two}/v1", "--num-prompts", "20"]
        status, text = run(capsys, *argv, "--random-input-len", "3", "--request-rate", "500")
    assert status == 1
    assert "| Output tok/s |" in text
    assert value_of(text.split(two)[1], "Failed requests:") > 0


def test_command_line_faults_are_usage_errors(capsys) -> None:
    assert main(["bench", "serv"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
    assert main(["bench", "serve", "--request-rate", "0"]) == 2
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "give --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-warmups", "-1"], "--num-warmups -1: want at least 0"),
        (["--output-len", "0"], "--output-len 0: want at least 1"),
        (["--max-concurrency", "-2"], "--max-concurrency -2: want at least 0"),
        (["--metric-percentiles", "50,200"], "--metric-percentiles 50,200: want numbers above 0"),
        (["--metric-percentiles", "p99"], "--metric-percentiles p99: want numbers above 0"),
        (["--num-promts", "3"], "--num-promts"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_request(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert main(["bench", "serve", *argv]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert len(printed.splitlines()) <= 2
