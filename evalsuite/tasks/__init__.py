"""Tasks by name, discovered from the modules of this folder.

Receives a config's `task` value, returns the task; a module that offers tasks has a tuple
`TASKS`. How questions are asked is `evaluators/`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from evalsuite.errors import ConfigError, Problem
from evalsuite.names import suggestion
from evalsuite.tasks.base import Task


@functools.cache
def _all() -> dict[str, Task]:
    tasks: dict[str, Task] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for task in getattr(loaded, "TASKS", ()):
            tasks[task.name] = task
    return tasks


def names() -> list[str]:
    """Names of all tasks, sorted."""
    return sorted(_all())


def get(name: str) -> Task:
    """Find a task.

    Raises:
        ConfigError: Unknown name; the message lists the known ones.
    """
    if name in _all():
        return _all()[name]
    raise ConfigError(
        Problem("error", f"unknown task {name!r}{suggestion(name, names())}", key="task")
    )


def gating_metric(task: Task, metric: str | None) -> str:
    """Return the metric that gates: the config's, or the task's own.

    Raises:
        ConfigError: The task has no such metric.
    """
    if metric is None:
        return task.default_metric
    if metric in task.metrics:
        return metric
    hint = suggestion(metric, task.metrics)
    message = f"task {task.name!r} has no metric {metric!r}{hint}"
    raise ConfigError(Problem("error", message, key="metric"))
