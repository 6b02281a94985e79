"""`validate`, `ls`, `--explain`: exit codes, messages, and faults without a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evalsuite.cli_config import list_jobs, validate
from evalsuite.validate import survey

# With --import-mode=importlib a test module cannot import its neighbour by name.
sys.path.insert(0, str(Path(__file__).parent))
from faulty_configs import VALID, Faulty, faulty_configs

sys.path.pop(0)

REPOSITORY = Path(__file__).resolve().parents[2]
REMEDY = re.compile(
    r"did you mean|write|remove|add |give|keep|raise|quote|must be|close it|valid keys|known:"
    r"|move|belongs|called|indents|looks like|one file holds|is not YAML|nothing after it"
    r"|names no anchor|a config is|is no |is not the name|takes no value|empty name|is given twice"
)
SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
CONFIG = "".join(f"{key}: {value}\n" for key, value in VALID.items())


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "configs" / "moe-refactor"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text(CONFIG)
    (folder / "config-b200.txt").write_text("a.yaml\n")
    return folder


def test_there_are_two_hundred_faults() -> None:
    cases = faulty_configs()
    assert len({case.text for case in cases}) >= 200


@pytest.mark.parametrize("case", faulty_configs(), ids=lambda case: case.name)
def test_a_fault_is_refused_with_place_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Faulty
) -> None:
    path = tmp_path / "faulty.yaml"
    path.write_text(case.text)
    assert validate([str(path)], root=str(REPOSITORY / "configs")) == 4
    said = capsys.readouterr().err
    assert "Traceback" not in said
    place = f"{path}:{case.line}: error: {case.key}"
    lines = [line for line in said.splitlines() if line.startswith(place)]
    assert lines, said
    assert REMEDY.search(lines[0].removeprefix(place)), said


def test_a_valid_config_of_the_same_kind_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "valid.yaml"
    path.write_text(CONFIG)
    assert validate([str(path)], root=str(REPOSITORY / "configs")) == 0
    assert capsys.readouterr().out == "1 config in 0 lists: 0 errors, 0 warnings, 0 notes\n"


def test_all_faults_of_all_files_in_one_go(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (suite / "b.yaml").write_text(CONFIG.replace("seed", "sead").replace("256", "many"))
    (suite / "c.yaml").write_bytes(b"\xff")
    (suite / "config-b200.txt").write_text("a.yaml\nb.yaml\nc.yaml\nd.yaml\n")
    (suite.parent / "hardware.yaml").write_text("b200: 8\n")
    assert validate([str(suite.parent)]) == 4
    said = capsys.readouterr().err
    for place in ("b.yaml:9", "b.yaml:8", "c.yaml:1", "config-b200.txt:4", "hardware.yaml:1"):
        assert place in said, said


def test_an_orphan_is_a_warning_and_an_error_when_strict(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (suite / "lost.yaml").write_text(CONFIG)
    assert validate([str(suite)]) == 0
    assert "lost.yaml: warning: no list of this suite names it" in capsys.readouterr().out
    assert validate([str(suite)], strict=True) == 4
    assert "lost.yaml: error: no list of this suite names it" in capsys.readouterr().err


def test_a_threshold_without_provenance_is_an_error_when_strict(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (suite / "a.yaml").write_text(CONFIG.replace("provenance: us\n", ""))
    assert validate([str(suite)]) == 0
    capsys.readouterr()
    assert validate([str(suite)], strict=True) == 4
    assert "provenance: says not where the threshold comes from" in capsys.readouterr().err


def test_a_folder_a_list_a_yaml_and_a_bare_name(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(suite.parent)
    for path in (suite.parent, suite, suite / "config-b200.txt", suite / "a.yaml"):
        assert validate([str(path)], root=root) == 0
    assert validate(["config-b200.txt"], root=root) == 0
    capsys.readouterr()
    assert validate(["config-b20.txt"], root=root) == 4
    assert "did you mean 'config-b200.txt'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["missing", "empty folder", "binary", "link", "pipe"])
def test_paths_that_hold_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "x.yaml"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(bytes(range(256)))
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    assert validate([str(path)], root=str(REPOSITORY / "configs")) == 4
    said = capsys.readouterr().err
    assert "x.yaml" in said
    assert "error" in said


def test_the_pool_is_checked_through_the_list(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scout = CONFIG.replace("Qwen/Qwen3-30B-A3B", SCOUT)
    (suite / "a.yaml").write_text(scout)
    assert validate([str(suite)]) == 0
    (suite / "config-h100.txt").write_text("a.yaml\n")
    capsys.readouterr()
    assert validate([str(suite)]) == 4
    said = capsys.readouterr().err
    assert f"{suite / 'a.yaml'}:6: error: server_args: does not fit" in said
    assert "pool h100 has 79.6 GiB" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("use_chat_completions: true", "use_chat_completions: evaluator lm-eval sends prompts to"),
        ("gen_prefix: x", "gen_prefix: belongs to the script's prompts"),
        ("task: gsm8k-border", "task: lm-eval has no task 'gsm8k-border'"),
        ("tokenized_requests: true", "tokenized_requests: unknown key here; prompts are sent as"),
    ],
)
def test_what_the_evaluator_cannot_do_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "job.yaml"
    text = "model_name: m\naccuracy_threshold: 0.9\nnum_questions: 1319\nnum_fewshot: 5\n"
    path.write_text(f"{text}evaluator: lm-eval\n{line}\n")
    assert validate([str(path)]) == 4
    assert f"{path}:6: error: {message}" in capsys.readouterr().err


def test_the_engine_is_asked_whether_it_takes_the_flags(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = CONFIG.replace("--max-model-len 8192", "--kv-cache-dtype fp8")
    (suite / "a.yaml").write_text(flags)
    assert validate([str(suite)]) == 0
    capsys.readouterr()
    assert validate([str(suite)], engine="moeserve") == 4
    assert "a.yaml:6: error: server_args: moeserve refuses" in capsys.readouterr().err
    assert validate([str(suite)], engine="vlm") == 4
    assert "did you mean 'vllm'" in capsys.readouterr().err


def test_equal_warnings_are_told_once(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        (suite / f"{name}.yaml").write_text(CONFIG.replace("0.02", "0.08"))
    (suite / "config-b200.txt").write_text("a.yaml\nb.yaml\nc.yaml\n")
    assert validate([str(suite)]) == 0
    said = capsys.readouterr().out
    assert said.count("8.9 standard errors") == 1
    assert "(and 2 more like it; --verbose lists them)" in said
    assert validate([str(suite)], verbose=True) == 0
    assert capsys.readouterr().out.count("8.9 standard errors") == 3


def test_a_suite_inside_a_suite_keeps_its_own_orphans(suite: Path) -> None:
    inner = suite / "inner"
    inner.mkdir()
    (inner / "x.yaml").write_text(CONFIG)
    (inner / "config-b200.txt").write_text("x.yaml\n")
    assert not survey([str(suite)], suite.parent, is_strict=True).has_errors
    (inner / "y.yaml").write_text(CONFIG)
    found = survey([str(suite)], suite.parent, is_strict=True)
    assert [problem.file for problem in found.problems if problem.severity == "error"] == [
        str(inner / "y.yaml")
    ]


def test_explain(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = CONFIG + "env: {HF_TOKEN: hf_abcdefgh, A: 'x y'}\n"
    (suite / "a.yaml").write_text(text.replace("--max", "--api-key sk-12345678 --max"))
    assert validate([str(suite.parent)], explain="a") == 0
    said = capsys.readouterr().out
    for part in (
        "moe-refactor/a\n",
        "serve Qwen/Qwen3-30B-A3B --api-key *** --max-model-len 8192",
        "HF_TOKEN=*** A='x y'",
        "2 of 8 (TP2); pool b200, sm100",
        "28.4 GiB of weights on each device, of 161.1 GiB (0.9 of 179)",
        "builtin, task gsm8k, metric last-number",
        "0.86 = threshold 0.88 - tolerance 0.02",
        "0.89 points (binomial, n = 1319)",
        "2.8 points below the threshold fail at 80%",
        f"{suite / 'a.yaml'}:4",
        "startup_max_wait_seconds       1200.0",
    ):
        assert part in said, (part, said)
    assert "hf_abcdefgh" not in said
    assert "sk-12345678" not in said
    assert said.count("moe-refactor/a\n") == 1
    assert validate([str(suite.parent)], explain="aa") == 4
    assert "no config 'aa'" in capsys.readouterr().err


def test_explain_of_a_faulty_file_says_what_is_wrong(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (suite / "a.yaml").write_text(CONFIG.replace("seed", "sead"))
    assert validate([str(suite.parent)], explain="a") == 4
    assert "did you mean `seed`" in capsys.readouterr().err


def test_ls(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(suite.parent)
    assert list_jobs(root=root) == 0
    said = capsys.readouterr().out
    assert "(b200, 1 job)" in said
    assert re.search(r"moe-refactor/a +vllm +TP2 +2 GPUs +Qwen/Qwen3-30B-A3B +0.88 - 0.02", said)
    assert list_jobs(["config-none.txt"], root=root) == 4
    assert "here, and no suite under" in capsys.readouterr().err


def test_as_a_process_it_needs_no_torch_and_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [")
    code = (
        "import sys; from evalsuite.cli_config import validate; code = validate(sys.argv[1:]);"
        "heavy = {'torch', 'scipy', 'transformers', 'lm_eval', 'aiohttp'} & set(sys.modules);"
        "print(sorted(heavy)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 4
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Traceback" not in done.stderr
