"""Which build of a server gives the answers, so that those of two builds are never one accuracy.

Receives a server's address; returns what it says of itself at `/version`, as one line of text. The
ledger keeps that line beside the answers and refuses another one (`ledger.py`).
"""

from __future__ import annotations

import http.client
import json

from evalsuite.readiness import get

_TIMEOUT_S = 10.0
# Of a field; what is longer is no version.
_MAX_CHARS = 100
# Ours says both; vLLM the first, in which its builds from a clone name the commit.
_FIELDS = ("version", "source")


def server_build(base_url: str, api_key: str = "") -> str:
    """Version and source hash of a ready server, "" where it does not say."""
    try:
        status, body = get(base_url, "/version", timeout_s=_TIMEOUT_S, api_key=api_key)
        said = json.loads(body) if status == 200 else {}
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return ""
    if not isinstance(said, dict):
        return ""
    found = {key: said[key] for key in _FIELDS if isinstance(said.get(key), str)}
    return ", ".join(
        f"{key} {text}"
        for key, text in found.items()
        if text.isprintable() and 0 < len(text) <= _MAX_CHARS
    )


def resumed_note(num_kept: int, before: str, now: str) -> str:
    """What to say of answers that an earlier, interrupted run has left.

    Args:
        num_kept: Such answers.
        before: Build that gave them, "" if nobody wrote it down.
        now: Build that gives the others, "" if unknown; never another one than a known `before`.
    """
    kept = f"{num_kept} answers are from before the run was resumed"
    if not before or not now:
        return f"{kept}; nothing says whether the server was rebuilt since"
    if "source " not in now:
        return f"{kept}, by a server that said {now}, too; a rebuild need not change that"
    return f"{kept}, by the same build of the server ({now})"
