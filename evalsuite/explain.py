"""One job, resolved: what would be run, where, how it is judged, where each value came from.

Receives a job with its sources and pools; returns lines of text. Nothing is started.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evalsuite import engines, tasks
from evalsuite.capacity import memory_share, weights_gib_per_gpu
from evalsuite.config import EvalConfig
from evalsuite.config_checks import noise, num_questions_behind
from evalsuite.errors import ConfigError, Problem
from evalsuite.gates.absolute import Floor, false_alarm_rate
from evalsuite.hardware import load_hardware
from evalsuite.jobs import EvalJob, make_job
from evalsuite.lists import hardware_file, suite_name
from evalsuite.machine import Machine, skip_reason
from evalsuite.masking import MASK, mask_command, mask_env
from evalsuite.names import suggestion
from evalsuite.stats.proportion import binomial_se, normal_quantile
from evalsuite.validate import survey

_INDENT = 20


def explain(job: EvalJob, sources: Mapping[str, str]) -> list[str]:
    """Describe a job.

    Args:
        job: The job.
        sources: Top-level key -> where its value came from.
    """
    metric = tasks.gating_metric(tasks.get(job.config.task), job.config.metric)
    lines = [
        job.id,
        _row("file", str(job.path)),
        *_launch(job),
        *_hardware(job),
        _row("evaluator", f"{job.config.evaluator}, task {job.config.task}, metric {metric}"),
        _row("prompts", _prompts(job.config)),
        *_judgement(job.config),
        "values",
    ]
    for key in EvalConfig.model_fields:
        lines.append(f"  {key:<30} {_value(job.config, key):<44} {sources.get(key, 'default')}")
    return lines


def _row(name: str, text: str) -> str:
    return f"  {name:<{_INDENT}} {text}"


def _launch(job: EvalJob) -> list[str]:
    env = mask_env(job.config.env)
    shown = (
        " ".join(
            f"{name}={value if value == MASK else shlex.quote(value)}"
            for name, value in env.items()
        )
        or "none"
    )
    trust = "yes: Python code of the model is run" if job.config.has_remote_code else "no"
    try:
        engine = engines.get(job.config.engine)
        spec = engine.launch_spec(job)
        command = mask_command(spec.argv) if spec.argv else f"none: {spec.base_url or 'external'}"
        version = engine.version() or "not installed here"
    except ConfigError as error:
        command, version = f"refused: {error}", "-"
    return [
        _row("engine", f"{job.config.engine} ({version})"),
        _row("command", command),
        _row("environment", shown),
        _row("trusts remote code", trust),
    ]


def _hardware(job: EvalJob) -> list[str]:
    pool, layout = job.pool, job.layout
    if pool is None:
        gpus = f"{layout.num_gpus} ({layout}); no pool: named by itself, or in a list of no pool"
    elif pool.vendor == "cpu":
        gpus = f"none ({layout}); pool {pool.name}"
    else:
        gpus = f"{layout.num_gpus} of {pool.num_gpus} ({layout}); pool {pool.name}, {pool.arch}"
    weights = weights_gib_per_gpu(job.config, layout)
    if weights is None:
        memory = "not checked: the model's size is not known here"
    else:
        memory = f"{weights:.1f} GiB of weights on each device"
        if pool is not None:
            share = 1.0 if pool.vendor == "cpu" else memory_share(job.config)
            memory += f", of {pool.memory_gib * share:.1f} GiB ({share:g} of {pool.memory_gib:g})"
    return [
        _row("GPUs", gpus),
        _row("memory", memory),
        _row("on this machine", f"skipped: {job.skip_reason}" if job.skip_reason else "runs"),
    ]


def _prompts(config: EvalConfig) -> str:
    route = "/v1/chat/completions" if config.use_chat_completions else "/v1/completions"
    return (
        f"{config.num_questions} questions, {config.num_fewshot} shots, at most "
        f"{config.max_tokens} tokens, temperature {config.temperature:g}, seed {config.seed}, "
        f"to {route}"
    )


def _judgement(config: EvalConfig) -> list[str]:
    is_calibrated = not isinstance(config.calibration, str)
    sigma = None if isinstance(config.calibration, str) else config.calibration.sigma_run
    floor = Floor(config.accuracy_threshold, config.tolerance, sigma, config.gate.alpha)
    n, power = config.num_questions, config.gate.power
    spread = binomial_se(config.accuracy_threshold, n)
    drop = config.tolerance + normal_quantile(power) * floor.noise(n)
    behind = num_questions_behind(config)
    lines = [
        _row("gate", f"{config.gate.name}, baseline {config.baseline or 'none'}"),
        _row(
            "effective floor",
            f"{floor.value:g} = threshold {config.accuracy_threshold:g} - tolerance "
            f"{config.tolerance:g}",
        ),
        _row(
            "standard error",
            f"{100 * spread:.2f} points (binomial, n = {n}); 95 % half-width "
            f"{196 * spread:.1f} points; tolerance is "
            + (f"{config.tolerance / spread:.1f} of them" if spread else "not comparable"),
        ),
        _row(
            "run-to-run noise",
            f"{100 * noise(config):.2f} points ("
            + ("measured" if is_calibrated else "uncalibrated: upper end of public studies")
            + (f"; threshold made for {behind} questions)" if behind else ")"),
        ),
        _row(
            "detectable drop",
            f"{100 * drop:.1f} points below the threshold fail at {power:.0%}; a build at the "
            f"threshold fails at {false_alarm_rate(floor, n):.2%}",
        ),
        _row("provenance", str(config.provenance) or "none given"),
    ]
    if config.expect_backend is not None:
        expected = config.expect_backend
        lines.append(_row("expected backend", f"{expected.name}, shown as {expected.level}"))
    return lines


def _value(config: EvalConfig, key: str) -> str:
    value = getattr(config, key)
    if key == "env":
        return str(mask_env(value))
    if key == "server_args":
        return mask_command(value) or "()"
    if key == "provenance":
        return repr(str(value))
    text = value.model_dump() if hasattr(value, "model_dump") else value
    return repr(text)


def find_jobs(
    name: str, paths: Sequence[str], root: Path, overrides: Mapping[str, str], machine: Machine
) -> tuple[list[tuple[EvalJob, dict[str, str]]], list[Problem]]:
    """Jobs of this id, file name or stem in what the paths name, each once per pool.

    Returns:
        Jobs with the sources of their values; and the warnings about their files.

    Raises:
        ConfigError: There is none (names the closest), or its file has errors.
    """
    read = survey(paths, root, overrides=overrides)
    hardware = load_hardware(hardware_file(root))
    places = [
        (entry.path, found.suite, hardware.pool_of_list(found.path.name))
        for found in read.lists
        for entry in found.entries
    ]
    listed = {path.resolve() for path, _, _ in places}
    places += [
        (loaded.path, suite_name(loaded.path.parent, root), None)
        for key, loaded in read.configs.items()
        if key not in listed
    ]
    chosen = [
        (path, suite, pool)
        for path, suite, pool in places
        if name in (path.stem, path.name, str(path), f"{suite}/{path.stem}")
    ]
    if not chosen:
        hint = suggestion(name, [path.stem for path, _, _ in places])
        raise ConfigError(f"no config {name!r} in {', '.join(paths)}{hint}")
    files = dict.fromkeys(path.resolve() for path, _, _ in chosen)
    problems = [problem for file in files for problem in read.configs[file].problems]
    jobs = []
    for path, suite, pool in chosen:
        loaded = read.configs[path.resolve()]
        if loaded.config is None:
            raise ConfigError(problems)
        job = make_job(path, loaded.config, pool, suite)
        reason = skip_reason(pool, job.layout.num_gpus, machine, hardware)
        jobs.append((replace(job, skip_reason=reason), loaded.sources))
    return jobs, problems
