"""What keys mean together: thresholds inside the noise, wide tolerances, contradictions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evalsuite.config import read_config

# With --import-mode=importlib a test module cannot import its neighbour by name.
sys.path.insert(0, str(Path(__file__).parent))
from config_files import BASE, errors, load, warnings

sys.path.pop(0)


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
        # The engines' parsers take a beginning of the flag for the whole.
        short = BASE + "server_args: --trust-remote\n"
        assert load(tmp_path, short).has_remote_code
        assert not load(tmp_path, BASE + "server_args: --trust-request-x\n").has_remote_code
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


@pytest.mark.parametrize(
    ("text", "key", "right"),
    [
        ("expect_backend: {nam: triton}\n", "expect_backend.nam", "name"),
        (
            "calibration: {sigma_rum: 0.1, discordant: 0.1, repeats: 3, num_questions: 9}\n",
            "calibration.sigma_rum",
            "sigma_run",
        ),
    ],
)
def test_a_misspelt_required_key_inside_another_is_one_fault(
    tmp_path: Path, text: str, key: str, right: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(BASE + text)
    found = [p for p in read_config(path).problems if p.severity == "error"]
    assert [(p.key, p.message) for p in found] == [(key, f"unknown key; did you mean {right!r}?")]
