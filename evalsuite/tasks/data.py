"""GSM8K's files: found, checked, read; fetched only on request.

Receives a `DataSource`, returns rows or a `ConfigError` that says what is missing and how to get
it. Looks in the user's folder, or else in our cache and then in the model hub's cache. The
command that fetches is `cli_data.py`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path

from evalsuite.errors import ConfigError, Problem
from evalsuite.tasks.base import DataSource, Row

# The public repository's two files; the licence is MIT.
GSM8K_URL = (
    "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
)
GSM8K_SHA256 = {
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
}
DATA_DIR_VARIABLE = "EVALSUITE_GSM8K_DIR"
_HUB_FOLDER = "datasets--openai--gsm8k"


def source_from(environ: Mapping[str, str], data_dir: Path | None = None) -> DataSource:
    """Work out where to look.

    Args:
        environ: The process's environment, handed down by the entry file.
        data_dir: `--data-dir`; beats the environment.
    """
    home = Path(environ.get("HOME") or Path.home())
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = environ.get("HF_HUB_CACHE")
    hub_home = environ.get("HF_HOME") or str(cache / "huggingface")
    named = environ.get(DATA_DIR_VARIABLE)
    return DataSource(
        data_dir=data_dir or (Path(named) if named else None),
        cache_dir=cache / "evalsuite",
        hub_cache=Path(hub) if hub else Path(hub_home) / "hub",
    )


def gsm8k_cache(source: DataSource) -> Path | None:
    """Folder of the cached files; it need not exist."""
    return source.cache_dir / "gsm8k" if source.cache_dir else None


def gsm8k_rows(split: str, source: DataSource) -> list[Row]:
    """Read one split of GSM8K.

    Raises:
        ConfigError: Nowhere to be found, or not the published content.
    """
    return list(_read(split, source))


@functools.lru_cache(maxsize=4)
def _read(split: str, source: DataSource) -> tuple[Row, ...]:
    content, origin = _content(split, source)
    return parse_rows(content, origin)


def gsm8k_file(split: str, source: DataSource) -> Path | None:
    """Path of the checked JSONL file of a split, None where only the hub's form is there."""
    folders = [source.data_dir] if source.data_dir else [gsm8k_cache(source)]
    for folder in folders:
        path = folder / f"{split}.jsonl" if folder else None
        if path and path.is_file():
            check_sha256(_bytes(path), split, str(path))
            return path
    return None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"cannot be read ({type(error).__name__}: {error.strerror})"
        raise ConfigError(Problem("error", message, file=str(path))) from error


def _content(split: str, source: DataSource) -> tuple[bytes, str]:
    path = gsm8k_file(split, source)
    if path:
        return _bytes(path), str(path)
    tried = [source.data_dir or gsm8k_cache(source)]
    note = ""
    if not source.data_dir and source.hub_cache:
        tried.append(source.hub_cache / _HUB_FOLDER)
        parquet = _hub_parquet(split, source.hub_cache)
        if parquet:
            content, note = _parquet_content(parquet)
            if content:
                check_sha256(content, split, str(parquet))
                return content, str(parquet)
    places = ", ".join(str(place) for place in tried if place)
    remedy = (
        "run `evalsuite data get gsm8k` where there is a network, or set "
        f"{DATA_DIR_VARIABLE} (or --data-dir) to a folder with train.jsonl and test.jsonl"
    )
    raise ConfigError(f"GSM8K: no {split}.jsonl in {places}{note}; {remedy}")


def _hub_parquet(split: str, hub_cache: Path) -> Path | None:
    pattern = f"{_HUB_FOLDER}/snapshots/*/main/{split}-*.parquet"
    return next(iter(sorted(hub_cache.glob(pattern))), None)


def _parquet_content(path: Path) -> tuple[bytes, str]:
    """Rewrite the hub's parquet file as the published JSON lines, or say why not."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        return b"", f" ({path} is there, but pyarrow is not: {error})"
    try:
        rows = parquet.read_table(path).to_pylist()
        kept = [{"question": row["question"], "answer": row["answer"]} for row in rows]
    except (ValueError, OSError, KeyError) as error:
        # pyarrow's own errors are these; half a download is the usual reason.
        return b"", f" ({path} is no table of GSM8K: {type(error).__name__}: {error})"
    return "".join(json.dumps(row) + "\n" for row in kept).encode("ascii"), ""


def check_sha256(content: bytes, split: str, origin: str) -> None:
    """Refuse content that is not the published file.

    Raises:
        ConfigError: Names the file and both checksums.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest != GSM8K_SHA256[split]:
        message = (
            f"sha256 is {digest}, GSM8K's {split}.jsonl has {GSM8K_SHA256[split]}; "
            "delete the file and run `evalsuite data get gsm8k`"
        )
        raise ConfigError(Problem("error", message, file=origin))


def parse_rows(content: bytes, origin: str) -> tuple[Row, ...]:
    """Read JSON lines with `question` and `answer`.

    Raises:
        ConfigError: Names file and line of the first bad one.
    """
    rows = []
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            rows.append(Row(data["question"], data["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            message = f"no JSON object with question and answer ({type(error).__name__}: {error})"
            raise ConfigError(Problem("error", message, file=origin, line=number)) from error
    return tuple(rows)
