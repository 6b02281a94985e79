"""What the keys of a config mean together.

Receives a `Document` (unknown keys) or a finished `EvalConfig` (contradictions, thresholds that
decide little); returns `Problem`s with file, line, key, value and remedy. Called by `config.py`;
one wrong value is `config_faults.py`; what a pool can hold is checked in `jobs.py`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from evalsuite import config, tasks
from evalsuite.config_keys import ELSEWHERE, SYNONYMS
from evalsuite.errors import Problem
from evalsuite.names import closest, suggestion
from evalsuite.server_args import (
    DP_FLAGS,
    EP_FLAGS,
    PP_FLAGS,
    TP_FLAGS,
    TRUST_FLAGS,
    flag_values,
    has_switch,
    parallel_size,
)
from evalsuite.yaml_loader import Document

# Questions in each task's test set; GSM8K: openai/gsm8k, test split; MiniGSM was made
# as large on purpose.
TEST_SET_SIZE = dict.fromkeys(
    ("gsm8k", "gsm8k-border", "gsm8k-lm-eval", "gsm8k_cot", "minigsm"), 1319
)
# Public repeat studies put the run-to-run deviation on the same questions at 0.15 to 0.40
# binomial standard errors; the upper end stands in until a config is calibrated.
RUN_NOISE_SHARE = 0.4
# Two-sided 95 % of a normal deviate: a healthy model beyond it would fail by chance.
NOISE_Z = 1.96
# A tolerance wider than this many standard errors lets a drop pass that anyone could see.
WIDE_TOLERANCE_SE = 4.0


def standard_error(accuracy: float, num_questions: int) -> float:
    """Binomial standard error of an accuracy over `num_questions`, as a fraction."""
    return math.sqrt(accuracy * (1 - accuracy) / num_questions)


def num_questions_behind(cfg: config.EvalConfig) -> int | None:
    """Questions that the threshold was made for, None where nothing is known."""
    if cfg.provenance.num_questions is not None:
        return cfg.provenance.num_questions
    if isinstance(cfg.calibration, config.Calibration):
        return cfg.calibration.num_questions
    return TEST_SET_SIZE.get(cfg.task)


def noise(cfg: config.EvalConfig) -> float:
    """Standard deviation of this config's accuracy for a model that is exactly at threshold.

    Run-to-run noise (measured, or the upper end of public studies) plus, where fewer questions
    are asked than the threshold was made for, the noise of which questions those are.
    """
    binomial = standard_error(cfg.accuracy_threshold, cfg.num_questions)
    if isinstance(cfg.calibration, config.Calibration):
        scale = math.sqrt(cfg.calibration.num_questions / cfg.num_questions)
        run = cfg.calibration.sigma_run * scale
    else:
        run = RUN_NOISE_SHARE * binomial
    full = num_questions_behind(cfg)
    subset = 0.0
    if full is not None and cfg.num_questions < full:
        subset = binomial * math.sqrt(1 - cfg.num_questions / full)
    return math.hypot(run, subset)


def check_keys(document: Document) -> list[Problem]:
    """Unknown keys, each with the nearest valid one or the place where it belongs."""
    valid = config.EvalConfig.model_fields
    present = document.value
    problems = []
    for key in present:
        if key in valid or key.startswith("x-") or key in document.holders:
            continue
        problems.append(
            Problem(
                "error",
                _unknown_key(key, present),
                document.file,
                document.line((key,)),
                key,
            )
        )
    env = present.get("env")
    for name in env if isinstance(env, dict) else ():
        if name in valid:
            problems.append(
                Problem(
                    "error",
                    f"is a config key one level too deep; move `{name}` out of `env`",
                    document.file,
                    document.line(("env", name)),
                    f"env.{name}",
                )
            )
    return problems


def meant_keys(present: dict[str, Any]) -> set[str]:
    """Valid keys that the unknown ones of a file are taken for."""
    valid = config.EvalConfig.model_fields
    known = {*valid, *ELSEWHERE}
    unknown = [key for key in present if key not in known and not key.startswith("x-")]
    return {SYNONYMS.get(key) or closest(key, valid) for key in unknown} - {""}


def _unknown_key(key: str, present: dict[str, Any]) -> str:
    valid = config.EvalConfig.model_fields
    value = present[key]
    if key in SYNONYMS:
        right = SYNONYMS[key]
        if right in present:
            return (
                f"unknown key, and `{right}` is given too: {key} = {value!r} contradicts "
                f"{right} = {present[right]!r}; keep `{right}` alone"
            )
        return f"unknown key; here it is called `{right}`"
    if key in ELSEWHERE:
        return f"unknown key here; {ELSEWHERE[key]}"
    near = closest(key, valid)
    if isinstance(value, dict):
        nested = [name for name in value if name in valid]
        if nested and not near:
            return f"unknown key; its `{nested[0]}` belongs one level up, at the top of the file"
    if near:
        also = f" (`{near}` is given too; keep one)" if near in present else ""
        return f"unknown key; did you mean `{near}`?{also}"
    return f"unknown key; valid keys: {', '.join(sorted(valid))}"


def check_meaning(cfg: config.EvalConfig, document: Document) -> list[Problem]:
    """Contradictions (errors), and settings that decide little (warnings)."""
    problems = []

    def add(severity: str, key: str, message: str) -> None:
        line = document.line((key,)) or 1
        problems.append(Problem(severity, message, document.file, line, key))

    if cfg.effective_floor <= 0:
        add(
            "error",
            "tolerance" if ("tolerance",) in document.lines else "accuracy_threshold",
            f"accuracy_threshold - tolerance = {cfg.accuracy_threshold:g} - {cfg.tolerance:g} "
            "is not above 0, so this config could never fail; raise the one or lower the other",
        )
    for names in (TP_FLAGS, DP_FLAGS, PP_FLAGS):
        _try(partial(parallel_size, cfg.server_args, names), add)
    _try(lambda: has_switch(cfg.server_args, EP_FLAGS), add)
    has_flag = _try(lambda: has_switch(cfg.server_args, TRUST_FLAGS), add)
    if has_flag and ("trust_remote_code",) in document.lines and not cfg.trust_remote_code:
        add(
            "error",
            "trust_remote_code",
            "is false, but server_args holds --trust-remote-code; keep one of the two",
        )
    elif has_flag or cfg.trust_remote_code:
        key = "trust_remote_code" if cfg.trust_remote_code else "server_args"
        add("note", key, "trusts Python code that comes with the model")
    metrics = tasks.get(cfg.task).metrics
    if cfg.metric is not None and cfg.metric not in metrics:
        add(
            "error",
            "metric",
            f"{cfg.metric!r} is no metric of {cfg.task}{suggestion(cfg.metric, metrics)}",
        )
    _check_backend(cfg, add)
    if cfg.gate.name in {"paired", "equal"} and cfg.baseline is None:
        add("warning", "gate", f"gate {cfg.gate.name} needs a `baseline`; name one")
    _check_numbers(cfg, add)
    return problems


def _try(read: Any, add: Any) -> Any:
    """Run one reading of the server arguments; its fault becomes a problem."""
    try:
        return read()
    except ValueError as error:
        add("error", "server_args", str(error))
        return None


def _check_backend(cfg: config.EvalConfig, add: Any) -> None:
    asked = flag_values(cfg.server_args, ("--moe-backend",))
    if cfg.expect_backend is None or not asked or asked[-1] in {None, "auto"}:
        return
    if str(asked[-1]).replace("-", "_") != cfg.expect_backend.name.replace("-", "_"):
        add(
            "error",
            "expect_backend",
            f"expects {cfg.expect_backend.name!r}, but server_args asks for "
            f"--moe-backend {asked[-1]}; this job could only end in ERROR",
        )


def _check_numbers(cfg: config.EvalConfig, add: Any) -> None:
    size, behind = TEST_SET_SIZE.get(cfg.task), num_questions_behind(cfg)
    if size is not None and cfg.num_questions > size:
        add("warning", "num_questions", f"{cfg.num_questions} asked, but {cfg.task} has {size}")
    elif behind is not None and cfg.num_questions != behind:
        half_width = 100 * NOISE_Z * standard_error(cfg.accuracy_threshold, cfg.num_questions)
        add(
            "warning",
            "num_questions",
            f"the threshold was made for {behind} questions, not {cfg.num_questions} "
            f"(95 % half-width {half_width:.1f} points); ask {behind}, or give "
            "`provenance.num_questions`",
        )
    spread = standard_error(cfg.accuracy_threshold, cfg.num_questions)
    default = "" if "tolerance" in cfg.model_fields_set else " (the default)"
    if 0 < WIDE_TOLERANCE_SE * spread < cfg.tolerance:
        add(
            "warning",
            "tolerance",
            f"{cfg.tolerance:g}{default} is {cfg.tolerance / spread:.1f} standard errors "
            f"({100 * spread:.2f} points each): a drop of {100 * cfg.tolerance:.0f} points passes; "
            f"{2 * spread:.3f} would be two",
        )
    if cfg.tolerance < NOISE_Z * noise(cfg):
        add(
            "warning",
            "accuracy_threshold",
            f"the threshold lies inside the noise for n = {cfg.num_questions}: the tolerance of "
            f"{100 * cfg.tolerance:.1f} points is under the 95 % half-width of "
            f"{100 * NOISE_Z * noise(cfg):.1f}, so a healthy model fails by chance",
        )
