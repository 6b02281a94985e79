"""GSM8K as lm-eval asks it: other shots for every question, drawn from train with a fixed seed.

Receives the data files, returns samples whose prompts equal those of lm-eval's task `gsm8k`
(version 3) byte for byte. Its chain-of-thought sibling is `gsm8k_cot.py`; the field's script,
with the same shots for all, is `gsm8k.py`. Scores of the two are not comparable.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from evalsuite.errors import ConfigError, Problem
from evalsuite.tasks import data as files
from evalsuite.tasks.base import DataSource, Row, Sample, Score, TaskSettings
from evalsuite.tasks.gsm8k import check_num_fewshot
from evalsuite.tasks.readings import METRICS, STRICT_MARKER, Readings, shot_border

# lm-eval's default `fewshot_random_seed`.
FEWSHOT_SEED = 1234
# Stop strings of lm-eval's gsm8k.yaml.
STOP = ("Question:", "</s>", "<|im_end|>")

READINGS = Readings(STRICT_MARKER, shot_border("Question"))


@dataclass(frozen=True)
class LmEvalTask:
    """lm-eval's `gsm8k`."""

    name: str = "gsm8k-lm-eval"
    profile: str = "gsm8k/lm-eval"
    stop: tuple[str, ...] = STOP
    default_metric: str = "strict-match"
    metrics: tuple[str, ...] = METRICS

    def rows(self, split: str, data: DataSource) -> list[Row]:
        """Read the split "train" or "test"."""
        return files.gsm8k_rows(split, data)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """Build the first `num_questions` samples, fewer where the data has fewer."""
        refuse_gen_prefix(self.name, settings)
        train = self.rows("train", settings.data) if settings.num_fewshot else []
        check_num_fewshot(settings.num_fewshot, len(train))
        # One generator for all questions, in order: question n's shots depend on those before.
        draw = random.Random(FEWSHOT_SEED)
        samples = []
        for index, row in enumerate(self.rows("test", settings.data)[: settings.num_questions]):
            shots = "".join(
                f"Question: {shot.question}\nAnswer: {shot.answer}\n\n"
                for shot in draw.sample(train, settings.num_fewshot)
            )
            prompt = f"{shots}Question: {row.question}\nAnswer:"
            samples.append(Sample(index, row.question, row.gold, prompt))
        return samples

    def score(self, metric: str, target: str, reply_text: str, finish_reason: str) -> Score:
        """Read `reply_text` under `metric`."""
        return READINGS.score(metric, target, reply_text, finish_reason)


def refuse_gen_prefix(task: str, settings: TaskSettings) -> None:
    """Refuse a prefix: these prompts are lm-eval's, and it has none there.

    Raises:
        ConfigError: `gen_prefix` is set.
    """
    if settings.gen_prefix:
        message = (
            f"{settings.gen_prefix!r} is part of the script's prompts (tasks gsm8k, gsm8k-border, "
            f"minigsm); task {task} has lm-eval's"
        )
        raise ConfigError(Problem("error", message, key="gen_prefix"))


TASKS = (LmEvalTask(),)
