"""Changing a few top-level keys of a YAML file and nothing else: comments and order stay.

Receives the file's text and new values, returns the new text. Only block-style top-level keys
are edited, which is what configs are; what a value means is `config.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import yaml

from evalsuite.errors import ConfigError

Scalar = str | int | float
Value = Scalar | Mapping[str, Scalar]


def set_keys(text: str, values: Mapping[str, Value]) -> str:
    """Set top-level keys; a mapping becomes an indented block.

    Raises:
        ConfigError: The edit would change another key (a form this editor does not know).
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.replace("\r\n", "\n").split("\n")
    present = yaml.safe_load(text) or {}
    for key, value in values.items():
        if key in present and _span(lines, key) is None:
            raise ConfigError(f"{key} is written in a form that cannot be edited; edit it by hand")
        lines = _set(lines, key, value)
    edited = newline.join(lines)
    after = yaml.safe_load(edited)
    plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    if after != {**present, **plain}:
        changed = sorted(
            key for key in {*present, *after} - {*values} if present.get(key) != after.get(key)
        )
        raise ConfigError(
            f"cannot set {', '.join(values)} without changing {', '.join(changed) or 'the file'}; "
            "edit the file by hand"
        )
    return edited


def _scalar(value: Scalar) -> str:
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z][\w .,/()-]*", value) and yaml.safe_load(value) == value
        return value if is_plain else json.dumps(value)
    return repr(value)


def _span(lines: list[str], key: str) -> tuple[int, int] | None:
    """First line of a top-level key and the line after its block."""
    pattern = re.compile(rf"{re.escape(key)}\s*:(\s|$)")
    start = next((i for i, line in enumerate(lines) if pattern.match(line)), None)
    if start is None:
        return None
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or lines[end][0] in " \t"):
        end += 1
    # Blank lines and indented comments after the block belong to what follows.
    while end > start + 1 and not lines[end - 1].strip():
        end -= 1
    return start, end


def _comment(line: str) -> str:
    """Trailing comment of a line, with the space before it."""
    match = re.search(r"\s+#.*$", re.sub(r"""("[^"]*"|'[^']*')""", "", line))
    return match.group() if match else ""


def _set(lines: list[str], key: str, value: Value) -> list[str]:
    span = _span(lines, key)
    if span is None:
        body = list(lines)
        while body and not body[-1].strip():
            body.pop()
        return [*body, *_block(key, value, {}, ""), ""]
    start, end = span
    comments = {}
    for line in lines[start + 1 : end]:
        match = re.match(r"\s+([\w-]+)\s*:", line)
        if match:
            comments[match.group(1)] = _comment(line)
    whole = [line for line in lines[start + 1 : end] if line.strip().startswith("#")]
    block = _block(key, value, comments, _comment(lines[start]))
    return [*lines[:start], block[0], *whole, *block[1:], *lines[end:]]


def _block(key: str, value: Value, comments: Mapping[str, str], comment: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{key}: {_scalar(value)}{comment}"]
    inner = [f"  {k}: {_scalar(v)}{comments.get(k, '')}" for k, v in value.items()]
    return [f"{key}:{comment}", *inner]
