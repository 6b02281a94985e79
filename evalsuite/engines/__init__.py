"""Engines by name, discovered from the modules of this folder.

Receives a config's `engine` value, returns the module's `ENGINE` object. What an engine must
answer is `base.py`; starting processes is `evalsuite/server.py`.
"""

from __future__ import annotations

import importlib

from evalsuite.engines.base import Engine
from evalsuite.errors import ConfigError, Problem
from evalsuite.names import known, suggestion


def names() -> tuple[str, ...]:
    """Names of all engines, sorted."""
    return known("engine")


def get(name: str) -> Engine:
    """Find an engine.

    Raises:
        ConfigError: Unknown name; the message has the closest one.
    """
    if name not in names():
        message = f"{name!r} is no engine{suggestion(name, names())}"
        raise ConfigError(Problem("error", message, key="engine"))
    engine: Engine = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").ENGINE
    return engine
