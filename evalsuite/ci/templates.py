"""The providers' templates: a file `<provider>.yml.j2` of `ci/providers/` each.

Receives nothing, returns names and texts. `hardware.py` asks for the names, so this file imports
nothing of the package but errors; rendering is `render.py`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from evalsuite.errors import ConfigError

_SUFFIX = ".yml.j2"
# The first lines of a template: which pipeline becomes which file.
_OUTPUT = re.compile(r"^\[# output (\w+): (\S+) #\]$", re.MULTILINE)


def template_folder() -> Path:
    """In a wheel the templates lie beside this file, in a checkout in `ci/providers/`."""
    inside = Path(__file__).parent / "providers"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "ci" / "providers"


@cache
def providers() -> tuple[str, ...]:
    """Names of all providers."""
    found = template_folder().glob(f"*{_SUFFIX}")
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in found))


def template_name(provider: str) -> str:
    """File name of a provider's template.

    Raises:
        ConfigError: No such provider; names those that there are.
    """
    if provider not in providers():
        known = ", ".join(providers()) or "none"
        raise ConfigError(f"--provider {provider!r} has no template; known: {known}")
    return provider + _SUFFIX


def output_path(provider: str, pipeline: str) -> str:
    """Where the provider looks for a pipeline, relative to the repository.

    Raises:
        ConfigError: The template does not say it.
    """
    path = template_folder() / template_name(provider)
    for name, output in _OUTPUT.findall(path.read_text(encoding="utf-8")):
        if name == pipeline:
            return str(output)
    raise ConfigError(f"{path}: no line '[# output {pipeline}: PATH #]' at its top")
