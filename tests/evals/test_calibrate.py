"""Calibrate: noise from repeats, a tolerance with a known rate, YAML edited in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from verdict_helpers import make_job, make_result

from evalsuite.calibrate import CalibrationReport, calibrate, write_into
from evalsuite.config import load_config
from evalsuite.errors import ConfigError
from evalsuite.yaml_edit import set_keys

YAML = """\
# Qwen3 on Triton
model_name: "Qwen/Qwen3-30B-A3B"   # bf16
accuracy_threshold: 0.88
tolerance: 0.02  # a guess
num_questions: 1319
num_fewshot: 5

calibration: uncalibrated  # measure me
# how it is served
server_args: >-
  --tensor-parallel-size 2
"""


def report(repeats: int = 20, seed: int = 0) -> CalibrationReport:
    rng = np.random.default_rng(seed)
    p = np.zeros(1319)
    p[:1140] = 1.0
    p[1140:1230] = 0.5
    rows = rng.random((repeats, 1319)) < p
    result = make_result(
        int(rows[0].sum()), 1319, repeats=repeats,
        per_question={i: tuple(map(bool, rows[:, i])) for i in range(1319)},
    )  # fmt: skip
    return calibrate(result, make_job().config)


def test_calibration_measures_the_process() -> None:
    found = report()
    true_sigma = np.sqrt(90 * 0.25) / 1319
    assert found.noise.sigma_run == pytest.approx(true_sigma, rel=0.05)
    assert found.noise.discordant == pytest.approx(2 * 90 * 0.25 / 1319, rel=0.05)
    assert set(found.flips) <= set(range(1140, 1230))
    assert len(found.flips) == 90
    assert found.tolerance == pytest.approx(3.09 * true_sigma + 0.5 / 1319, abs=6e-4)
    assert 0.014 < found.detectable_drop < 0.02
    assert not found.is_deterministic
    assert any("sigma_run" in line for line in found.lines())


def test_suggested_tolerance_keeps_its_rate() -> None:
    found = report()
    rng = np.random.default_rng(9)
    accuracies = (1140 + rng.binomial(90, 0.5, 400_000)) / 1319
    rate = (accuracies < 1185 / 1319 - found.tolerance).mean()
    assert rate <= 0.0013


def test_bit_equal_repeats_are_named() -> None:
    result = make_result(1, 2, repeats=3, per_question={0: (True,) * 3, 1: (False,) * 3})
    found = calibrate(result, make_job(num_questions=2).config)
    assert found.is_deterministic
    assert "carry no information" in found.lines()[-1]


@pytest.mark.parametrize("outcomes", [{0: (True,)}, {0: (True, None)}])
def test_needs_two_whole_repeats(outcomes: dict[int, tuple[bool | None, ...]]) -> None:
    result = make_result(1, 1, repeats=1, per_question=outcomes)
    with pytest.raises(ConfigError, match="two or more complete repeats"):
        calibrate(result, make_job(num_questions=1).config)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_written_into_the_yaml(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(YAML.replace("\n", newline).encode())
    found = report()
    write_into(path, found, "2 cores")
    text = path.read_bytes().decode()
    assert text.count("\r\n") == (text.count("\n") if newline == "\r\n" else 0)
    for kept in ("# Qwen3 on Triton", "# bf16", "# a guess", "# measure me", "# how it is served"):
        assert kept in text
    config = load_config(path)
    assert config.tolerance == found.tolerance
    assert config.calibration != "uncalibrated"
    assert config.calibration.sigma_run == pytest.approx(found.noise.sigma_run, abs=1e-6)
    assert config.calibration.hardware == "2 cores"
    assert config.accuracy_threshold == 0.88
    write_into(path, found, "4 cores", is_threshold_set=True)
    again = load_config(path)
    assert again.calibration != "uncalibrated"
    assert again.calibration.hardware == "4 cores"
    assert again.accuracy_threshold == pytest.approx(found.noise.mean_accuracy, abs=1e-4)
    assert path.read_bytes().decode().count("calibration:") == 1


def test_set_keys_keeps_everything_else() -> None:
    edited = set_keys(YAML, {"tolerance": 0.0125, "max_tokens": 512})
    assert "tolerance: 0.0125  # a guess" in edited
    assert edited.endswith("max_tokens: 512\n")
    before, after = yaml.safe_load(YAML), yaml.safe_load(edited)
    assert after == {**before, "tolerance": 0.0125, "max_tokens": 512}


def test_set_keys_keeps_comments_inside_a_block() -> None:
    text = "calibration:\n  # by hand\n  sigma_run: 0.1  # wide\n  discordant: 0.2\nb: 1\n"
    edited = set_keys(text, {"calibration": {"sigma_run": 0.2, "discordant": 0.3}})
    assert edited == (
        "calibration:\n  # by hand\n  sigma_run: 0.2  # wide\n  discordant: 0.3\nb: 1\n"
    )


@pytest.mark.parametrize("text", ["{a: 1, tolerance: 0.02}\n", '"tolerance": 0.02\n'])
def test_forms_it_does_not_know_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="by hand"):
        set_keys(text, {"tolerance": 0.01})
