from __future__ import annotations

import pytest
from fake_engine import INFO, piece_tokenizer

from moeserve.errors import BadRequest
from moeserve.server.limits import MAX_JSON_DEPTH, Limits
from moeserve.server.params import (
    ModelContext,
    Prompt,
    chat_job,
    completion_job,
    derived_seed,
)
from moeserve.server.protocol import ChatBody, CompletionBody, parse_body, parse_json

CONTEXT = ModelContext(INFO, piece_tokenizer(), Limits())
DEFAULTS = ModelContext(
    INFO, piece_tokenizer(), Limits(), {"temperature": 0.6, "top_k": 20, "max_tokens": 64}
)


def completion(**fields: object) -> CompletionBody:
    return parse_body(CompletionBody, {"prompt": "a", **fields})


def refusal(**fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        completion_job(completion(**fields), CONTEXT)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", None),
        ("suffix", ""),
        ("use_beam_search", False),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("guided_json", None),
        ("length_penalty", 1),
        ("user", "someone"),
        ("store", False),
        ("metadata", {}),
        ("service_tier", "auto"),
        ("spaces_between_special_tokens", True),
        ("best_of", None),
        ("stop", None),
        ("logit_bias", None),
        ("logit_bias", {}),
        ("stream_options", None),
    ],
)
def test_values_that_ask_for_nothing_are_accepted(name: str, value: object) -> None:
    assert completion_job(completion(**{name: value}), CONTEXT).n == 1


def test_zero_and_false_are_told_apart() -> None:
    for name in ("use_beam_search", "store"):
        assert refusal(**{name: 0}).param == name
    assert refusal(length_penalty=True).param == "length_penalty"


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("max_token", "max_tokens"),
        ("max_gen_toks", None),
        ("temprature", "temperature"),
        ("stop_sequences", None),
        ("topp", "top_p"),
    ],
)
def test_unknown_fields_come_with_the_closest(name: str, closest: str | None) -> None:
    error = refusal(**{name: 1})
    assert error.param == name
    assert "unknown field" in str(error)
    assert (f"did you mean {closest}?" in str(error)) == (closest is not None)


def test_hostile_names_and_values_make_short_clean_messages() -> None:
    for name, value in (("x" * 10_000, 1), ("a\x00\x1b[31m", 1), ("n", 10**400), ("n", "y" * 9999)):
        error = refusal(**{name: value})
        assert len(str(error)) < 300
        assert str(error).isprintable()


def test_depth_of_json_is_bounded_where_it_is_documented() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    parse_json(nested(MAX_JSON_DEPTH))
    with pytest.raises(BadRequest, match="recursion limit"):
        parse_json(nested(MAX_JSON_DEPTH + 1))


def test_max_tokens_rules() -> None:
    short = completion_job(completion(), CONTEXT)
    assert short.sampling_of(Prompt((1,) * 10), 0, 4096).max_tokens == 16
    assert short.sampling_of(Prompt((1,) * 10), 0, 16).max_tokens == 6
    null = completion_job(completion(max_tokens=None), CONTEXT)
    assert null.sampling_of(Prompt((1,) * 10), 0, 100).max_tokens == 16
    assert null.sampling_of(Prompt((1,) * 10), 0, 16).max_tokens == 6
    given = completion_job(completion(max_tokens=7), CONTEXT)
    with pytest.raises(BadRequest, match=r"is 16 tokens, but 17 .*10 in the prompt, 7"):
        given.sampling_of(Prompt((1,) * 10), 0, 16)
    chat = parse_body(ChatBody, {"messages": [], "max_completion_tokens": 5})
    assert chat_job(chat, CONTEXT).max_tokens == 5
    assert chat_job(parse_body(ChatBody, {"messages": []}), CONTEXT).max_tokens is None


def test_defaults_of_the_model_hold_where_a_field_is_left_out() -> None:
    job = completion_job(completion(), DEFAULTS)
    assert (job.sampling.temperature, job.sampling.top_k, job.max_tokens) == (0.6, 20, 64)
    assert job.is_limit_soft
    own = completion_job(completion(temperature=0, top_k=-1, max_tokens=3), DEFAULTS)
    assert (own.sampling.temperature, own.sampling.top_k, own.max_tokens) == (0.0, 0, 3)
    assert completion_job(completion(), CONTEXT).sampling.temperature == 1.0


def test_edges_of_sampling() -> None:
    tiny = completion_job(completion(temperature=1e-9), CONTEXT).sampling
    assert tiny.temperature == 0.0
    no_mass = completion_job(completion(top_p=0), CONTEXT).sampling
    assert (no_mass.top_p, no_mass.top_k) == (1.0, 1)
    assert completion_job(completion(top_k=10**6), CONTEXT).sampling.top_k == 0


def test_derived_seeds_are_fixed_distinct_and_in_range() -> None:
    seeds = {derived_seed(42, place) for place in range(1, 200)} | {42}
    assert len(seeds) == 200
    assert derived_seed(42, 1) == derived_seed(42, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_echo_asks_for_the_prompt_s_log_probabilities_only_with_logprobs() -> None:
    assert completion_job(completion(echo=True), CONTEXT).sampling.num_prompt_logprobs is None
    both = completion_job(completion(echo=True, logprobs=2), CONTEXT)
    assert both.sampling.num_prompt_logprobs == 2
    assert both.num_prompt_logprobs is None
    more = completion_job(completion(echo=True, logprobs=2, prompt_logprobs=5), CONTEXT)
    assert more.sampling.num_prompt_logprobs == 5
