"""The embedded model: the text it learns from, its trainer, and its weights.

Receives nothing at import time and imports nothing heavy, so that a server or a job line can ask
for the packaged folder without torch. `minigsm` writes the word problems, `train` makes the
weights. Serving them is the business of `moeserve.runner`, scoring replies that of `evalsuite`.
"""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "moeserve/minigsm-tiny"


def model_dir() -> Path:
    """Return the packaged model folder (`config.json`, weights, tokenizer).

    Raises:
        FileNotFoundError: the package was installed without its weights.
    """
    path = Path(__file__).resolve().parent / "minigsm-tiny"
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path}: the embedded model is missing; train it with 'python -m moeserve.tiny.train'"
        )
    return path
