"""Evaluators by name, discovered from the modules of this folder.

Receives a config's `evaluator` value, returns the module's evaluator; a module that is one has
`NAME` and `evaluate`. What they return is `base.py`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import cast

from evalsuite.errors import ConfigError, Problem
from evalsuite.evaluators.base import Evaluator
from evalsuite.names import suggestion


@functools.cache
def _all() -> dict[str, Evaluator]:
    found: dict[str, Evaluator] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        if hasattr(loaded, "NAME"):
            found[loaded.NAME] = cast("Evaluator", loaded)
    return found


def names() -> list[str]:
    """Names of all evaluators, sorted."""
    return sorted(_all())


def get(name: str) -> Evaluator:
    """Find an evaluator.

    Raises:
        ConfigError: Unknown name; the message lists the known ones.
    """
    if name in _all():
        return _all()[name]
    message = f"unknown evaluator {name!r}{suggestion(name, names())}"
    raise ConfigError(Problem("error", message, key="evaluator"))
