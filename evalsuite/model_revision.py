"""Which weights a job served: a commit of the model hub, or a fingerprint of a local folder.

Receives a config and the environment its server had; returns a text that two runs share only
where they served the same weights, "" where that cannot be told. Looked up after the server
ran, because a start may have fetched them. That a baseline of other weights is refused is
`judge.py`; the model itself is the engine's business.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from evalsuite.config import EvalConfig
from evalsuite.engines.embedded import model_argument
from evalsuite.errors import ConfigError
from evalsuite.server_args import flag_values

REVISION_FLAGS = ("--revision",)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Read whole up to here; of larger files these many pieces of this size, evenly spread: every
# training step changes all of a weight file, and 60 GB are not read for a name.
_WHOLE_BYTES = 32 << 20
_NUM_PIECES, _PIECE_BYTES = 64, 64 << 10
# What decides a reply: weights, shapes, tokenizer, template.
_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".gguf", ".json", ".model", ".jinja", ".txt"})


def model_revision(config: EvalConfig, environ: Mapping[str, str]) -> str:
    """Name the weights behind `model_name`.

    Args:
        config: The job's config.
        environ: The suite's environment; the file's own `env` is laid over it.

    Returns:
        A commit (40 hex digits), `files:` and a fingerprint, or "".
    """
    if config.engine == "external":
        return ""  # somebody else's machine
    asked = [value for value in flag_values(config.server_args, REVISION_FLAGS) if value]
    revision = asked[-1] if asked else "main"
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        folder = Path(model_argument(config.model_name)[0]).expanduser()
        if folder.is_dir():
            return fingerprint(folder)
        return _cached_commit(config.model_name, revision, {**environ, **config.env})
    except (ConfigError, OSError):
        return ""  # not here, or not readable: then nothing can be said


def fingerprint(folder: Path) -> str:
    """A short hash over names, sizes and contents of a model folder's files.

    Raises:
        OSError: A file cannot be read.
    """
    total = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        if path.is_file():
            total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            total.update(_digest(path))
    return f"files:{total.hexdigest()[:16]}"


def _digest(path: Path) -> bytes:
    size = path.stat().st_size
    found = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        for number in range(_NUM_PIECES):
            file.seek((size - _PIECE_BYTES) * number // (_NUM_PIECES - 1))
            found.update(file.read(_PIECE_BYTES))
    return found.digest()


def _cached_commit(name: str, revision: str, environ: Mapping[str, str]) -> str:
    """The commit that the hub's cache on this machine has for a branch or tag."""
    home = environ.get("HF_HOME") or Path(
        environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    cache = Path(environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    path = cache / f"models--{name.replace('/', '--')}" / "refs" / revision
    commit = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    return commit if _COMMIT.fullmatch(commit) else ""
