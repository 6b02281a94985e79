"""Short ways to an evaluation against the scripted server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import Action, Request

from evalsuite import evaluators, tasks
from evalsuite.config import EvalConfig
from evalsuite.evaluators.base import EvalResult, EvaluationRequest
from evalsuite.tasks.base import DataSource, Sample, TaskSettings
from evalsuite.tasks.data import DATA_DIR_VARIABLE

REAL_DATA = os.environ.get(DATA_DIR_VARIABLE, "")
needs_gsm8k = pytest.mark.skipif(
    not REAL_DATA, reason=f"{DATA_DIR_VARIABLE} names no folder with GSM8K's files"
)


def real_source() -> DataSource:
    return DataSource(data_dir=Path(REAL_DATA))


def config(**keys: object) -> EvalConfig:
    content: dict[str, object] = {
        "model_name": "fake",
        "accuracy_threshold": 0.9,
        "num_questions": 20,
        "num_fewshot": 2,
        "task": "minigsm",
        **keys,
    }
    return EvalConfig.model_validate(content)


def samples(settings: EvalConfig, source: DataSource | None = None) -> list[Sample]:
    return tasks.get(settings.task).samples(
        TaskSettings(
            settings.num_questions,
            settings.num_fewshot,
            settings.gen_prefix,
            source or DataSource(),
        )
    )


def evaluate(url: str, path: Path, settings: EvalConfig, **keys: object) -> EvalResult:
    source = keys.pop("data", DataSource())
    request = EvaluationRequest(url, "fake", settings, path, source, **keys)  # type: ignore[arg-type]
    return evaluators.get(settings.evaluator).evaluate(request)


def gold_script(
    known: list[Sample], reply: str = " so it is {}.\n#### {}"
) -> Callable[..., Action]:
    """Answer every prompt rightly."""
    targets = {sample.prompt: sample.target for sample in known}

    def script(request: Request) -> Action:
        return Action(
            tuple(reply.format(targets[prompt], targets[prompt]) for prompt in request.prompts)
        )

    return script


def by_question(known: list[Sample], special: dict[int, list[Action]]) -> Callable[..., Action]:
    """Answer rightly, but a question in `special` gets its actions in turn, the last for ever."""
    gold = gold_script(known)
    indices = {sample.prompt: sample.index for sample in known}

    def script(request: Request) -> Action:
        actions = special.get(indices[request.prompts[0]], [])
        if not actions:
            return gold(request)
        action = actions[min(request.attempt, len(actions) - 1)]
        return gold(request) if action.status == 0 else action

    return script


# Stands for "now answer rightly" in `by_question`.
GOLD = Action(status=0)
