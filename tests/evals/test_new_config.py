"""`new`: a valid YAML and its line in a list, or a refusal with nothing written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evalsuite import lists
from evalsuite.cli import main
from evalsuite.cli_config import new_config, validate
from evalsuite.config import load_config
from evalsuite.layout import layout_of
from evalsuite.lists import read_list
from evalsuite.new_config import NewConfig

REPOSITORY = Path(__file__).resolve().parents[2]
SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"


class TestNew:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "configs"
        shutil.copytree(REPOSITORY / "configs/moe-refactor", root / "moe-refactor")
        return root

    @pytest.mark.parametrize(
        ("layout", "stem", "suite", "text"),
        [
            ("tp4", "Qwen3-30B-A3B-BF16-fi-cutlass-tp4", "moe-refactor", "TP4"),
            ("tp4-ep", "Qwen3-30B-A3B-BF16-fi-cutlass-tep4", "moe-refactor", "TP4+EP"),
            ("dp4", "Qwen3-30B-A3B-BF16-fi-cutlass-dp4", "moe-refactor-dp-ep", "DP4"),
            ("dp4-ep", "Qwen3-30B-A3B-BF16-fi-cutlass-dep4", "moe-refactor-dp-ep", "DP4+EP"),
            ("dep4", "Qwen3-30B-A3B-BF16-fi-cutlass-dep4", "moe-refactor-dp-ep", "DP4+EP"),
        ],
    )
    def test_writes_a_valid_config_and_its_line(
        self, root: Path, layout: str, stem: str, suite: str, text: str
    ) -> None:
        asked = NewConfig("Qwen/Qwen3-30B-A3B", "flashinfer_cutlass", layout, "h200", 0.88)
        assert new_config(asked, str(root)) == 0
        config = load_config(root / suite / f"{stem}.yaml")
        assert (config.model_name, config.accuracy_threshold) == ("Qwen/Qwen3-30B-A3B", 0.88)
        assert str(layout_of(config)) == text
        assert config.expect_backend is not None
        assert config.expect_backend.name == "flashinfer_cutlass"
        listed = read_list(root / suite / "config-h200.txt", root)
        assert [entry.path.stem for entry in listed.entries] == [stem]
        assert validate([str(root)], strict=True) == 0

    @pytest.mark.parametrize(
        ("task", "metric", "shots"),
        [
            ("gsm8k", "last-number", 5),
            ("gsm8k-border", "numeric", 5),
            ("gsm8k-lm-eval", "strict-match", 5),
            ("gsm8k_cot", "strict-match", 8),
            ("minigsm", "last-number", 5),
        ],
    )
    def test_a_task_brings_its_metric_and_its_shots(
        self, root: Path, task: str, metric: str, shots: int
    ) -> None:
        argv = ["new", "some/Model", "--backend", "triton", "--layout", "tp2", "--pool", "h200"]
        argv += ["--threshold", "0.8", "--task", task, "--name", "mine"]
        assert main([*argv, "--configs-root", str(root)]) == 0
        config = load_config(root / "moe-refactor/mine.yaml")
        assert (config.task, config.metric, config.num_fewshot) == (task, metric, shots)
        assert config.num_questions == 1319

    def test_an_unknown_task_names_the_closest(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["new", "some/Model", "--backend", "triton", "--layout", "tp2", "--pool", "h200"]
        argv += ["--threshold", "0.8", "--task", "gsm8k_cott", "--configs-root", str(root)]
        assert main(argv) == 4
        assert "did you mean 'gsm8k_cot'" in capsys.readouterr().err

    def test_appends_to_a_list_without_a_last_line_end(self, root: Path) -> None:
        path = root / "moe-refactor/config-h100.txt"
        path.write_text("Mixtral-8x7B-BF16-triton-tp2.yaml")
        asked = NewConfig("mistralai/Mixtral-8x7B-v0.1", "triton", "tp4", "h100", 0.58)
        assert new_config(asked, str(root)) == 0
        assert path.read_text() == (
            "Mixtral-8x7B-BF16-triton-tp2.yaml\nMixtral-8x7B-v0.1-BF16-triton-tp4.yaml\n"
        )

    def test_overwrites_nothing(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = root / "moe-refactor/Qwen3-30B-A3B-BF16-triton-tp2.yaml"
        before = path.read_bytes()
        asked = NewConfig("Qwen/Qwen3-30B-A3B", "triton", "tp2", "h200", 0.5)
        assert new_config(asked, str(root)) == 4
        assert "is not overwritten" in capsys.readouterr().err
        assert path.read_bytes() == before
        assert not (root / "moe-refactor/config-h200.txt").exists()

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"pool": "h1000"}, "is no pool; did you mean 'h100'?"),
            ({"backend": "tritn"}, "no MoE backend 'tritn'; did you mean 'triton'?"),
            ({"extra_args": "--max-modl-len 5"}, "did you mean --max-model-len?"),
            ({"layout": "xp2"}, "is none of"),
            ({"threshold": 88.0}, "write 0.88"),
            ({"threshold": float("nan")}, "error"),
            ({"suite": "../x"}, "must be letters"),
            ({"engine": "vlm"}, "did you mean 'vllm'"),
            ({"layout": "tp16"}, "needs 16 GPUs"),
            ({"extra_args": "--x 'a"}, "is never closed"),
            ({"extra_args": "--port 1"}, "the suite's own"),
            ({"backend": "flashinfer_trtllm"}, "kernels for sm10* only"),
            (
                {"model": "meta-llama/Llama-4-Scout-17B-16E-Instruct", "pool": "h100"},
                "does not fit",
            ),
            ({"model": "yes: {", "name": "x"}, "is no model id"),
        ],
    )
    def test_refuses_and_writes_nothing(
        self,
        root: Path,
        capsys: pytest.CaptureFixture[str],
        change: dict[str, object],
        part: str,
    ) -> None:
        before = sorted(root.rglob("*"))
        values: dict[str, object] = {
            **{"model": "Qwen/Qwen3-30B-A3B", "backend": "triton", "layout": "tp2"},
            **{"pool": "h200", "threshold": 0.88, "name": "new"},
        }
        assert new_config(NewConfig(**{**values, **change}), str(root)) == 4  # type: ignore[arg-type]
        assert part in capsys.readouterr().err
        assert sorted(root.rglob("*")) == before


class TestInstalled:
    """Away from a clone the suites are inside the package: nobody's to write into."""

    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        package = tmp_path / "site-packages" / "evalsuite"
        suite = package / "configs" / "moe-refactor"
        suite.mkdir(parents=True)
        shutil.copy(REPOSITORY / "configs" / "hardware.yaml", package / "configs")
        (suite / "config-cpu.txt").write_text("job.yaml\n")
        text = (REPOSITORY / "configs/moe-refactor/MiniGSM-tiny-cpu.yaml").read_text()
        (suite / "job.yaml").write_text(text)
        monkeypatch.setattr(lists, "__file__", str(package / "lists.py"))
        (tmp_path / "mine").mkdir()
        monkeypatch.chdir(tmp_path / "mine")
        return package

    def test_a_new_config_lies_in_the_users_own_folder(self, package: Path) -> None:
        before = sorted(package.rglob("*"))
        args = ["Qwen/Qwen3-30B-A3B", "--backend", "triton", "--threshold", "0.88"]
        assert main(["new", *args, "--layout", "tp2", "--pool", "h100"]) == 0
        assert main(["new", *args, "--layout", "tp4", "--pool", "h100"]) == 0
        assert sorted(package.rglob("*")) == before
        own = Path("configs/moe-refactor")
        assert read_list(own / "config-h100.txt", Path("configs")).problems == []
        assert len((own / "config-h100.txt").read_text().split()) == 2
        assert validate(["configs"]) == 0

    def test_calibrate_says_so_before_it_begins(
        self, package: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["calibrate", "job", "--repeats", "2", "--write"]) == 4
        assert "is an installed file, gone with the next version" in capsys.readouterr().err
        assert sorted(path.name for path in Path().iterdir()) == []

    def test_a_folder_without_lists_is_no_empty_answer(
        self, package: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("configs").mkdir()
        shutil.copy(REPOSITORY / "configs" / "hardware.yaml", "configs")
        assert main(["ls"]) == 4
        assert "no lists (config-<pool>.txt) in configs" in capsys.readouterr().err
