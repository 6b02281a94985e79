"""Model folders whose small files are broken: each is named, with what is wrong in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fake_engine import config_for_tests
from run_helpers import wait_until

from moeserve.engine.config import EngineConfig
from moeserve.errors import Unsupported, UsageError
from moeserve.server.folder import read_folder, sampling_defaults_of
from moeserve.tiny import model_dir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(model_dir(), copy)
    return copy


def config_of(folder: Path, **server: object):
    return replace(config_for_tests(**server), engine=EngineConfig(str(folder)))


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("tokenizer.json", "", "not valid JSON"),
        ("tokenizer.json", "[]", "expected an object, got list"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "7", "expected an object, got int"),
        ("generation_config.json", "{", "not valid JSON"),
        ("generation_config.json", "[]", "expected an object, got list"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature: .*'hot'"),
        ("generation_config.json", '{"temperature": -1}', "temperature: .*-1"),
        ("generation_config.json", '{"top_p": 5}', "top_p: .*5"),
        ("generation_config.json", '{"top_k": 2.5}', "top_k: .*2.5"),
        ("generation_config.json", '{"repetition_penalty": 0}', "repetition_penalty: .*0"),
        ("generation_config.json", '{"max_new_tokens": 0}', "max_new_tokens: want at least 1"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, text: str, part: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(UsageError, match=part) as caught:
        read_folder(config_of(folder))
    assert str(caught.value).startswith(f"{folder / name}: ")


def test_what_is_missing_is_named_and_what_may_be_missing_is_not(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").unlink()
    found = read_folder(config_of(folder))
    assert found.tokenizer is not None
    assert (found.chat_template, found.sampling_defaults) == ("", {})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(Unsupported, match=r"tokenizer\.json: missing"):
        read_folder(config_of(folder))


def test_defaults_are_read_unless_the_command_line_leaves_them_out(folder: Path) -> None:
    text = '{"do_sample": true, "temperature": 1, "top_k": 20, "top_p": null, "max_new_tokens": 9}'
    (folder / "generation_config.json").write_text(text)
    read = {"temperature": 1.0, "top_k": 20.0, "max_tokens": 9.0}
    assert sampling_defaults_of(config_of(folder)) == read
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    assert sampling_defaults_of(config_of(folder, generation_config="none")) == {}


def test_a_server_that_cannot_start_says_why_and_nothing_else(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    argv = [sys.executable, "-m", "moeserve", str(folder), "--port", "0", "--log-level", "error"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"the model could not be loaded: {folder / 'tokenizer.json'}: not a tokenizer" in line


def test_the_log_says_how_the_engine_died(folder: Path, tmp_path: Path) -> None:
    port_file, log = tmp_path / "port.json", tmp_path / "log"
    argv = [sys.executable, "-m", "moeserve", str(folder), "--port", "0", "--port-file", port_file]
    with log.open("w") as sink:
        server = subprocess.Popen(argv, stderr=sink, start_new_session=True)
    try:
        wait_until(port_file.exists, limit_s=30)
        url = f"http://127.0.0.1:{port_file.read_text().split(':')[1].strip(' }' + chr(10))}"
        end = time.monotonic() + 60
        while httpx.get(f"{url}/health", timeout=30).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        (rank,) = httpx.get(f"{url}/v1/backends", timeout=30).json()["ranks"]
        os.kill(rank["pid"], signal.SIGKILL)
        assert server.wait(30) == 1
        assert "ERROR" in log.read_text()
        assert "exit code -9): killed from outside; where nobody did, the machine ran out" in (
            log.read_text()
        )
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
