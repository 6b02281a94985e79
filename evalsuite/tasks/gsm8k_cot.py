"""GSM8K with the eight public chain-of-thought examples, as lm-eval's `gsm8k_cot` asks it.

Receives the data files and the examples of an installed lm-eval, returns samples whose prompts
equal lm-eval's byte for byte. lm-eval itself is not imported, only its task file is read.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import yaml

from evalsuite.errors import ConfigError, Problem
from evalsuite.tasks import data as files
from evalsuite.tasks.base import DataSource, Row, Sample, Score, TaskSettings
from evalsuite.tasks.gsm8k import check_num_fewshot
from evalsuite.tasks.gsm8k_lm_eval import refuse_gen_prefix
from evalsuite.tasks.readings import METRICS, STRICT_SENTENCE, Readings, shot_border

# Stop strings of lm-eval's gsm8k-cot.yaml.
STOP = ("Q:", "</s>", "<|im_end|>")

READINGS = Readings(STRICT_SENTENCE, shot_border("Q"))


def lm_eval_task_file(name: str) -> Path:
    """Path of one of lm-eval's GSM8K task files.

    Args:
        name: File name in its folder `tasks/gsm8k`.

    Raises:
        ConfigError: lm-eval is not installed, or has no such file.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.origin:
        raise ConfigError(
            Problem(
                "error",
                "needs lm-eval, which is not installed: pip install 'moe-evalsuite[lm-eval]'",
                key="task",
            )
        )
    path = Path(found.origin).parent / "tasks" / "gsm8k" / name
    if not path.is_file():
        raise ConfigError(Problem("error", "this lm-eval has no such task file", file=str(path)))
    return path


@functools.cache
def cot_examples() -> tuple[Row, ...]:
    """The eight examples in order; `answer` is the reasoning that ends "The answer is n."."""
    path = lm_eval_task_file("gsm8k-cot.yaml")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    samples = content["fewshot_config"]["samples"]
    return tuple(Row(sample["question"], sample["target"]) for sample in samples)


@dataclass(frozen=True)
class CotTask:
    """lm-eval's `gsm8k_cot`."""

    name: str = "gsm8k_cot"
    profile: str = "gsm8k_cot/lm-eval"
    stop: tuple[str, ...] = STOP
    default_metric: str = "strict-match"
    metrics: tuple[str, ...] = METRICS

    def rows(self, split: str, data: DataSource) -> list[Row]:
        """Read the split "test"; "train" are the eight examples."""
        return list(cot_examples()) if split == "train" else files.gsm8k_rows(split, data)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """Build the first `num_questions` samples, fewer where the data has fewer."""
        refuse_gen_prefix(self.name, settings)
        examples = cot_examples() if settings.num_fewshot else ()
        check_num_fewshot(settings.num_fewshot, len(examples))
        shots = "".join(
            f"Q: {example.question}\nA: {example.answer}\n\n"
            for example in examples[: settings.num_fewshot]
        )
        rows = self.rows("test", settings.data)[: settings.num_questions]
        return [
            Sample(index, row.question, row.gold, f"{shots}Q: {row.question}\nA:")
            for index, row in enumerate(rows)
        ]

    def score(self, metric: str, target: str, reply_text: str, finish_reason: str) -> Score:
        """Read `reply_text` under `metric`."""
        return READINGS.score(metric, target, reply_text, finish_reason)


TASKS = (CotTask(),)
