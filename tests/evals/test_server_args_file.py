"""`--config FILE` in `server_args`: what a server's own file says is seen and checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evalsuite import engines
from evalsuite.config import LoadedConfig, read_config
from evalsuite.jobs import EvalJob
from evalsuite.layout import layout_of
from evalsuite.server_args_file import expand_config_file

sys.path.insert(0, str(Path(__file__).parent))
from config_files import BASE, errors

sys.path.pop(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_flags_of_the_file_stand_in_front(folder: Path) -> None:
    (folder / "s.yaml").write_text(
        "tensor_parallel_size: 2\nenforce-eager: true\nno-such: false\nempty:\n"
        "lora-modules: [a=b, c=d]\ncompilation-config: {level: 3}\nmax-model-len: 4096\n"
    )
    expected = (
        "--tensor-parallel-size", "2", "--enforce-eager", "--lora-modules", "a=b", "c=d",
        "--compilation-config", '{"level": 3}', "--seed", "1", "--max-model-len", "512", "-x",
    )  # fmt: skip
    for words in (["--config", "s.yaml"], [f"--config={folder}/s.yaml"]):
        argv = ["--seed", "1", *words, "--max-model-len", "512", "-x"]
        assert expand_config_file(argv) == expected


def test_without_the_flag_nothing_is_read() -> None:
    assert expand_config_file(["--config-format", "hf", "x"]) == ("--config-format", "hf", "x")


def read(folder: Path, text: str) -> LoadedConfig:
    path = folder / "a.yaml"
    path.write_text(text)
    return read_config(path)


def config_with(folder: Path, content: str, extra: str = "") -> list[str]:
    """Faults of a config whose server reads a file with that content."""
    (folder / "s.yaml").write_text(content)
    text = BASE + extra + 'engine: vllm\nserver_args: "--config s.yaml"\n'
    return [f"{p.key}: {p.message}" for p in errors(folder, text)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: 8000\n", "--config s.yaml: --port is the suite's own: the suite starts"),
        ("host: 0.0.0.0\n", "--config s.yaml: --host is the suite's own"),
        ("model: other/model\n", "--config s.yaml: --model is the suite's own"),
        ("uds: /tmp/x\n", "--config s.yaml: --uds is the suite's own"),
        ("config: b.yaml\n", "'config' is no flag that a file can hold"),
        ("a b: 1\n", "'a b' is no flag that a file can hold"),
        ("seed: 1\nseed: 2\n", "--config s.yaml line 2: "),
        ("- --seed\n", "holds no `flag: value` lines"),
        ("seed: [true]\n", "the value of seed cannot be an argument: True"),
    ],
)
def test_what_the_file_may_not_hold(folder: Path, content: str, message: str) -> None:
    (fault,) = config_with(folder, content)
    assert fault.startswith("server_args: ")
    assert message in fault


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--config gone.yaml", "--config gone.yaml: "),
        ("--config", "--config names no file"),
        ("--config a --config b", "--config is given 2 times"),
    ],
)
def test_a_file_that_is_not_there_is_refused(folder: Path, args: str, message: str) -> None:
    (fault,) = errors(folder, f'{BASE}engine: vllm\nserver_args: "{args}"\n')
    assert message in fault.message


def test_remote_code_in_the_file_is_seen(folder: Path) -> None:
    (fault,) = config_with(folder, "trust-remote-code: true\n", "trust_remote_code: false\n")
    assert "is false, but server_args holds --trust-remote-code" in fault
    text = f'{BASE}engine: vllm\nserver_args: "--config s.yaml"\n'
    loaded = read(folder, text)
    assert loaded.config is not None
    assert loaded.config.has_remote_code
    assert "trusts Python code that comes with the model" in str(loaded.problems)


def test_layout_and_command_line_are_those_of_the_file(folder: Path) -> None:
    (folder / "s.yaml").write_text("tensor-parallel-size: 4\nserved-model-name: theirs\n")
    loaded = read(folder, f'{BASE}engine: vllm\nserver_args: "--config s.yaml"\n')
    assert loaded.config is not None
    assert layout_of(loaded.config).num_gpus == 4
    job = EvalJob("s/job", "s", folder / "job.yaml", loaded.config, None, layout_of(loaded.config))
    spec = engines.get("vllm").launch_spec(job)
    assert "--config" not in spec.argv
    assert spec.argv[-5:-1] == ("--tensor-parallel-size", "4", "--served-model-name", "theirs")
    assert spec.served_model == "theirs"
