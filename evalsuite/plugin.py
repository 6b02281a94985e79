"""pytest plugin: `pytest evalsuite --config config-cpu.txt`.

Loaded in every pytest run of an environment that has this package, and silent in all of them but
those that name `evalsuite` (the package, its folder, or `--pyargs evalsuite`). Only there the
options exist and `pytest_run.py` is registered, which does the work. Imports nothing else, so
that other people's runs pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_PACKAGE = "evalsuite"
RUN_PLUGIN = "evalsuite-run"
# What makes a folder called `evalsuite` ours, also in a clone beside an installed copy.
_OWN_FILES = ("plugin.py", "test_accuracy.py", "pipeline.py")


def _is_own_folder(path: Path) -> bool:
    return path.name == _PACKAGE and all((path / name).is_file() for name in _OWN_FILES)


def names_evalsuite(places: Sequence[str], folder: Path, *, is_pyargs: bool = False) -> bool:
    """Whether a pytest command line asks for this package.

    Args:
        places: Its positional arguments: files, folders, packages, node ids.
        folder: Where pytest was called.
        is_pyargs: Whether `--pyargs` was given: dotted names are packages then.
    """
    for arg in places:
        place = arg.partition("::")[0]
        if place == _PACKAGE or (is_pyargs and place.startswith(f"{_PACKAGE}.")):
            # A folder of that name here is meant; without one, the installed package.
            here = folder / place
            if not here.exists() or _is_own_folder(here):
                return True
        path = folder / place
        if path.exists() and any(map(_is_own_folder, (path.resolve(), path.resolve().parent))):
            return True
    return False


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options, and the plugin that reads them, where the run is ours."""
    config = pluginmanager.get_plugin("pytestconfig")
    assert config is not None
    given = config.invocation_params
    if pluginmanager.has_plugin(RUN_PLUGIN):
        return
    # pytest's own options are known by now, so that the value of `-k evalsuite` is no place.
    known = parser.parse_known_args([str(arg) for arg in given.args])
    if not names_evalsuite(known.file_or_dir, given.dir, is_pyargs=known.pyargs):
        return
    from evalsuite import pytest_options, pytest_run

    pytest_options.add_options(parser)
    pluginmanager.register(pytest_run, "evalsuite-fixtures")
    pluginmanager.register(pytest_run.Plugin(), RUN_PLUGIN)


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """`pytest evalsuite` away from a clone means the installed package."""
    if not early_config.pluginmanager.has_plugin(RUN_PLUGIN):
        return
    folder = early_config.invocation_params.dir
    for position, arg in enumerate(args):
        place, colons, rest = arg.partition("::")
        if place == _PACKAGE and not (folder / place).exists():
            args[position] = f"{Path(__file__).parent}{colons}{rest}"
