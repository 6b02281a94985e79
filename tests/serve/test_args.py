from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from moeserve.args import default_of, parse
from moeserve.engine.config import EngineConfig
from moeserve.errors import UsageError
from moeserve.flags import FLAGS
from moeserve.help import help_text, options_table
from moeserve.server.limits import Limits
from moeserve.tiny import model_dir

TINY = "moeserve/minigsm-tiny"


def refused(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse([TINY, *argv], {})
    return str(caught.value)


def test_a_field_config_line_in_full() -> None:
    line = (
        "--enforce-eager --max-model-len 8192 --data-parallel-size 2 --enable-expert-parallel "
        "--all2all-backend allgather_reducescatter --moe-backend=flashinfer_cutlass "
        "--disable-uvicorn-access-log --trust-remote-code --port 0 --kv-cache-dtype auto"
    )
    config = parse([TINY, *line.split()], {})
    assert config.engine.model == str(model_dir())
    assert config.served_names == (TINY,)
    assert config.engine.enforce_eager
    assert config.engine.max_model_len == 8192
    assert (config.engine.data_parallel_size, config.engine.tensor_parallel_size) == (2, 1)
    assert config.engine.has_expert_parallel
    assert config.engine.moe_backend == "flashinfer_cutlass"
    assert config.port == 0
    assert "no code of a model folder is ever run" in config.notes[0]


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-model-len", "4096"],
        ["--max_model_len=4096"],
        ["--max-model-len=4K"],
        ["--max_model_len", "4096"],
    ],
)
def test_spellings_of_one_option(argv: list[str]) -> None:
    assert parse([*argv, TINY], {}).engine.max_model_len == 4096


def test_the_log_level_is_that_of_both_processes() -> None:
    config = parse([TINY, "--log-level", "error"], {})
    assert (config.log_level, config.engine.log_level) == ("error", "error")
    assert parse([TINY], {}).engine.log_level == parse([TINY], {}).log_level


def test_short_options_negation_and_lists() -> None:
    argv = ["-tp", "2", "-dp=3", "-ep", "--no-enable-prefix-caching"]
    argv += ["--served-model-name", "a", "b", "--api-key", "k"]
    config = parse([TINY, *argv], {})
    assert (config.engine.tensor_parallel_size, config.engine.data_parallel_size) == (2, 3)
    assert config.engine.has_expert_parallel
    assert not config.engine.has_prefix_caching
    assert config.served_names == ("a", "b")
    assert config.api_keys == ("k",)
    # Before MODEL a list takes one word only.
    assert parse(["--served-model-name", "a", TINY], {}).served_names == ("a",)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--max-modellen", "1"], "did you mean --max-model-len?"),
        (["--enforce-eagr"], "did you mean --enforce-eager?"),
        (["--speculative-config", "{}"], "known, but not supported here: speculative decoding"),
        (["--speculative_config.method=x"], "speculative decoding"),
        (["--all2all-backend", "deepep_v2"], "known, but not supported here: tokens move"),
        (["--kv-cache-dtype", "fp8"], "accepted: auto"),
        (["--pipeline-parallel-size", "2"], "pipeline parallelism"),
        (["--port", "70000"], "at most 65535"),
        (["--port", "eight"], "want a whole number"),
        (["--gpu-memory-utilization", "1.5"], "at most 1"),
        (["--gpu-memory-utilization", "nan"], "want at least"),
        (["--tensor-parallel-size", "0"], "want at least 1"),
        (["--load-format", "dumy"], "closest: dummy"),
        (["--hf-overrides", "[1]"], "want a JSON object"),
        (["--hf-overrides", "{"], "not JSON"),
        (["--port"], "wants a value"),
        (["--enforce-eager=maybe"], "a switch takes no value"),
        (["second-model"], "more than one MODEL"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_closest(argv: list[str], part: str) -> None:
    assert part in refused(*argv)


def test_environment_is_handed_on_and_strangers_are_named() -> None:
    env = {
        "VLLM_USE_FLASHINFER_MOE_FP16": "1",
        "VLLM_FLASHINFER_MOE_BACKEND": "throughput",
        "VLLM_USE_DEEP_GEMM": "1",
        "MOESERVE_API_KEY": "secret",
        "PATH": "/bin",
    }
    config = parse([TINY], env)
    assert config.engine.env == {
        "VLLM_USE_FLASHINFER_MOE_FP16": "1",
        "VLLM_FLASHINFER_MOE_BACKEND": "throughput",
    }
    assert config.notes == ("VLLM_USE_DEEP_GEMM=1: not a switch of this server, ignored",)
    assert config.api_keys == ("secret",)
    assert "secret" not in repr(config)
    assert parse([TINY, "--api-key", "other"], env).api_keys == ("other",)


def test_models_are_found_or_the_message_says_where_was_looked(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path)}
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert parse(["org/name"], env).engine.model == str(snapshot)
    assert parse([str(snapshot)], env).engine.model == str(snapshot)
    preset = parse(["qwen3-30b-a3b", "--load-format", "dummy"], env)
    assert preset.engine.model == "qwen3-30b-a3b"
    with pytest.raises(UsageError, match="--load-format dummy"):
        parse(["Qwen/Qwen3-30B-A3B"], env)
    with pytest.raises(UsageError, match=r"not in the local hub cache .*nothing is downloaded"):
        parse(["org/other"], env)
    for name in ("minigsm-tiny", "MoEServe/MiniGSM-tiny"):  # as the presets spell it
        assert parse([name], env).engine.model == parse([TINY], env).engine.model
    with pytest.raises(UsageError, match="closest name known is moeserve/minigsm-tiny"):
        parse(["moeserve/minigsm-tny"], env)
    with pytest.raises(UsageError, match=r"no config\.json"):
        parse([str(tmp_path)], env)
    with pytest.raises(UsageError, match="no MODEL given"):
        parse([], env)


def test_every_row_sets_a_field_and_help_shows_its_default() -> None:
    text = help_text()
    for flag in FLAGS:
        default_of(flag)  # raises for a field that does not exist
        assert flag.name in text
    limits = {flag.target for flag in FLAGS if flag.target.startswith("limits.")}
    assert limits == {f"limits.{item.name}" for item in fields(Limits)}
    engine = {flag.target for flag in FLAGS if flag.target.startswith("engine.")}
    assert engine == {f"engine.{i.name}" for i in fields(EngineConfig)} - {
        "engine.model",
        "engine.env",
        "engine.log_level",  # the server's
    }


def test_documentation_has_every_option_with_its_default() -> None:
    page = Path(__file__).parents[2] / "docs" / "server.md"
    assert options_table() in page.read_text(encoding="utf-8")


def test_command_line_faults_exit_2_and_no_torch_is_imported() -> None:
    code = (
        "import sys; from moeserve.__main__ import main; status = main(sys.argv[1:]);"
        "import moeserve.server.launch;"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, TINY, "--prt", "1"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2, run.stderr
    assert "--prt: unknown option; did you mean --port?" in run.stderr
