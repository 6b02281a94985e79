"""Secrets and logs: what is hidden, what must stay readable."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evalsuite import server_log
from evalsuite.masking import (
    is_secret_name,
    mask_command,
    mask_env,
    mask_text,
    secret_arguments,
    secret_values,
)


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("--api-key", True),
        ("db_password", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("--max-num-batched-tokens", False),
        ("--tokenizer-mode", False),
        ("CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_names(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) is is_secret


def test_values_follow_their_names_everywhere() -> None:
    env = {
        "HF_TOKEN": "hf_abcdef",
        "SHORT_KEY": "1",
        "https_proxy": "http://user:hunter22@proxy:3128",
        "PLAIN": "http://user:hunter22@proxy:3128 hf_abcdef",
    }
    secrets = secret_values(env)
    assert secrets == ("hf_abcdef", "hunter22")
    assert mask_env(env, secrets) == {
        "HF_TOKEN": "***",
        "SHORT_KEY": "***",
        "https_proxy": "http://***@proxy:3128",
        "PLAIN": "http://***@proxy:3128 ***",
    }
    assert mask_text("got hf_abcdef", secrets) == "got ***"


def test_command_line_can_be_pasted_without_its_secrets() -> None:
    argv = ["serve", "a b", "--api-key", "sk-1", "--hf-token=x", "--max-tokens", "256"]
    assert secret_arguments(argv) == ("sk-1", "x")
    shown = mask_command(["serve", "a b", "--api-key", "sk-123456"], {"A_TOKEN": "t", "B": "c d"})
    assert shown == "A_TOKEN='***' B='c d' serve 'a b' --api-key ***"


def test_progress_bars_and_escapes_are_cleaned() -> None:
    raw = "load 1%\rload 50%\rload 100%\r\n\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\n\x00"
    assert server_log.clean(raw) == "load 100%\nred link\n"


def test_a_line_of_megabytes_is_cleaned_in_linear_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"y" * (6 << 20) + b"\r" + b"\x1b[" * (1 << 20) + b"\n" + b"end\n")
    began = time.monotonic()
    assert server_log.text(log).endswith("end\n")
    assert server_log.tail(log)[-1] == "end"
    assert time.monotonic() - began < 10
