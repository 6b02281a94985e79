"""One YAML -> `EvalConfig`: every key, every wrong value, and what must never be built or run."""

from __future__ import annotations

import json
import shlex
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalsuite import engines, evaluators, names
from evalsuite.config import EvalConfig, ExpectBackend, Gate, load_config, read_config
from evalsuite.errors import ConfigError, Problem
from evalsuite.server_args import check_port, flag_values, parse_server_args
from evalsuite.yaml_loader import parse_document

BASE = "model_name: Qwen/Qwen3-30B-A3B\naccuracy_threshold: 0.88\nnum_questions: 1319\n"
BASE += "num_fewshot: 5\ntolerance: 0.02\n"


def load(tmp_path: Path, text: str) -> EvalConfig:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def errors(tmp_path: Path, text: str | bytes) -> list[Problem]:
    path = tmp_path / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    loaded = read_config(path, display="a.yaml")
    found = [problem for problem in loaded.problems if problem.severity == "error"]
    assert (loaded.config is None) == bool(found)
    return found


def warnings(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    loaded = read_config(path)
    assert loaded.config is not None, loaded.problems
    return {problem.key: problem.message for problem in loaded.problems}


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


def test_a_misspelt_required_key_is_missing_and_unknown_in_one_go(tmp_path: Path) -> None:
    text = BASE.replace("accuracy_threshold: 0.88", "accuracy_treshold: 0.9")
    found = errors(tmp_path, text.replace("1319", '"50"'))
    assert {(problem.line, problem.key) for problem in found} == {
        *((1, "accuracy_threshold"), (2, "accuracy_treshold"), (3, "num_questions")),
    }


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
        (b"[" * 5000, "is not YAML"),
        (b"? [a, b]\n: 1\n", "a key must be plain text"),
        (BASE.encode("utf-16"), "not UTF-8"),
        (b"a: " + b"x" * (1 << 20), "the limit is"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, part: str) -> None:
    found = errors(tmp_path, content)
    assert any(part in problem.message for problem in found), [str(x) for x in found]


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


class TestServerArgs:
    def test_mapping(self) -> None:
        value = {
            "tensor_parallel_size": 2,
            "speculative_config": {"method": "mtp", "n": 2, "deep": {"a": [1, None]}},
            "stop": ["a", "b c"],
            "enforce_eager": True,
            "trust": False,
            "seed": None,
            "--name": "a b",
            "empty": "",
            "attention_config.indexer_kv_dtype": "mxfp4",
        }
        argv = parse_server_args(value)
        assert argv[:3] == ("--tensor-parallel-size", "2", "--speculative-config")
        assert json.loads(argv[3]) == value["speculative_config"]
        assert json.loads(argv[5]) == ["a", "b c"]
        assert argv[6:] == (
            *("--enforce-eager", "--name", "a b", "--empty", ""),
            *("--attention_config.indexer_kv_dtype", "mxfp4"),
        )

    def test_no_shell_is_involved(self) -> None:
        argv = parse_server_args("""--name "a b" --x=$HOME --y '#1' --z '' --g *.py `id` $(id)""")
        assert argv == (
            *("--name", "a b", "--x=$HOME", "--y", "#1", "--z", ""),
            *("--g", "*.py", "`id`", "$(id)"),
        )

    def test_json_inside_a_string(self) -> None:
        argv = parse_server_args("""--cfg '{"method":"mtp","n":2}' --port-range 1""")
        assert argv == ("--cfg", '{"method":"mtp","n":2}', "--port-range", "1")

    def test_list_keeps_every_element(self) -> None:
        assert parse_server_args(["--a", "b c", 2, "", "-x=1"]) == ("--a", "b c", "2", "", "-x=1")

    @pytest.mark.parametrize("value", [3, True, [True], [None], [["a"]], {"a b": 1}, {"x": {1.5}}])
    def test_other_forms_are_refused(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"must be|is a|is not|nothing usable"):
            parse_server_args(value)

    @pytest.mark.parametrize(
        ("text", "position"),
        [("'abc", 1), ('--a "b', 5), ("--a 'x' \"y 'z'", 9), (r"--a \'b'c", 8)],
    )
    def test_position_of_an_open_quote(self, text: str, position: int) -> None:
        with pytest.raises(ValueError, match=f"character {position} is never closed"):
            parse_server_args(text)

    @given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)))
    def test_round_trip_through_a_shell(self, words: list[str]) -> None:
        argv = ["--flag", *(f"v{word}" for word in words)]
        assert parse_server_args(shlex.join(argv)) == tuple(argv)

    @pytest.mark.parametrize(
        "flag", ["--port 1", "--port=1", "--host x", "--model m", "--model-path m", "--uds s"]
    )
    def test_the_suites_own_flags(self, flag: str) -> None:
        for value in (flag, flag.replace("=", " ").split()):
            with pytest.raises(ValueError, match="the suite's own"):
                parse_server_args(value)

    def test_flag_values_in_all_spellings(self) -> None:
        argv = ("--moe_backend=a", "--moe-backend", "b", "--moe-backend", "--x", "c")
        assert flag_values(argv, ("--moe-backend",)) == ["a", "b", None]

    def test_ports(self) -> None:
        assert [check_port(port) for port in (0, 1, 65535)] == [0, 1, 65535]
        for port in (-1, 65536, 70000):
            with pytest.raises(ValueError, match="does not exist"):
                check_port(port)


