"""Steps that need no GPU: the checks of a repository, and the choice of jobs by changed files.

Receives the CPU pool and the user's options, returns `Step`s. Steps that evaluate are `plan.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from evalsuite.ci.model import Step
from evalsuite.errors import ConfigError
from evalsuite.hardware import Hardware, Pool

RESULTS = "results"


def cpu_pool(hardware: Hardware) -> Pool:
    """The first pool without accelerators.

    Raises:
        ConfigError: There is none.
    """
    for pool in hardware.pools.values():
        if not pool.num_gpus:
            return pool
    raise ConfigError("hardware.yaml has no pool without a GPU for the checks (vendor: cpu)")


def check_steps(pool: Pool) -> tuple[Step, ...]:
    """What any fork can run: no GPU, no secret, no model hub."""

    def make(verb: str, label: str, **more: object) -> Step:
        return Step(verb, label, pool, f"make {verb}", pool.timeout_minutes, **more)  # type: ignore[arg-type]

    return (
        make("check", "lint, types, configs, rendered pipelines"),
        make("test", "tests"),
        make(
            "demo",
            "YAML to verdict on a CPU",
            artifact_paths=(f"{RESULTS}/**/*",),
            summary=f"{RESULTS}/*/summary.md",
        ),
    )


def nothing_to_do(pool: Pool) -> Step:
    """An explicit step, so that a change which touches no job is seen to have been looked at."""
    command = "echo 'nothing to do: no job can have been changed'"
    return Step("nothing-to-do", "nothing to do", pool, command, pool.timeout_minutes)


def select_step(
    pool: Pool, setup: Sequence[str], select_args: Sequence[str], num_retries: int
) -> Step:
    """The choice by changed files; how what it prints becomes steps is each provider's way."""
    argv = ["evalsuite", "ci", "select", "--explain", *select_args]
    return Step(
        key="select",
        label="which jobs the change touches",
        pool=pool,
        command=shlex.join(argv),
        timeout_minutes=pool.timeout_minutes,
        setup=tuple(setup) or install_commands(""),
        env={"PYTHONUNBUFFERED": "1"},
        secrets=("HF_TOKEN",),
        num_retries=num_retries,
    )


def install_commands(extras: str) -> tuple[str, ...]:
    """This repository into a virtual environment that sees the machine's own packages."""
    return (
        "python3 -m venv --system-site-packages .venv",
        f".venv/bin/python -m pip install -q -c constraints.txt -e '.{extras}'",
        'export PATH="$PWD/.venv/bin:$PATH"',
    )
