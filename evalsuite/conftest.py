"""Lets `pytest evalsuite` work from a clone, installed or not; see `plugin.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
try:
    import evalsuite.plugin  # noqa: F401
except ModuleNotFoundError:
    # Appended, never first: beside the package lies the folder `kernels/`, which must not
    # shadow the client library of that name.
    sys.path.append(str(_HERE.parent))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the plugin where no entry point did."""
    from evalsuite import plugin

    if not pluginmanager.is_registered(plugin):
        pluginmanager.register(plugin, "evalsuite")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest .` from the root is not a run of the suite: leave its one test alone."""
    is_test = collection_path.name == "test_accuracy.py" and collection_path.parent == _HERE
    return True if is_test and not config.pluginmanager.has_plugin("evalsuite-run") else None
