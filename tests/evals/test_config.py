"""One YAML -> `EvalConfig`: every key, every wrong value, and what must never be built or run."""

from __future__ import annotations

import json
import re
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalsuite import engines, evaluators, names
from evalsuite.config import ExpectBackend, Gate, load_config, read_config
from evalsuite.errors import ConfigError
from evalsuite.yaml_loader import parse_document

# With --import-mode=importlib a test module cannot import its neighbour by name.
sys.path.insert(0, str(Path(__file__).parent))
from config_files import BASE, errors, load

sys.path.pop(0)


def test_names_found_in_folders_are_those_the_modules_give() -> None:
    assert names.known("evaluator") == tuple(evaluators.names())
    assert names.known("engine") == ("external", "moeserve", "sglang", "vllm")
    for name in names.known("engine"):
        assert engines.get(name).name == name


def test_every_key_of_the_field_loads_with_its_meaning(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
model_name: "deepseek-ai/DeepSeek-V4-Flash"
accuracy_threshold: 0.95
tolerance: 0.1
num_questions: 1319
num_fewshot: 8
startup_max_wait_seconds: 2400
server_args: >-
  --max-model-len 4096
  --tensor-parallel-size 4
  --speculative-config '{"method":"mtp",
  "num_speculative_tokens":2}'
  --attention_config.indexer_kv_dtype=mxfp4
env:
  VLLM_USE_DEEP_GEMM: "1"
