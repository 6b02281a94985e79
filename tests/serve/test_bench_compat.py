"""`moeserve bench compat` against scripted servers: what it finds, what it prints, how it ends."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import EOS, INFO, FakeEngine, config_for_tests, live_server, service_for

from moeserve.__main__ import main
from moeserve.bench.compat import Choice, Reply, compare, logprob_gap, table
from moeserve.bench.compat_load import PER_KIND, Probe, make_probes
from moeserve.engine.request import Request
from moeserve.server.tokenizer import load_tokenizer
from moeserve.tiny import model_dir

TOKENIZER = load_tokenizer(model_dir())
VOCAB = len(TOKENIZER.table)


def answer(request: Request) -> list[int]:
    """Some tokens that depend on the prompt alone."""
    first = sum(request.prompt_ids) % 200 + 300
    return [first, first + 1, first + 2, EOS]


def run(
    respond: Sequence[object], *arguments: str, dies_after: int = 0
) -> tuple[int, list[FakeEngine]]:
    """Serve one engine for each script and compare them; returns the exit status."""
    info = replace(INFO, vocab_size=VOCAB, eos_token_ids=(EOS,))
    engines = [FakeEngine(respond=script, info=info) for script in respond]  # type: ignore[arg-type]
    config = config_for_tests(served_names=("m",))
    with ExitStack() as stack:
        urls = [
            stack.enter_context(live_server(service_for(engine, TOKENIZER, config)))
            for engine in engines
        ]
        if dies_after:
            last = engines[-1]

            def fail(request: Request) -> str:
                return "gone" if len(last.seen) > dies_after else ""

            last.fail = fail
        given = [word for url in urls for word in ("--base-url", url)]
        status = main(["bench", "compat", *given, "--model", "m", *arguments])
    return status, engines


def test_two_equal_servers_have_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    status, engines = run([answer, answer])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert len(lines) == 2 + 20 + 1  # head, a row for each kind, all
    assert lines[-1].startswith("| all (200) | 200 | 200 | 200 | 200 |")
    # Both were asked the same: what was refused reached neither.
    assert sorted(r.prompt_ids for r in engines[0].seen) == sorted(
        r.prompt_ids for r in engines[1].seen
    )
    assert len(engines[0].seen) > 200


def test_unequal_texts_are_shown_where_they_part_and_end_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(request: Request) -> list[int]:
        tokens = answer(request)
        if request.sampling.ignore_eos:  # one kind of request alone
            tokens[1] += 7
        return tokens

    saved = tmp_path / "differences.json"
    status, _ = run([answer, other], "--save-result", str(saved))
    output = capsys.readouterr().out
    assert status == 1
    assert "| ignore_eos (10) | 0 | 0 | 10 | 10 |" in output
    assert "| echo (10) | 10 | 10 | 10 | 10 |" in output
    assert "- ignore_eos, request 9: text: [0] " in output
    rows = json.loads(saved.read_text())
    texts = [row for row in rows if row["kind"] == "ignore_eos" and row["name"] == "text"]
    assert len(texts) == PER_KIND
    for row in texts:
        assert row["body"]["ignore_eos"] is True
        assert row["ours"] != row["theirs"]


def test_a_server_that_dies_half_way_is_a_difference_of_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _ = run([answer, answer], "--max-concurrency", "1", dies_after=60)
    output = capsys.readouterr().out
    assert status == 1
    # A whole reply tells by its status, a stream by an error in it and no end.
    assert "status: 200 / 500" in output
    assert "gone" in output
    first = next(line for line in output.splitlines() if line.startswith("| text prompt"))
    assert not first.startswith("| text prompt, the field's stops (10) | 10 |")


def test_a_server_that_is_not_there_is_an_error_with_its_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    urls = ["--base-url", "http://127.0.0.1:9"] * 2
    assert main(["bench", "compat", *urls]) == 2
    assert "http://127.0.0.1:9: ClientConnectorError" in capsys.readouterr().err


def test_one_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compat", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "--base-url: want two, got 1" in capsys.readouterr().err


def test_probes_are_two_hundred_different_ones_and_the_same_each_time() -> None:
    probes = make_probes(TOKENIZER)
    assert len(probes) == 200
    assert probes == make_probes(TOKENIZER)
    assert len({json.dumps(probe.body) + probe.path for probe in probes}) == 200
    assert all(probe.body.get("temperature") == 0 or "top_k" in probe.body or "n" in probe.body
               or probe.kind == "refused" for probe in probes)  # fmt: skip


def reply(text: str = "ab", **fields: object) -> Reply:
    choice = Choice(text=text, finish_reason="stop", logprobs=[-0.5], tokens=["ab"])
    for name, value in fields.items():
        setattr(choice, name, value)
    return Reply(200, {0: choice}, (1, 2, 3))


def test_each_field_that_differs_is_named() -> None:
    same = reply()
    assert list(compare(0, same, reply())) == []
    assert [d.name for d in compare(0, same, Reply(400, error="no"))] == ["status"]
    assert [d.name for d in compare(0, same, Reply(200, {}, (1, 2, 3)))] == ["choices"]
    assert [d.name for d in compare(0, same, replace(reply(), usage=(1, 2, 4)))] == ["usage"]
    assert [d.name for d in compare(0, same, reply(finish_reason="length"))] == ["finish_reason"]
    assert [d.name for d in compare(0, same, reply(stop_reason="x"))] == ["stop_reason"]
    assert [d.name for d in compare(0, same, reply(tokens=["a", "b"]))] == ["tokens"]
    assert [d.name for d in compare(0, same, reply(logprobs=[-0.5009]))] == []
    assert [d.name for d in compare(0, same, reply(logprobs=[-0.5011]))] == ["logprobs"]
    (text,) = compare(7, reply("a" * 50 + "b"), reply("a" * 50 + "c"))
    assert (text.probe, text.ours, text.theirs) == (
        7, "[38] 'aaaaaaaaaaaab'", "[38] 'aaaaaaaaaaaac'",
    )  # fmt: skip


def test_gaps_of_log_probabilities() -> None:
    one = Choice(logprobs=[None, -1.0], alternatives=[{}, {"a": -1.0, "b": -2.0}])
    tie = Choice(logprobs=[None, -1.25], alternatives=[{}, {"a": -1.0, "c": -2.0}])
    assert logprob_gap(one, one) == 0.0
    # Two alternatives that tie for the last place may differ; the numbers of the rest count.
    assert logprob_gap(one, tie) == 0.25
    assert logprob_gap(one, Choice(logprobs=[-3.0, -1.0])) == math.inf
    assert logprob_gap(one, Choice(logprobs=[None])) == math.inf


def test_the_table_counts_by_kind() -> None:
    probes = [Probe("x", "/", {}), Probe("x", "/", {}), Probe("y", "/", {})]
    ours = [reply(), reply(), reply()]
    theirs = [reply(), reply("ac"), reply(logprobs=[-0.5004])]
    found = [list(compare(i, *pair)) for i, pair in enumerate(zip(ours, theirs, strict=True))]
    assert table(probes, [ours, theirs], found).splitlines()[2:] == [
        "| x (2) | 1 | 1 | 2 | 2 | 0.0e+00 |",
        "| y (1) | 1 | 1 | 1 | 1 | 4.0e-04 |",
        "| all (3) | 2 | 2 | 3 | 3 | 4.0e-04 |",
    ]
