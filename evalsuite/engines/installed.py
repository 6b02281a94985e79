"""Finds an engine that is installed somewhere, without importing it (which takes seconds).

Receives a distribution's name and its command; returns version text and paths. The engine may
live in an environment of its own: its command on the PATH leads to that environment's metadata.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path


def version_here(*distributions: str) -> str:
    """Version of the first of `distributions` in this interpreter's environment, "" if none."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def version_of_command(command: str, *distributions: str) -> str:
    """Version in the environment that a command on the PATH belongs to, "" if unknown."""
    found = shutil.which(command)
    if found is None:
        return ""
    # A console script lies in <env>/bin; through links, the link's own folder counts.
    for library in sorted(Path(found).parent.parent.glob("lib*/python3*/site-packages")):
        for name in distributions:
            spelled = re.sub(r"[-_.]+", "_", name)
            for folder in sorted(library.glob(f"{spelled}-*.dist-info"), reverse=True):
                return folder.name.removesuffix(".dist-info").partition("-")[2]
    return ""
