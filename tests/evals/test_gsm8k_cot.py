from __future__ import annotations

import importlib.util

import pytest
from eval_helpers import needs_gsm8k, real_source

from evalsuite import tasks
from evalsuite.errors import ConfigError
from evalsuite.tasks import gsm8k_cot
from evalsuite.tasks.base import TaskSettings

COT = tasks.get("gsm8k_cot")
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the examples come with lm-eval"
)


@needs_lm_eval
def test_there_are_eight_examples_that_end_in_the_sentence() -> None:
    examples = gsm8k_cot.cot_examples()
    assert len(examples) == 8
    for example in examples:
        value = example.answer.rsplit("The answer is ", 1)[1].rstrip(".")
        score = COT.score("strict-match", value, f" {example.answer}\n\nQ: next", "stop")
        assert (score.outcome, score.extracted) == ("correct", value)
        assert COT.score("numeric", value, f" {example.answer}\n\nQ: 7", "stop").extracted == value


@needs_lm_eval
@needs_gsm8k
def test_the_same_shots_stand_before_every_question() -> None:
    samples = COT.samples(TaskSettings(1319, 8, data=real_source()))
    assert len(samples) == 1319
    prefixes = {s.prompt.removesuffix(f"Q: {s.question}\nA:") for s in samples}
    assert len(prefixes) == 1
    prefix = prefixes.pop()
    assert prefix.count("Q: ") == prefix.count("\nA: ") == 8
    assert prefix.endswith(".\n\n")


@needs_lm_eval
@needs_gsm8k
def test_fewer_shots_are_the_first_ones_and_nine_are_refused() -> None:
    three = COT.samples(TaskSettings(1, 3, data=real_source()))[0]
    eight = COT.samples(TaskSettings(1, 8, data=real_source()))[0]
    assert three.prompt.count("Q: ") == 4
    assert eight.prompt.startswith(three.prompt.split("Q: " + three.question)[0])
    with pytest.raises(ConfigError, match="9 shots asked for, there are 8"):
        COT.samples(TaskSettings(1, 9, data=real_source()))


def test_a_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="gen_prefix"):
        COT.samples(TaskSettings(1, 8, " Hm."))


def test_without_lm_eval_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-evalsuite\[lm-eval\]'"):
        gsm8k_cot.lm_eval_task_file("gsm8k-cot.yaml")
