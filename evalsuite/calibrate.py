"""Repeats of one build -> its noise, and the tolerance that goes with a false-alarm rate.

Receives the outcomes of a job's repeats and its config, returns `CalibrationReport`; writes it
into the YAML on request. Running the repeats is `cli_stats.py`; the estimates are
`stats/noise.py`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError
from evalsuite.evaluators.base import EvalResult
from evalsuite.files import write_text
from evalsuite.stats.noise import Noise, measure_noise, tolerance_for
from evalsuite.stats.power import detectable_drop_on_top
from evalsuite.stats.proportion import normal_tail
from evalsuite.yaml_edit import Value, set_keys


@dataclass(frozen=True)
class CalibrationReport:
    """What repeats of one build showed.

    Attributes:
        noise: Spread, discordance, mean accuracy.
        flips: Question -> share of repeats in which it was right, for those that differ.
        alpha: False-alarm rate of the suggested tolerance.
        tolerance: Suggested, to go with the measured mean as the threshold; rounded up.
        false_alarm_now: Rate at which this build falls below the file's present floor.
        detectable_drop: What a paired comparison of single runs sees at 5 % and 80 %.
        is_deterministic: Whether every repeat had the same outcomes.
    """

    noise: Noise
    flips: Mapping[int, float]
    alpha: float
    tolerance: float
    false_alarm_now: float
    detectable_drop: float
    is_deterministic: bool

    def lines(self) -> list[str]:
        """Text for the terminal."""
        noise = self.noise
        found = [
            f"repeats          {noise.repeats} of {noise.n} questions, mean accuracy "
            f"{noise.mean_accuracy:.4f}",
            f"sigma_run        {100 * noise.sigma_run:.3f} points "
            f"({100 * noise.sigma_questions:.3f} from flips, {100 * noise.sigma_repeats:.3f} "
            "between repeats)",
            f"discordant       {100 * noise.discordant:.2f} % of questions between two repeats",
            f"flipping         {len(self.flips)} questions",
            f"tolerance        {self.tolerance:g} under a threshold of "
            f"{math.floor(1e4 * noise.mean_accuracy) / 1e4:g}: false alarms at {self.alpha:.2%}",
            f"present floor    false alarms at {self.false_alarm_now:.3g}",
            f"paired gate      sees {100 * self.detectable_drop:.2f} points at 5 % and 80 %",
        ]
        if noise.p_overdispersed < 0.01:
            found.append(
                "note             the repeats spread more than single flips explain (p "
                f"{noise.p_overdispersed:.2g}): whole runs shift, and sigma_run is the spread "
                "between them"
            )
        if self.is_deterministic:
            found.append("note             bit-equal outcomes: repeats carry no information here")
        return found


def calibrate(result: EvalResult, config: EvalConfig, alpha: float = 0.001) -> CalibrationReport:
    """Measure the noise from a result with two or more complete repeats.

    Raises:
        ConfigError: Fewer repeats, or missing answers.
    """
    outcomes = [result.per_question[index] for index in sorted(result.per_question)]
    if result.repeats < 2 or not outcomes or any(None in row for row in outcomes):
        raise ConfigError(
            f"calibration needs two or more complete repeats, got {result.repeats} with "
            f"{sum(None in row for row in outcomes)} questions that lack an answer"
        )
    rows = list(zip(*[[bool(x) for x in row] for row in outcomes], strict=True))
    noise = measure_noise(rows)
    shares = {
        index: sum(map(bool, row)) / len(row) for index, row in sorted(result.per_question.items())
    }
    gap = noise.mean_accuracy - config.effective_floor
    now = normal_tail(gap / noise.sigma_run) if noise.sigma_run > 0 else float(gap < 0)
    return CalibrationReport(
        noise=noise,
        flips={index: share for index, share in shares.items() if 0 < share < 1},
        alpha=alpha,
        tolerance=math.ceil(1e4 * tolerance_for(alpha, noise.sigma_run, noise.n)) / 1e4,
        false_alarm_now=now,
        detectable_drop=detectable_drop_on_top(noise.n, noise.discordant, 0.05, 0.8),
        is_deterministic=noise.discordant == 0.0,
    )


def write_into(
    path: Path, report: CalibrationReport, hardware: str, *, is_threshold_set: bool = False
) -> None:
    """Write `calibration` and `tolerance` (and the threshold, if asked) into a config file.

    Every comment and every other key stays as it is.

    Raises:
        ConfigError: The file has a form that cannot be edited safely.
    """
    noise = report.noise
    values: dict[str, Value] = {
        "tolerance": report.tolerance,
        "calibration": {
            "sigma_run": round(noise.sigma_run, 6),
            "discordant": round(noise.discordant, 6),
            "repeats": noise.repeats,
            "num_questions": noise.n,
            "hardware": hardware,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
    }
    if is_threshold_set:
        values["accuracy_threshold"] = math.floor(1e4 * noise.mean_accuracy) / 1e4
    text = path.read_bytes().decode("utf-8-sig")
    try:
        edited = set_keys(text, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    write_text(path, edited)
