"""`moeserve bench startup`: figures from known streams, and a whole start of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.bench.serve_client import Outcome
from moeserve.bench.startup import full_speed, main
from moeserve.errors import UsageError


def test_full_speed_is_the_first_window_near_the_later_median() -> None:
    # One token in 50 ms for a second, then one in 5 ms for four.
    itls = [0.05] * 20 + [0.005] * 800
    at, speed = full_speed([Outcome(start=10.0, ttft=0.5, itls=itls)] * 3)
    assert speed == pytest.approx(600.0, rel=0.1)
    assert at == pytest.approx(11.5, abs=0.11)
    with pytest.raises(UsageError, match="output-len"):
        full_speed([Outcome(start=1.0, ttft=0.1)])


def test_a_start_of_the_embedded_model_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "startup.json"
    argv = ["moeserve/minigsm-tiny", "--max-model-len", "128", "--device", "cpu"]
    argv += ["--num-prompts", "4", "--output-len", "40", "--json", str(file)]
    log = tmp_path / "server.log"
    assert main([*argv, "--server-log", str(log)]) == 0
    assert "ready after" in log.read_text()
    found = json.loads(file.read_text())
    assert 0 < found["ready_s"] < found["first_reply_s"] < found["full_speed_s"]
    assert found["tokens_per_s"] > 0
    assert "first reply after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts 0: at least 1"),
        (["--output-len", "1"], "--output-len 1: 2 or more"),
        (["--timeout-s", "0"], "--timeout-s 0.0: more than 0"),
        (["--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json: no folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_server_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.bench.startup.subprocess.Popen", None)
    with pytest.raises(UsageError, match=message):
        main(["moeserve/minigsm-tiny", *words])


def test_a_server_that_ends_is_said_with_its_last_lines() -> None:
    with pytest.raises(UsageError, match="no-such-model"):
        main(["no-such-model", "--num-prompts", "1"])
    with pytest.raises(UsageError, match="MODEL comes first"):
        main(["--num-prompts", "1"])
