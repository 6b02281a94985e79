"""`evalsuite data`: fetch a data set's files once, check them, keep them in the cache.

Receives a name and a `DataSource`, returns the paths; `cli.py` prints them. Finding and reading
the files afterwards is `tasks/data.py`.
"""

from __future__ import annotations

import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from evalsuite.errors import ConfigError, Problem
from evalsuite.names import suggestion
from evalsuite.tasks.base import DataSource
from evalsuite.tasks.data import (
    DATA_DIR_VARIABLE,
    GSM8K_SHA256,
    GSM8K_URL,
    check_sha256,
    gsm8k_cache,
    gsm8k_file,
)

DATA_SETS = ("gsm8k",)
FETCH_TIMEOUT_S = 60.0


def data_get(
    name: str,
    source: DataSource,
    *,
    url: str = GSM8K_URL,
    say: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Fetch what is not there yet.

    Args:
        name: "gsm8k".
        source: Where to look first and where the cache is (`tasks.data.source_from`).
        url: Folder that the files are fetched from; a mirror serves as well, content is checked.
        say: Called with a line for each file.

    Returns:
        The files, each checked against its published sha256.

    Raises:
        ConfigError: Unknown name, no cache folder, no network, or content that is not the data
            set's; the message says what to do instead.
    """
    if name not in DATA_SETS:
        message = f"no data set {name!r}{suggestion(name, DATA_SETS)}"
        raise ConfigError(Problem("error", message, key="data"))
    paths = []
    for split in GSM8K_SHA256:
        found = gsm8k_file(split, source)
        if found is None:
            found = _fetch(split, _target(split, source), url, say)
        say(f"{found}  sha256 {GSM8K_SHA256[split][:12]}")
        paths.append(found)
    return paths


def _target(split: str, source: DataSource) -> Path:
    folder = source.data_dir or gsm8k_cache(source)
    if folder is None:
        raise ConfigError("no cache folder is known; name one with --data-dir")
    return folder / f"{split}.jsonl"


def _fetch(split: str, target: Path, url: str, say: Callable[[str], None]) -> Path:
    address = f"{url.rstrip('/')}/{split}.jsonl"
    say(f"fetching {address}")
    try:
        # The scheme is the caller's: https by default, or a mirror given by name.
        with urllib.request.urlopen(address, timeout=FETCH_TIMEOUT_S) as reply:
            content: bytes = reply.read()
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        message = (
            f"{address} cannot be fetched ({type(error).__name__}: {error}); copy {split}.jsonl "
            f"from a machine with a network to {target}, or set {DATA_DIR_VARIABLE} "
            "(or --data-dir) to a folder that has it"
        )
        raise ConfigError(Problem("error", message)) from error
    check_sha256(content, split, address)
    try:
        write_atomically(target, content)
    except OSError as error:
        message = (
            f"{target} cannot be written ({type(error).__name__}: {error.strerror}); name a folder "
            "of your own with --data-dir"
        )
        raise ConfigError(Problem("error", message)) from error
    return target


def write_atomically(target: Path, content: bytes) -> None:
    """Write a file so that no reader ever sees a part of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        # mkstemp makes it private; a cache may be shared.
        os.fchmod(handle, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
