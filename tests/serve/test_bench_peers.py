"""`moeserve bench peers` with scripted servers: tables, JSON, what goes wrong."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from moeserve.__main__ import main
from moeserve.bench import peers
from moeserve.bench.peer_server import PeerCommand, vllm_command
from moeserve.bench.serve_load import LoadOptions
from moeserve.errors import UsageError

SUPPORT = Path(__file__).parents[1] / "support"
# A server with a scripted engine: a token each `step` seconds; it ends itself after some requests.
SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
import asyncio
from fake_engine import EOS, FakeEngine, config_for_tests, piece_tokenizer, service_for
from moeserve.server.launch import HttpServer, listen, uvicorn_config
from moeserve.tiny import MODEL_NAME
port, step, most = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
engine = FakeEngine(step_s=step)
def respond(request):
    if most and len(engine.seen) > most:
        os._exit(3)
    return [65] * 4 + [EOS]
engine.respond = respond
config = config_for_tests(served_names=(MODEL_NAME,))
sock = listen("127.0.0.1", port)
server = HttpServer(uvicorn_config(service_for(engine, piece_tokenizer(), config)))
asyncio.run(server.serve(sockets=[sock]))
"""


def command(name: str, step_s: float = 0.0, most: int = 0) -> PeerCommand:
    argv = (sys.executable, "-c", SCRIPT, str(SUPPORT), "{port}", str(step_s), str(most))
    return PeerCommand(name, argv, {})


@pytest.fixture(autouse=True)
def small_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoadOptions("random", 4, input_len=4, output_len=4, ignore_eos=True, vocab_size=200)
    loads = {"one": peers.Load("one at a time", options, 1), "many": peers.Load("four", options, 4)}
    monkeypatch.setattr(peers, "LOADS", loads)
    monkeypatch.setattr(peers, "moeserve_command", lambda: command("ours 1.0", step_s=0.002))
    monkeypatch.setattr(peers, "vllm_command", lambda: command("theirs 2.0", step_s=0.02))


def rows(output: str) -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in cells}


def test_table_and_json_of_two_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "rounds.json"
    argv = ["bench", "peers", "--rounds", "2", "--loads", "one", "--save-result", str(saved)]
    assert main(argv) == 0
    output = capsys.readouterr().out
    assert "|  | ours 1.0 | theirs 2.0 | ratio |" in output
    assert "| **one at a time** |" in output
    assert "four" not in output
    table = rows(output)
    ours, theirs, ratio = table["mean TPOT, ms"]
    # The other takes 20 ms a token, on purpose.
    assert float(theirs) >= 20
    assert float(ours) < float(theirs)
    assert float(ratio.removesuffix("×")) > 1
    assert float(table["output tok/s"][2].removesuffix("×")) > 1
    told = json.loads(saved.read_text())
    assert [len(side) for side in told["one"]] == [2, 2]  # servers, then rounds
    for side, least_ms in zip(told["one"], (0, 20), strict=True):
        for figures in side:
            assert figures["mean_tpot_ms"] >= least_ms
            assert set(figures) == {
                "output_tok_s", "req_s", "mean_ttft_ms", "mean_tpot_ms", "cpu_ms_per_token",
            }  # fmt: skip
    assert len(told["startup_s"]) == len(told["resident_mib"]) == 2
    assert all(mib > 10 for mib in told["resident_mib"])


def test_a_peer_that_is_not_there_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env").symlink_to(str(shutil.which("env")))  # what starts a server
    monkeypatch.setattr(peers, "vllm_command", vllm_command)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "peers", "--rounds", "1", "--loads", "many"]) == 0
    output = capsys.readouterr()
    assert "vLLM is left out: no vllm on the PATH" in output.err
    assert "|  | ours 1.0 |" in output.out
    assert "| **four** |" in output.out
    assert "ratio" not in output.out


def test_a_server_that_dies_in_the_middle_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "vllm_command", lambda: command("theirs 2.0", most=6))
    assert main(["bench", "peers", "--rounds", "3", "--loads", "one"]) != 0
    error = capsys.readouterr().err
    assert "theirs 2.0: " in error
    assert "failed" in error


def test_a_server_that_never_starts_is_named_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (sys.executable, "-c", "raise SystemExit('no such model')")
    monkeypatch.setattr(peers, "moeserve_command", lambda: PeerCommand("ours 1.0", argv, {}))
    assert main(["bench", "peers", "--only-moeserve"]) != 0
    error = capsys.readouterr().err
    assert "ours 1.0 ended with status 1" in error
    assert "no such model" in error


def test_unknown_loads_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--loads", "one,few"]) == 2
    assert "--loads few: want some of one, many" in capsys.readouterr().err


def test_numbers_and_ratios() -> None:
    assert peers._number(1234.5) == "1,234"
    assert peers._number(12.34) == "12.3"
    assert peers._number(1.234) == "1.23"
    assert peers._line("x", [10, 5], is_more_better=True) == "| x | 10.0 | 5.00 | 2.00× |"
    assert peers._line("x", [10, 5], is_more_better=False) == "| x | 10.0 | 5.00 | 0.50× |"
    assert peers._line("x", [0, 5], is_more_better=False) == "| x | 0.00 | 5.00 |  |"
    assert peers._line("x", [10], is_more_better=True) == "| x | 10.0 |"
    with pytest.raises(UsageError):
        peers.main(["--loads", "nothing"])
