"""What a server refuses and no retry changes: prompts too long for it, and everything at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_helpers import by_question, config, evaluate, samples
from fake_server import FakeServer, error

from evalsuite.errors import ConfigError
from evalsuite.evaluators import limits
from evalsuite.ledger import read_ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


TOO_LONG = (
    "This model's maximum context length is 512 tokens. However, you requested 1157 tokens "
    "(901 in the messages, 256 in the completion). Please reduce the length."
)


def test_a_prompt_too_long_is_a_config_error_that_names_the_shortfall(path: Path) -> None:
    settings = config(num_questions=1000, max_concurrency=4)
    with FakeServer(lambda request: error(400, TOO_LONG)) as server:
        with pytest.raises(ConfigError) as caught:
            evaluate(server.url, path, settings)
        assert len(server.requests) <= 8
    assert "by at least 645 tokens" in str(caught.value)
    assert "--max-model-len" in str(caught.value)
    assert TOO_LONG in str(caught.value)


def test_one_prompt_too_long_is_found_as_well(path: Path) -> None:
    settings = config(max_concurrency=1)
    script = by_question(samples(settings), {12: [error(400, TOO_LONG)]})
    with FakeServer(script) as server, pytest.raises(ConfigError, match="context"):
        evaluate(server.url, path, settings)
    assert len([record for record in read_ledger(path) if record.is_answered]) == 12


@pytest.mark.parametrize(
    ("message", "shortfall"),
    [
        (TOO_LONG, 645),
        ("'max_tokens' or 'max_completion_tokens' is too large: 256. This model's maximum context "
         "length is 2048 tokens and your request has 1900 input tokens (256 > 2048 - 1900).", 0),
        ("prompt has 17 tokens, max_tokens is 1: 18 exceeds max_model_len 17", 1),
        ("You passed 901 input tokens and requested 256 output tokens. However, the model's "
         "context length is only 512 tokens, resulting in a maximum input length of 256 tokens. "
         "Please reduce the length of the input prompt.", 389),
        ("The decoder prompt (length 901) is longer than the maximum model length of 512. Make "
         "sure that `max_model_len` is no smaller than the number of text tokens.", 389),
        ("The input (901 tokens) is longer than the model's context length (512 tokens).", 389),
        ("Requested token count exceeds the model's maximum context length of 512 tokens. You "
         "requested a total of 1157 tokens: 901 tokens from the input messages and 256 tokens for "
         "the completion.", 645),
        ("request (1157 tokens) exceeds the available context size (512 tokens), try increasing "
         "it", 645),
        ("The sum of prompt length (901.0), query length (0.0) and max_tokens (256) should not "
         "exceed max_num_tokens (512)", 389),
    ],
)  # fmt: skip
def test_length_refusals_are_told_from_others(message: str, shortfall: int) -> None:
    said = f"HTTP 400: {message}"
    assert limits.is_too_long(said)
    named = f"by at least {shortfall} tokens" if shortfall else "do not fit the server's context:"
    assert named in limits.explain_too_long(said)


@pytest.mark.parametrize(
    "message",
    [
        "prompt: id 5000 is out of range",
        "temperature must be in [0, 2]",
        "the sum of 5 and 6 is not 12",
        "max_tokens must be at least 1, got 0",
    ],
)
def test_other_refusals_are_not_about_length(message: str) -> None:
    assert not limits.is_too_long(f"HTTP 400: {message}")


@pytest.mark.parametrize("status", [401, 404, 422])
def test_a_server_that_refuses_everything_is_not_asked_a_thousand_times(
    path: Path, status: int
) -> None:
    settings = config(num_questions=1000, max_concurrency=4)
    with FakeServer(lambda request: error(status, "model `fake` does not exist")) as server:
        with pytest.raises(ConfigError, match=r"refuses every request: HTTP .*does not exist"):
            evaluate(server.url, path, settings)
        assert len(server.requests) <= limits.NUM_REFUSALS + 4
