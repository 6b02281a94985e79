"""Two hundred and more configs with one fault each, made by rules from a valid one.

Receives nothing; returns cases with the place where the fault must be reported. Used by
`test_validate.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from evalsuite.config import EvalConfig

VALID = {
    "model_name": "Qwen/Qwen3-30B-A3B",
    "accuracy_threshold": "0.88",
    "tolerance": "0.02",
    "num_questions": "1319",
    "num_fewshot": "5",
    "server_args": "--max-model-len 8192 --tensor-parallel-size 2",
    "provenance": "us",
    "max_tokens": "256",
    "seed": "42",
    "engine": "vllm",
}
INTEGERS = ("num_questions", "num_fewshot", "max_tokens", "seed", "max_concurrency", "max_retries")
NUMBERS = (
    "startup_max_wait_seconds",
    "request_timeout_seconds",
    "rocm_request_timeout_seconds",
    "min_acceptance_length",
    "temperature",
)
FRACTIONS = ("accuracy_threshold", "tolerance")
TEXTS = ("model_name", "gen_prefix", "engine", "task", "evaluator", "baseline")
BOOLEANS = ("use_chat_completions", "trust_remote_code")


@dataclass(frozen=True)
class Faulty:
    """One config and where its fault is.

    Attributes:
        name: What is wrong, for the test's id.
        text: The file.
        line: Line that the message must name.
        key: Key path that it must name, or its beginning.
    """

    name: str
    text: str
    line: int
    key: str


def _with(key: str, value: str) -> tuple[str, int]:
    """The valid config with one key set, and the line it stands on."""
    values = {**VALID, key: value}
    return "".join(f"{name}: {text}\n" for name, text in values.items()), list(values).index(
        key
    ) + 1


def _misspell(key: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(key) - 1)
    kind = rng.choice(["drop", "double", "swap", "dash", "case"])
    if kind == "drop":
        return key[:at] + key[at + 1 :]
    if kind == "double":
        return key[:at] + key[at] + key[at:]
    if kind == "swap" and key[at] != key[at + 1]:
        return key[:at] + key[at + 1] + key[at] + key[at + 2 :]
    if kind == "dash" and "_" in key:
        return key.replace("_", "-")
    return key.title() if key.title() != key else key.upper()


def _misspelt_keys(rng: random.Random) -> Iterator[Faulty]:
    valid = set(EvalConfig.model_fields)
    for key in sorted(valid):
        for _ in range(2):
            wrong = _misspell(key, rng)
            if wrong not in valid:
                text, line = _with(wrong, "1")
                yield Faulty(f"misspelt {wrong}", text, line, wrong)


def _wrong_values() -> Iterator[Faulty]:
    groups = [
        (
            INTEGERS,
            ("'5'", "-3", "1.5", "1e2", "many", "[1]", "{a: 1}", "yes", "010", "1_0", "1:30"),
        ),
        (NUMBERS, ("'5'", "-1", ".nan", ".inf", "soon", "[1]", "no", "1:30")),
        (FRACTIONS, ("'0.5'", "-0.5", "92", ".nan", "-.inf", "high", "{a: 1}", "true", "0_9")),
        (TEXTS, ("5", "1.5", "no", "[a]", "{a: b}", "010")),
        (BOOLEANS, ("'true'", "'no'", "1", "0", "maybe", "[true]", "")),
        (("env",), ("text", "[A]", "{A: 1}", "{A: on}", "{A: 1.5}", "{'A B': 'x'}", "{A: [x]}")),
        (("tags", "startup_rpc_checks"), ("text", "{a: b}", "[1]", "[[a]]", "['']", "[a, a]")),
        (("gate",), ("5", "[threshold]", "thresold", "{alpha: x}", "{alpha: 0}", "{powr: 1}")),
        (("expect_backend",), ("5", "''", "{level: logged}", "{name: a, level: loged}", "[a]")),
        (("calibration",), ("calibrated", "5", "{sigma_run: 2}", "[a]", "{sigma: 0.1}")),
        (("provenance",), ("5", "[a]", "{src: a}", "{num_questions: 0}")),
        (
            ("server_args",),
            (
                *("5", "true", "'--x \"a'", '"--x \'a"', "--port 1", "--host=h", "--model m"),
                *("[true]", "['--tp 2']", "{'a b': 1}", "{port: 1}", "-tp 0", "-tp", "-dp x"),
                *("-tp 2 --tp 4", "--enable-expert-parallel=1", "{x: 010}", "--x \\"),
            ),
        ),
    ]
    for keys, values in groups:
        for key in keys:
            for value in values:
                text, line = _with(key, value)
                yield Faulty(f"{key}: {value}", text, line, key)


def _structure() -> Iterator[Faulty]:
    base, _ = _with("model_name", VALID["model_name"])
    after = len(VALID) + 1
    for line, key in enumerate(VALID, start=1):
        yield Faulty(f"{key} twice", f"{base}{key}: {VALID[key]}\n", after, key)
        if line <= 5 and key != "tolerance":
            text = "".join(f"{k}: {v}\n" for k, v in VALID.items() if k != key)
            yield Faulty(f"{key} missing", text, 1, key)
    for tag in ("!!python/object/apply:os.system [x]", "!function a.b", "!!binary aGk=", "!x {}"):
        yield Faulty(f"tag {tag}", f"{base}env: {tag}\n", after, "env")
    yield Faulty("undefined alias", f"{base}env: *nowhere\n", after, "")
    yield Faulty("second document", f"{base}---\na: 1\n", after, "")
    yield Faulty("tab", f"{base}env:\n\tA: '1'\n", after + 1, "")
    yield Faulty("colon", f"{base}gen_prefix: a: b\n", after, "")
    yield Faulty("open bracket", f"{base}tags: [a\n", after + 1, "")
    yield Faulty("list", "- a\n", 1, "")
    yield Faulty("nested key", f"{base}env:\n  max_tokens: '5'\n", after + 1, "env.max_tokens")
    yield Faulty("pair", f"{base}max_gen_toks: 512\n", after, "max_gen_toks")


def faulty_configs(seed: int = 20240131) -> list[Faulty]:
    """Every case, in a fixed order."""
    return [*_misspelt_keys(random.Random(seed)), *_wrong_values(), *_structure()]
