"""One wrong value -> one message with file, line, key path, value and remedy.

Receives the faults that pydantic found and the `Document` they came from; returns `Problem`s.
Called by `config.py`; faults between keys are `config_checks.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from evalsuite.config_types import Calibration, ExpectBackend, Gate, Provenance
from evalsuite.errors import Problem
from evalsuite.names import closest, suggestion
from evalsuite.yaml_loader import Document, dotted

_MODELS: dict[str, type[BaseModel]] = {
    "gate": Gate,
    "expect_backend": ExpectBackend,
    "calibration": Calibration,
    "provenance": Provenance,
}
_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
}

_THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_SECONDS)})")


def is_noise_of_union(fault: Any) -> bool:
    """Whether pydantic reports the branch of `calibration` that was not meant."""
    loc = fault["loc"]
    return (
        len(loc) > 1
        and loc[0] == "calibration"
        and str(loc[1]).startswith("literal[") == isinstance(fault["input"], dict)
        and (str(loc[1]).startswith("literal[") or fault["type"] == "model_type")
    )


def describe_all(
    faults: Sequence[Any],
    document: Document,
    fields: Sequence[str] = (),
    prefix: tuple[str | int, ...] = (),
) -> list[Problem]:
    """Turn the faults of one mapping into messages; a misspelt key is one, not two.

    Args:
        faults: `ValidationError.errors()`.
        document: Where the values come from.
        fields: As in `describe`.
        prefix: As in `describe`.
    """
    meant = {
        (*fault["loc"][:-1], closest(str(fault["loc"][-1]), fields or _fields_of(fault["loc"][0])))
        for fault in faults
        if fault["type"] == "extra_forbidden"
    }
    return [
        describe(fault, document, fields, prefix)
        for fault in faults
        if not (fault["type"] == "missing" and fault["loc"] in meant)
    ]


def describe(
    fault: Any,
    document: Document,
    fields: Sequence[str] = (),
    prefix: tuple[str | int, ...] = (),
) -> Problem:
    """Turn one pydantic fault into a message of ours.

    Args:
        fault: One item of `ValidationError.errors()`.
        document: Where the values come from.
        fields: Valid names at the level of an unknown key; a config's own by default.
        prefix: Key path above the values that were checked.
    """
    path = prefix + tuple(
        part
        for index, part in enumerate(fault["loc"])
        if not (index == 1 and fault["loc"][0] == "calibration" and _is_branch(part))
    )
    line = document.line(path) or 1
    text = _fault_text(fault, path, fields or _fields_of(str(path[0])))
    return Problem("error", text, document.file, line, dotted(path))


def _is_branch(part: Any) -> bool:
    return part == "Calibration" or str(part).startswith("literal[")


def _fault_text(fault: Any, path: tuple[str | int, ...], fields: Sequence[str]) -> str:
    kind, value = fault["type"], fault["input"]
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    if kind == "missing":
        return f"required key is missing; add `{path[-1]}: ...`"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind == "extra_forbidden":
        return f"unknown key{suggestion(str(path[-1]), fields)}"
    if value is None:
        return "has no value; give one or remove the line"
    if kind == "string_too_short":
        return "is empty text; give a name or remove the line"
    if kind == "literal_error":
        valid = [
            part.strip(" '") for part in fault["ctx"]["expected"].replace(" or ", ", ").split(",")
        ]
        return f"{shown} is not valid{suggestion(str(value), valid)}"
    if kind == "string_type":
        if path[0] == "env" and len(path) > 1:
            return (
                f"{shown} is {_kind(value)}, and an environment variable is text; "
                f'write {path[-1]}: "{_as_written(value)}"'
            )
        return f'must be text, not {_kind(value)} ({shown}); write "{_as_written(value)}" in quotes'
    if kind in {"int_type", "int_from_float"}:
        return f"must be a whole number, not {_kind(value)} ({shown}){_number_remedy(value, int)}"
    if kind in {"float_type", "finite_number"}:
        return f"must be a number, not {_kind(value)} ({shown}){_number_remedy(value, float)}"
    if kind == "bool_type":
        return f"must be true or false, not {_kind(value)} ({shown}); write it without quotes"
    if kind in {"tuple_type", "list_type"}:
        return f"must be a list, not {_kind(value)} ({shown}); write `[{_as_written(value)}]`"
    if kind == "dict_type":
        return f'must be a mapping of `NAME: "text"`, not {_kind(value)} ({shown})'
    if kind in {"model_type", "model_attributes_type"}:
        return f"must be a name or a mapping, not {_kind(value)} ({shown})"
    return f"{fault['msg']} (got {shown})"


def _fields_of(key: str) -> list[str]:
    return list(_MODELS[key].model_fields) if key in _MODELS else []


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "nothing usable")


def _as_written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _meant_number(value: Any, wanted: type) -> str:
    """The number of a text such as `93%`, `0,93`, `1,319` or `20m`, "" where it is none."""
    text = str(value).strip()
    if _THOUSANDS.fullmatch(text):
        return text.replace(",", "") if wanted is int else ""
    if found := _DURATION.fullmatch(text):
        return f"{float(found[1]) * _SECONDS[found[2]]:g}" if wanted is float else ""
    number = text.replace(",", ".", 1).removesuffix("%")
    try:
        meant = float(number)
    except ValueError:
        return ""
    return "" if wanted is int else f"{meant / 100 if text.endswith('%') else meant:g}"


def _number_remedy(value: Any, wanted: type) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return (
            f"; write {written}" if (written := _meant_number(value, wanted)) else "; give a number"
        )
    if isinstance(value, bool) or math.isnan(number) or math.isinf(number):
        return "; give a number"
    if wanted is int and number != int(number):
        return f"; write {round(number)}"
    text = str(int(number)) if wanted is int else f"{number:g}"
    return f"; write {text}" + (" without quotes" if isinstance(value, str) else "")
