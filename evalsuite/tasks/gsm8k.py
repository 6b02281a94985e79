"""GSM8K as the field's script asks it: the first k train rows as shots, one text per question.

Receives the data files, returns samples whose prompts equal the script's byte for byte. The
task `gsm8k` also sends the script's stop strings, of which the bare word "Question" cuts
replies that merely use the word: published thresholds were made with it. `gsm8k-border` differs
in that alone: it stops at shot borders, and gates on the right reading. lm-eval's own prompts are
`gsm8k_lm_eval.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evalsuite.errors import ConfigError, Problem
from evalsuite.tasks import data as files
from evalsuite.tasks.base import DataSource, Row, Sample, Score, TaskSettings
from evalsuite.tasks.readings import METRICS, STRICT_MARKER, Readings, shot_border

# The stop strings of vLLM's tests/evals/gsm8k/gsm8k_eval.py.
SCRIPT_STOP = ("Question", "Assistant:", "<|separator|>")
BORDER_STOP = ("\nQuestion:", "\nAssistant:", "<|separator|>")

READINGS = Readings(STRICT_MARKER, shot_border("Question", "Assistant"))


@dataclass(frozen=True)
class ScriptTask:
    """A task in the script's prompt form.

    Attributes:
        name: What a config calls it.
        profile: Prompt profile name.
        stop: Stop strings sent.
        default_metric: The gating reading where the config names none.
        load: Reads a split.
        metrics: All readings.
        load_shots: Reads the first rows of "train" alone, None where that is no quicker.
    """

    name: str
    profile: str
    stop: tuple[str, ...]
    default_metric: str
    load: Callable[[str, DataSource], list[Row]]
    metrics: tuple[str, ...] = METRICS
    load_shots: Callable[[int, DataSource], list[Row]] | None = None

    def rows(self, split: str, data: DataSource) -> list[Row]:
        """Read the split "train" or "test"."""
        return self.load(split, data)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """Build the first `num_questions` samples, fewer where the data has fewer."""
        shots = shots_prefix(self, settings)
        test = self.load("test", settings.data)[: settings.num_questions]
        return [
            Sample(
                index=index,
                question=row.question,
                target=row.gold,
                prompt=f"{shots}Question: {row.question}\nAnswer:{settings.gen_prefix}",
            )
            for index, row in enumerate(test)
        ]

    def score(self, metric: str, target: str, reply_text: str, finish_reason: str) -> Score:
        """Read `reply_text` under `metric`."""
        return READINGS.score(metric, target, reply_text, finish_reason)


def shots_prefix(task: ScriptTask, settings: TaskSettings) -> str:
    """Write the shots, equal for all questions.

    Raises:
        ConfigError: More shots than train rows.
    """
    if settings.num_fewshot == 0:
        return ""
    if task.load_shots is not None:
        train = task.load_shots(settings.num_fewshot, settings.data)
    else:
        train = task.load("train", settings.data)
    check_num_fewshot(settings.num_fewshot, len(train))
    return "".join(
        f"Question: {row.question}\nAnswer:{settings.gen_prefix} {row.answer}\n\n"
        for row in train[: settings.num_fewshot]
    )


def check_num_fewshot(num_fewshot: int, available: int) -> None:
    """Refuse more shots than there are.

    Raises:
        ConfigError: Names both numbers.
    """
    if num_fewshot > available:
        message = f"{num_fewshot} shots asked for, there are {available}"
        raise ConfigError(Problem("error", message, key="num_fewshot"))


TASKS = (
    ScriptTask("gsm8k", "gsm8k/script", SCRIPT_STOP, "last-number", files.gsm8k_rows),
    ScriptTask("gsm8k-border", "gsm8k/border", BORDER_STOP, "numeric", files.gsm8k_rows),
)
