"""A model's name → the folder, or the preset, that is served.

Receives what the user typed and the environment; returns a path or a preset's name, or raises
`UsageError` that says where was looked. Nothing is ever downloaded. What is in the folder is read
by `runner/weights.py` and `server/tokenizer.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from moeserve.errors import UsageError
from moeserve.presets import is_preset, preset_names
from moeserve.tiny import MODEL_NAME, model_dir

# With and without the organisation, as the presets spell it.
_PACKAGED = (MODEL_NAME, MODEL_NAME.split("/")[-1])


def resolve_model(name: str, is_dummy: bool, environ: Mapping[str, str]) -> str:
    """Return the folder of a model, or a preset's name where weights are random.

    A folder wins over the packaged model, that over a preset, that over the local hub cache.

    Raises:
        UsageError: Nothing on this machine has that name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"MODEL {name}: the folder has no config.json")
        return str(path)
    if name.lower() in _PACKAGED:
        try:
            return str(model_dir())
        except FileNotFoundError as error:
            if is_dummy:
                return name
            raise UsageError(f"MODEL {name}: {error}") from None
    snapshot = _hub_snapshot(name, environ)
    if snapshot is not None:
        return str(snapshot)
    if is_preset(name) and is_dummy:
        return name
    if is_preset(name):
        raise UsageError(
            f"MODEL {name}: its shapes are known but its weights are not on this machine; "
            "give a folder, or --load-format dummy for random weights"
        )
    close = difflib.get_close_matches(name, [*preset_names(), MODEL_NAME], n=1, cutoff=0.3)
    hint = f"; the closest name known is {close[0]}" if close else ""
    raise UsageError(
        f"MODEL {name}: not a folder, not a known name, and not in the local hub cache "
        f"({_hub_root(environ)}); nothing is downloaded{hint}"
    )


def _hub_root(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]) / "hub"
    return Path(environ.get("HOME", "~")).expanduser() / ".cache" / "huggingface" / "hub"


def _hub_snapshot(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the newest cached snapshot of `org/name`, or None."""
    if name.count("/") != 1 or not all(name.split("/")) or ".." in name:
        return None
    folder = _hub_root(environ) / ("models--" + name.replace("/", "--"))
    main = folder / "refs" / "main"
    if main.is_file():
        snapshot = folder / "snapshots" / main.read_text(encoding="utf-8").strip()
        if (snapshot / "config.json").is_file():
            return snapshot
    found = [path.parent for path in folder.glob("snapshots/*/config.json")]
    return max(found, key=lambda path: path.stat().st_mtime) if found else None
