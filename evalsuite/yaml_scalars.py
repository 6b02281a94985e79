"""One plain (unquoted) YAML scalar -> the value that was meant, or why it is ambiguous.

YAML 1.1, which most Python tools read, and YAML 1.2 differ on some scalars. Where both
readings agree, or only one can be meant, the value is returned; where they differ in value
(`010`: 8 or 10) the scalar is refused with the remedy. Used by `yaml_loader.py` only.
"""

from __future__ import annotations

import re

_NULLS = {"", "~", "null", "Null", "NULL"}
# YAML 1.1 booleans as PyYAML reads them. Where text is meant the caller's type check says
# "quote it"; where a boolean is meant this is what the field's loader reads.
_TRUE = {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"}
_FALSE = {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
# Longest run of digits read as a number: beyond it nothing here can be meant, and Python
# itself refuses to convert more than 4300.
_MAX_DIGITS = 40
_HEX = re.compile(r"[-+]?0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+|[-+]?0o[0-7]+|[-+]?0b[01_]+")
_UNDERSCORED = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_SPECIAL = {
    ".inf": float("inf"),
    "+.inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}


def read_scalar(raw: str) -> tuple[object, str]:
    """Read one plain scalar.

    Returns:
        The value and "", or None and the message that refuses it. Dates stay the text they
        are written as; no key here wants a date object.
    """
    if raw in _NULLS:
        return None, ""
    if raw in _TRUE or raw in _FALSE:
        return raw in _TRUE, ""
    if raw.lower() in _SPECIAL:
        return _SPECIAL[raw.lower()], ""
    if raw[0] not in "+-.0123456789":
        return raw, ""
    if len(raw) <= _MAX_DIGITS:
        return _read_number(raw)
    if _INT.fullmatch(raw) or _FLOAT.fullmatch(raw):
        return None, f"a number of {len(raw)} digits cannot be meant; quote it if it is text"
    return raw, ""


def _read_number(raw: str) -> tuple[object, str]:
    if _INT.fullmatch(raw):
        return int(raw), ""
    if _HEX.fullmatch(raw):
        return int(raw, 16), ""
    if _OCTAL.fullmatch(raw):
        return None, (
            f"`{raw}` is octal or binary to some YAML readers and decimal or text to others; "
            f'write the decimal number, or "{raw}" in quotes if it is text'
        )
    if _SEXAGESIMAL.fullmatch(raw):
        return None, (
            f"`{raw}` is a base-60 number in YAML 1.1 and text in YAML 1.2; "
            f'write the number of seconds, or "{raw}" in quotes if it is text'
        )
    if _UNDERSCORED.fullmatch(raw):
        return None, (
            f"`{raw}` is a number in YAML 1.1 and text in YAML 1.2; "
            f'write {raw.replace("_", "")}, or "{raw}" in quotes if it is text'
        )
    if _FLOAT.fullmatch(raw):
        return float(raw), ""
    return raw, ""
