"""Names that are discovered from folders, and the closest one to a misspelling.

An engine or an evaluator is one file of its folder, and its name is the file's with `-` for `_`;
it is not imported to learn that. A task's file names its tasks itself (`evalsuite.tasks`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from evalsuite.errors import ConfigError

_PACKAGE = Path(__file__).parent
_FOLDERS = {"engine": "engines", "evaluator": "evaluators"}
# What makes a file of such a folder an engine or an evaluator, and not a helper.
_MARKS = {
    "engine": re.compile(r"^ENGINE\b", re.MULTILINE),
    "evaluator": re.compile(r"^NAME\b", re.MULTILINE),
}


@cache
def known(kind: str) -> tuple[str, ...]:
    """Every valid name of a kind: "engine", "task" or "evaluator"."""
    if kind == "task":
        from evalsuite import tasks

        return tuple(tasks.names())
    return tuple(
        path.stem.replace("_", "-")
        for path in sorted((_PACKAGE / _FOLDERS[kind]).glob("*.py"))
        if _MARKS[kind].search(path.read_text(encoding="utf-8"))
    )


def check_known(kind: str, value: str) -> None:
    """Refuse a name that no file bears.

    Raises:
        ValueError: With the closest name and the list of known ones.
    """
    valid = known(kind)
    if value not in valid:
        raise ValueError(f"{value!r} is no {kind}{suggestion(value, valid)}")


def engine_override(value: str | None) -> dict[str, str]:
    """`--engine` as a key that wins over every file's own; {} where it is not given.

    Raises:
        ConfigError: No such engine; said once, and not once a file.
    """
    if not value:
        return {}
    try:
        check_known("engine", value)
    except ValueError as error:
        raise ConfigError(f"--engine {error}") from error
    return {"engine": value}


def closest(value: str, valid: Iterable[str], cutoff: float = 0.55) -> str:
    """The valid name nearest to a misspelling, "" if none is near."""
    by_form = {_form(name): name for name in valid}
    found = difflib.get_close_matches(_form(value), list(by_form), n=1, cutoff=cutoff)
    return by_form[found[0]] if found else ""


# A longer list of names hides the message that it ends.
SHOWN_NAMES = 12
# Shorter parts are in too many names.
_LEAST_PART = 3


def suggestion(value: str, valid: Iterable[str]) -> str:
    """End of a message: the closest name, or the names there are."""
    names = list(valid)
    near = closest(value, names)
    if near:
        return f"; did you mean {near!r}?"
    # The beginning or the middle of long names is near none of them.
    if len(value) >= _LEAST_PART and (longer := [n for n in names if _form(value) in _form(n)]):
        one_of = "" if len(longer) == 1 else "one of "
        return f"; did you mean {one_of}{', '.join(map(repr, longer[:SHOWN_NAMES]))}?"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"; known: {', '.join(names[:SHOWN_NAMES]) or 'none'}{more}"


def _form(name: str) -> str:
    return name.lower().replace("-", "_")