max_tokens: 512
temperature: 0.6
seed: 7
gen_prefix: "<think>"
use_chat_completions: true
max_concurrency: 100
request_timeout_seconds: 900
rocm_request_timeout_seconds: 1800
min_acceptance_length: 4.8
startup_rpc_checks: [check_health]
""",
    )
    assert config.server_args == (
        *("--max-model-len", "4096", "--tensor-parallel-size", "4"),
        *("--speculative-config", '{"method":"mtp", "num_speculative_tokens":2}'),
        "--attention_config.indexer_kv_dtype=mxfp4",
    )
    assert json.loads(config.server_args[5]) == {"method": "mtp", "num_speculative_tokens": 2}
    assert config.env == {"VLLM_USE_DEEP_GEMM": "1"}
    assert (config.startup_max_wait_seconds, config.max_tokens, config.seed) == (2400, 512, 7)
    assert config.gen_prefix == "<think>"
    assert config.use_chat_completions is True
    assert config.max_concurrency == 100
    assert config.timeout_for("amd") == 1800
    assert config.timeout_for("nvidia") == 900
    assert config.min_acceptance_length == 4.8
    assert config.startup_rpc_checks == ("check_health",)
    assert config.effective_floor == pytest.approx(0.85)


def test_defaults_are_those_of_the_fields_script(tmp_path: Path) -> None:
    config = load(tmp_path, BASE.replace("tolerance: 0.02\n", ""))
    assert (config.tolerance, config.max_tokens, config.temperature, config.seed) == (
        *(0.08, 256, 0.0, 42),
    )
    assert config.server_args == ()
    assert config.env == {}
    assert config.max_concurrency is None
    assert config.trust_remote_code is False
    assert (config.engine, config.task, config.evaluator) == ("moeserve", "gsm8k", "builtin")


def test_our_keys_take_a_name_or_a_mapping(tmp_path: Path) -> None:
    short = load(
        tmp_path, BASE + "gate: statistical\nexpect_backend: triton\nprovenance: upstream\n"
    )
    assert short.gate == Gate(name="statistical")
    assert short.expect_backend == ExpectBackend(name="triton")
    assert str(short.provenance) == "upstream"
    long = load(
        tmp_path,
        BASE + "gate: {name: paired, alpha: 0.01, max_drop: 0.01}\nbaseline: b.json\n"
        "expect_backend: {name: triton, level: executed}\n"
        "provenance: {source: us, note: one run, num_questions: 1319}\n"
        "calibration: {sigma_run: 0.004, discordant: 0.035, repeats: 20, num_questions: 1319}\n"
        "tags: [bf16, tp2]\n",
    )
    assert (long.gate.name, long.gate.alpha, long.gate.max_drop) == ("paired", 0.01, 0.01)
    assert long.expect_backend == ExpectBackend(name="triton", level="executed")
    assert str(long.provenance) == "us; one run"
    assert long.tags == ("bf16", "tp2")


@pytest.mark.parametrize(
    ("extra", "key", "line", "part"),
    [
        ("num_fewshots: 5", "num_fewshots", 6, "did you mean `num_fewshot`"),
        ("server-args: '--x'", "server-args", 6, "did you mean `server_args`"),
        ("Env: {}", "Env", 6, "did you mean `env`"),
        ("max_toks: 512", "max_toks", 6, "called `max_tokens`"),
        ("max_tokens: 256\nmax_gen_toks: 512", "max_gen_toks", 7, "contradicts max_tokens = 256"),
        ("env:\n  num_fewshot: '5'", "env.num_fewshot", 7, "one level too deep"),
        ("settings:\n  max_tokens: 5", "settings", 6, "belongs one level up"),
        ("num_questions: 50", "num_questions", 6, "on lines 3 and 6"),
        ("env: {A: '1'}\nenv: {B: '2'}", "env", 7, "on lines 6 and 7"),
        ("trust_remote_code: 'false'", "trust_remote_code", 6, "must be true or false"),
        ("max_concurrency: '64'", "max_concurrency", 6, "write 64 without quotes"),
        ("max_tokens: 1e3", "max_tokens", 6, "write 1000"),
        ("max_tokens: 010", "max_tokens", 6, "octal"),
        ("startup_max_wait_seconds: 20:00", "startup_max_wait_seconds", 6, "base-60"),
        ("startup_max_wait_seconds: 0", "startup_max_wait_seconds", 6, "out of range"),
        ("startup_max_wait_seconds: -1", "startup_max_wait_seconds", 6, "out of range"),
        ("env: {A: 1}", "env.A", 6, 'write A: "1"'),
        ("env: {A: no}", "env.A", 6, "a boolean"),
        ("env: {A: }", "env.A", 6, "has no value"),
        ("env: {A-B: '1'}", "env", 6, "not the name of an environment variable"),
        ("env: [A=1]", "env", 6, "must be a mapping"),
        ("gen_prefix: on", "gen_prefix", 6, '"true" in quotes'),
        ('server_args: "--x \'a"', "server_args", 6, "opened at character 5 is never closed"),
        ("server_args: --port 80", "server_args", 6, "the suite's own"),
        ("server_args: --host=0.0.0.0", "server_args", 6, "the suite's own"),
        ("server_args: [--tp 2]", "server_args", 6, "write two items: '--tp', '2'"),
        ("server_args: -tp 2 --tensor-parallel-size 4", "server_args", 6, "given twice"),
        ("server_args: --tensor-parallel-size zwei", "server_args", 6, "positive whole number"),
        ("server_args: --trust-remote-code=true", "server_args", 6, "takes no value"),
        ("gate: pared", "gate.name", 6, "did you mean 'paired'"),
        ("gate: {alpha: 5}", "gate.alpha", 6, "out of range"),
        ("gate: {nam: x}", "gate.nam", 6, "did you mean 'name'"),
        ("calibration: uncalib", "calibration", 6, "did you mean 'uncalibrated'"),
        ("calibration: {sigma_run: 0.4}", "calibration.discordant", 6, "required key is missing"),
        ("engine: vlm", "engine", 6, "did you mean 'vllm'"),
        ("task: gsm9k", "task", 6, "did you mean 'gsm8k'"),
        ("evaluator: lm_eval", "evaluator", 6, "did you mean 'lm-eval'"),
        ("metric: last_number", "metric", 6, "did you mean 'last-number'"),
        ("seed: -1", "seed", 6, "out of range"),
        ("tags: bf16", "tags", 6, "write `[bf16]`"),
        ("tags: [a, a]", "tags", 6, "given twice"),
        ("env: *nowhere", "", 6, "names no anchor"),
        ("env: !function a.b", "env", 6, "tag `!function` is refused"),
    ],
)
def test_a_wrong_key_or_value_is_named(
    tmp_path: Path, extra: str, key: str, line: int, part: str
) -> None:
    found = errors(tmp_path, BASE + extra + "\n")
    assert [problem for problem in found if part in problem.message], [str(x) for x in found]
    problem = next(problem for problem in found if part in problem.message)
    assert (problem.file, problem.line, problem.key) == ("a.yaml", line, key)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("92", "write 0.92"),
        (".nan", "cannot be meant"),
        (".inf", "cannot be meant"),
        ("-0.1", "from 0 to 1"),
        ("'0.9'", "without quotes"),
        ("0.01", "could never fail"),
        ("0.02", "could never fail"),
        ("true", "must be a number"),
        ("ninety", "must be a number"),
    ],
)
def test_thresholds_that_cannot_be_meant(tmp_path: Path, value: str, part: str) -> None:
    found = errors(tmp_path, BASE.replace("0.88", value))
    assert any(part in problem.message for problem in found), [str(x) for x in found]


@pytest.mark.parametrize("key", ["accuracy_treshold", "threshold"])
def test_a_misspelt_required_key_is_one_fault(key: str, tmp_path: Path) -> None:
    text = BASE.replace("accuracy_threshold: 0.88", f"{key}: 0.9")
    found = errors(tmp_path, text.replace("1319", '"50"'))
    assert [(problem.line, problem.key) for problem in found] == [(2, key), (3, "num_questions")]
    assert "`accuracy_threshold`" in found[0].message
    # One that is not there in any spelling is missing.
    (missing,) = errors(tmp_path, BASE.replace("accuracy_threshold: 0.88", "x-a: 1"))
    assert missing.message == "required key is missing; add `accuracy_threshold: ...`"


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("88%", "; write 0.88"),
        ("88 %", "; write 0.88"),
        ("0,88", "; write 0.88"),
        ("88", "looks like per cent; write 0.88"),
        ("1.2", "1.2 is above 1; give a fraction from 0 to 1 (93 % is 0.93)"),
        ("high", "; give a number"),
        ("1,000,000", "; give a number"),
    ],
)
def test_a_fraction_in_another_spelling_is_told_how_to_write_it(
    value: str, remedy: str, tmp_path: Path
) -> None:
    (found,) = errors(tmp_path, BASE.replace("0.88", value))
    assert found.message.endswith(remedy)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ('num_questions: "1,319"', "; write 1319"),
        ("num_questions: 1,319", "; write 1319"),
        ("num_questions: 13,19", "; give a number"),
        ("num_questions: 50%", "; give a number"),
        ("max_tokens: 2k", "; give a number"),
        ("startup_max_wait_seconds: 20m", "; write 1200"),
        ("startup_max_wait_seconds: 1.5 h", "; write 5400"),
        ("request_timeout_seconds: 90s", "; write 90"),
        ("temperature: 1,000", "; give a number"),
        ("max_concurrency: 0", "0 is out of range; it must be from 1 to 10000000"),
        ("seed: -1", "-1 is out of range; it must be from 0 to 9223372036854775807"),
        ("min_acceptance_length: 0.5", "0.5 is out of range; it must be at least 1"),
        (f"seed: {10**30}", "1e+30 is out of range; it must be from 0 to 9223372036854775807"),
    ],
)
def test_a_number_in_another_spelling_is_told_how_to_write_it(
    line: str, remedy: str, tmp_path: Path
) -> None:
    key = line.partition(":")[0]
    rest = "".join(text for text in BASE.splitlines(True) if not text.startswith(f"{key}:"))
    (found,) = errors(tmp_path, f"{rest}{line}\n")
    assert found.key == key
    assert remedy in found.message


def test_merge_keys_share_an_environment_and_the_local_value_wins(tmp_path: Path) -> None:
    text = "common: &env\n  A: '1'\n  B: '2'\nenv:\n  <<: *env\n  B: '3'\n"
    assert load(tmp_path, BASE + text).env == {"A": "1", "B": "3"}
    two = "x-a: &a {A: '1'}\nx-b: &b {A: '2', B: '2'}\nenv:\n  <<: [*a, *b]\n"
    assert load(tmp_path, BASE + two).env == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("yes", True),
        ("Off", False),
        ("1e3", 1000.0),
        ("0x10", 16),
        ("2024-01-31", "2024-01-31"),
        ("a:b", "a:b"),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("~", None),
        ("1.2.3", "1.2.3"),
        ("+3", 3),
    ],
)
def test_plain_scalars_read_as_they_are_meant(scalar: str, value: object) -> None:
    document = parse_document(f"k: {scalar}", "a.yaml")
    assert not document.problems
    assert document.value == {"k": value}
    assert type(document.value["k"]) is type(value)


@pytest.mark.parametrize("scalar", ["010", "-017", "0b11", "0o17", "1:30", "12:30:45", "1_000"])
def test_scalars_that_readers_disagree_on_are_refused(scalar: str) -> None:
    document = parse_document(f"k: {scalar}", "a.yaml")
    assert [problem.key for problem in document.problems] == ["k"]
    assert not parse_document(f'k: "{scalar}"', "a.yaml").problems
    assert parse_document(f"k: !!str {scalar}", "a.yaml").value == {"k": scalar}


def test_an_alias_bomb_is_refused_quickly_and_memory_stays_flat(tmp_path: Path) -> None:
    levels = "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n"
    for level in range(1, 10):
        levels += f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 10)}]\n"
    tracemalloc.start()
    start = time.monotonic()
    found = errors(tmp_path, BASE + levels)
    seconds, peak = time.monotonic() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "once its aliases are expanded" in found[0].message
    assert seconds < 5
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.system", "!!python/object/new:os.system", "!function", "!include"],
)
def test_tags_build_nothing(tmp_path: Path, tag: str) -> None:
    marker = tmp_path / "marker"
    text = BASE + f"env: {tag} ['touch {marker}']\n"
    found = errors(tmp_path, text)
    assert found[0].line == 6
    assert "is refused" in found[0].message
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "holds a list"),
        (b"just text\n", "holds a single value"),
        (b"a: 1\n---\nb: 2\n", "second document"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not UTF-8"),
        (b"a: \x00\n", "control characters"),
        (b"a: b: c\n", "quote a value"),
        (b"a:\n\t- b\n", "tabs"),
        (b"{a: 1\n", "is not YAML"),
        # Which fault is met first depends on the version of libyaml.
        (b"[" * 5000, "is not YAML|levels deep"),
        (b"? [a, b]\n: 1\n", "a key must be plain text"),
        (BASE.encode("utf-16"), "not UTF-8"),
        (b"a: " + b"x" * (1 << 20), "the limit is"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, part: str) -> None:
    found = errors(tmp_path, content)
    assert any(re.search(part, problem.message) for problem in found), [str(x) for x in found]


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    for path, part in ((tmp_path, "is a folder"), (tmp_path / "no.yaml", "no such file")):
        with pytest.raises(ConfigError, match=part):
            load_config(path)


def test_a_byte_order_mark_and_crlf_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_config(path) == load(tmp_path, BASE)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_raise(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    loaded = read_config(path)
    assert loaded.config is None
    assert loaded.has_errors


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="a:- &*[]{}#!'\"|>\n01eno~<.,?%@`", max_size=60))
def test_no_text_in_a_config_raises(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(BASE + text)
    loaded = read_config(path)
    assert (loaded.config is None) == loaded.has_errors
