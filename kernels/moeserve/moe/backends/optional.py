"""Whether an optional library is there and new enough, as a reason instead of a crash.

Receives names and pins, returns "" or why not. The library is really imported, once: a wheel that
is installed but does not load is as absent as one that is not.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def library_reason(
    module: str,
    distribution: str,
    *,
    at_least: tuple[int, ...] = (),
    python: tuple[int, int] = (3, 0),
) -> str:
    """Why `module` cannot be used; "" if it can.

    Args:
        module: What is imported.
        distribution: Its name for pip.
        at_least: Oldest version that fits.
        python: Oldest Python that its pins fit.
    """
    if sys.version_info[:2] < python:
        have = ".".join(map(str, sys.version_info[:2]))
        return f"{distribution} needs Python {python[0]}.{python[1]}, this is {have}"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"{distribution} is not installed"
    if at_least and _numbers(found) < at_least:
        return f"{distribution} {found} is older than {'.'.join(map(str, at_least))}"
    try:
        importlib.import_module(module)
    # A compiled library that does not fit this machine raises OSError or RuntimeError as well.
    except (ImportError, OSError, RuntimeError) as error:
        return f"{distribution} {found} cannot be imported: {error}"
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.6.12.post1" is (0, 6, 12)."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
