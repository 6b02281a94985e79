"""Whether an optional library is there and new enough, as a reason instead of a crash.

Receives names and pins, returns "" or why not. The library is really imported, once: a wheel that
is installed but does not load is as absent as one that is not.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


@cache
def library_reason(
    module: str,
    distribution: str,
    *,
    at_least: tuple[int, ...] = (),
    python: tuple[int, int] = (3, 0),
    has_binding_pins: bool = False,
) -> str:
    """Why `module` cannot be used; "" if it can.

    Args:
        module: What is imported.
        distribution: Its name for pip.
        at_least: Oldest version that fits.
        python: Oldest Python that its pins fit.
        has_binding_pins: What it requires is looked up too: one of its requirements in another
            version than it wants is a reason. For libraries that generate code with a compiler of
            one version and break with the next.
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
    unmet = _unmet_pin(distribution) if has_binding_pins else ""
    if unmet:
        return f"{distribution} {found} wants {unmet}"
    try:
        importlib.import_module(module)
    # A compiled library that does not fit this machine raises OSError or RuntimeError as well.
    except (ImportError, OSError, RuntimeError) as error:
        return f"{distribution} {found} cannot be imported: {error}"
    return ""


def _unmet_pin(distribution: str) -> str:
    """The first requirement that this environment does not meet, and what is there instead."""
    for line in requires(distribution) or ():
        pin = Requirement(line)
        if pin.marker is not None and not pin.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(pin.name)
        except PackageNotFoundError:
            return f"{pin.name}{pin.specifier}, which is not installed"
        if not pin.specifier.contains(found, prereleases=True):
            return f"{pin.name}{pin.specifier}, this is {found}"
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.6.12.post1" is (0, 6, 12)."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
