"""MiniGSM: this project's own generated word problems, in the prompt form of GSM8K's script.

Receives nothing but the settings: the rows are generated, no file and no network is needed.
Returns samples as `gsm8k.py` does, with the same stop strings and readings. The generator is
`moeserve.tiny.minigsm`.
"""

from __future__ import annotations

import functools

from evalsuite.tasks.base import DataSource, Row
from evalsuite.tasks.gsm8k import SCRIPT_STOP, ScriptTask


@functools.cache
def _generated(split: str) -> tuple[Row, ...]:
    # Imported here: `import evalsuite` stays free of the server package.
    from moeserve.tiny.minigsm import load_split

    examples = load_split("train" if split == "train" else "test")
    return tuple(Row(example.question, example.answer) for example in examples)


def minigsm_rows(split: str, _: DataSource) -> list[Row]:
    """Generate the canonical rows of "train" or "test"."""
    return list(_generated(split))


def minigsm_shots(num_shots: int, _: DataSource) -> list[Row]:
    """The first rows of "train" alone, fewer where there are fewer; the others take a second."""
    from moeserve.tiny.minigsm import first_rows

    return [Row(example.question, example.answer) for example in first_rows("train", num_shots)]


TASKS = (
    ScriptTask(
        "minigsm",
        "minigsm/script",
        SCRIPT_STOP,
        "last-number",
        minigsm_rows,
        load_shots=minigsm_shots,
    ),
)
