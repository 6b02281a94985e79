"""A server's log, read safely: bounded, any bytes, no terminal escapes.

Receives the path of a log that a server may still be writing (or flooding); returns text for
messages, reports and the engines' readers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from evalsuite.masking import mask_text

MAX_TAIL_LINES = 40
_MAX_LINE_CHARS = 500
_TAIL_BYTES = 128 * 1024
# Enough for the start-up part of any server's log, where the backend is chosen, and for its end.
_TEXT_BYTES = 4 * 1024 * 1024
# CSI and OSC sequences, then any other two-character escape.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Remove terminal escapes and control characters; newlines and tabs stay."""
    # A carriage return redraws a line (progress bars): what is drawn last is what counts.
    # Not by a regular expression: a line of 50 MiB would take it quadratic time.
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    text = "\n".join(lines)
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def tail(path: Path, secrets: Sequence[str] = (), num_lines: int = MAX_TAIL_LINES) -> list[str]:
    """The last lines, cleaned, each bounded; [] where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            start = max(0, file.tell() - _TAIL_BYTES)
            file.seek(start)
            data = file.read(_TAIL_BYTES)
    except OSError:
        return []
    lines = mask_text(clean(data.decode("utf-8", "replace")), secrets).split("\n")
    lines = [line.rstrip() for line in lines if line.strip()]
    return [_shorten(line) for line in lines[-num_lines:]]


def text(path: Path, secrets: Sequence[str] = ()) -> str:
    """The log's first and last megabytes, cleaned; "" where there is no log."""
    try:
        with path.open("rb") as file:
            head = file.read(_TEXT_BYTES)
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(len(head), size - _TEXT_BYTES))
            rest = file.read(_TEXT_BYTES)
    except OSError:
        return ""
    return mask_text(clean((head + rest).decode("utf-8", "replace")), secrets)


def _shorten(line: str) -> str:
    if len(line) <= _MAX_LINE_CHARS:
        return line
    return f"{line[:_MAX_LINE_CHARS]} [... {len(line) - _MAX_LINE_CHARS} more characters]"