class TestMeaning:
    @pytest.mark.parametrize(("n", "half_width"), [(50, "8.3"), (200, "4.2")])
    def test_fewer_questions_than_the_threshold_was_made_for(
        self, tmp_path: Path, n: int, half_width: str
    ) -> None:
        text = BASE.replace("0.88", "0.90").replace("1319", str(n))
        found = warnings(tmp_path, text)
        assert f"made for 1319 questions, not {n}" in found["num_questions"]
        assert f"half-width {half_width} points" in found["num_questions"]
        assert "lies inside the noise" in found["accuracy_threshold"]

    def test_the_full_set_with_a_narrow_tolerance_is_quiet(self, tmp_path: Path) -> None:
        assert warnings(tmp_path, BASE) == {}

    def test_a_threshold_made_for_this_many_questions_is_quiet(self, tmp_path: Path) -> None:
        text = BASE.replace("1319", "330") + "provenance: {source: us, num_questions: 330}\n"
        assert warnings(tmp_path, text) == {}

    def test_a_wide_tolerance(self, tmp_path: Path) -> None:
        found = warnings(tmp_path, BASE.replace("tolerance: 0.02", "tolerance: 0.08"))
        assert "8.9 standard errors" in found["tolerance"]
        assert "a drop of 8 points passes" in found["tolerance"]

    def test_no_tolerance(self, tmp_path: Path) -> None:
        found = warnings(tmp_path, BASE.replace("tolerance: 0.02", "tolerance: 0.0"))
        assert "lies inside the noise" in found["accuracy_threshold"]

    def test_calibration_replaces_the_guess(self, tmp_path: Path) -> None:
        noisy = "calibration: {sigma_run: 0.02, discordant: 0.9, repeats: 9, num_questions: 1319}\n"
        assert "lies inside the noise" in warnings(tmp_path, BASE + noisy)["accuracy_threshold"]
        calm = noisy.replace("0.02", "0.002")
        assert warnings(tmp_path, BASE + calm) == {}

    def test_more_questions_than_there_are(self, tmp_path: Path) -> None:
        found = warnings(tmp_path, BASE.replace("1319", "5000"))
        assert "gsm8k has 1319" in found["num_questions"]

    def test_remote_code_only_where_the_file_says_so(self, tmp_path: Path) -> None:
        assert not load(tmp_path, BASE).has_remote_code
        assert load(tmp_path, BASE + "trust_remote_code: true\n").has_remote_code
        by_flag = BASE + "server_args: --trust-remote-code\n"
        assert load(tmp_path, by_flag).has_remote_code
        assert "Python code" in warnings(tmp_path, by_flag)["server_args"]
        found = errors(tmp_path, by_flag + "trust_remote_code: false\n")
        assert [problem.key for problem in found] == ["trust_remote_code"]

    def test_a_backend_that_cannot_be_the_expected_one(self, tmp_path: Path) -> None:
        text = BASE + "server_args: --moe-backend=triton\nexpect_backend: flashinfer_cutlass\n"
        assert [problem.key for problem in errors(tmp_path, text)] == ["expect_backend"]
        assert load(tmp_path, text.replace("=triton", "=auto")).expect_backend is not None

    def test_sources_say_where_each_value_came_from(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text(BASE)
        loaded = read_config(path, {"engine": "vllm"}, display="a.yaml")
        assert loaded.config is not None
        assert loaded.config.engine == "vllm"
        assert loaded.sources["engine"] == "command line"
        assert loaded.sources["num_questions"] == "a.yaml:3"
        assert loaded.sources["seed"] == "default"
