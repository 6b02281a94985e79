"""Writing files whole, and file names from job ids.

Receives text and names; used by baselines, reports and the YAML edit of `calibrate`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 so that a reader sees the old file or the new one, never half of it.

    Line ends are written as they are in `text`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    partial.replace(path)
    return path


def file_stem(job_id: str) -> str:
    """Turn a job id ("suite/name") into one that every file system takes."""
    return re.sub(r"[^\w.\-]+", "__", job_id)
