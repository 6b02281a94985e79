"""A JSON file of a model folder, which has to hold an object. No torch is imported here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeserve.errors import UsageError


def json_object(path: Path) -> dict[str, Any]:
    """Its keys.

    Raises:
        UsageError: It holds no JSON, or something else than an object; names the file.
    """
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON and of UTF-8
        raise UsageError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(keys, dict):
        raise UsageError(f"{path}: expected an object, got {type(keys).__name__}")
    return keys
