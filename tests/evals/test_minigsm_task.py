from __future__ import annotations

import subprocess
import sys

from evalsuite import tasks
from evalsuite.tasks.base import DataSource, TaskSettings

MINIGSM = tasks.get("minigsm")


def test_the_prompt_has_the_scripts_form_and_needs_no_file() -> None:
    train = MINIGSM.rows("train", DataSource())
    test = MINIGSM.rows("test", DataSource())
    sample = MINIGSM.samples(TaskSettings(3, 5))[2]
    shots = "".join(f"Question: {r.question}\nAnswer: {r.answer}\n\n" for r in train[:5])
    assert sample.prompt == f"{shots}Question: {test[2].question}\nAnswer:"
    assert sample.target == test[2].gold


def test_there_are_as_many_questions_as_gsm8k_has_and_none_is_a_shot() -> None:
    samples = MINIGSM.samples(TaskSettings(5000, 5))
    assert len(samples) == 1319
    assert len({sample.question for sample in samples}) == 1319
    shots = {row.question for row in MINIGSM.rows("train", DataSource())}
    assert not shots & {sample.question for sample in samples}


def test_every_gold_answer_is_right_under_every_reading() -> None:
    for row in MINIGSM.rows("test", DataSource()):
        for metric in MINIGSM.metrics:
            score = MINIGSM.score(metric, row.gold, row.answer, "stop")
            assert score.outcome == "correct", (row.question, metric)


def test_neither_the_suite_nor_its_questions_import_torch() -> None:
    code = (
        "import sys, evalsuite.evaluators as e, evalsuite.tasks as t\n"
        "e.names(); from evalsuite.tasks.base import DataSource\n"
        "t.get('minigsm').rows('test', DataSource())\n"
        "print([m for m in ('torch', 'lm_eval', 'datasets', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
