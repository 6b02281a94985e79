from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path

import pytest
from eval_helpers import config, evaluate, gold_script, needs_gsm8k, real_source, samples
from fake_server import FakeServer

from evalsuite import tasks
from evalsuite.errors import ConfigError
from evalsuite.ledger import read_ledger
from evalsuite.tasks import data
from evalsuite.tasks.base import DataSource, Row, TaskSettings, hash_prompts, profile_of
from evalsuite.tasks.gsm8k import SCRIPT_STOP, ScriptTask

ROWS = {
    "train": [
        Row("Ann has 2 pens and buys 3. How many?", "2+3=<<2+3=5>>5\n#### 5"),
        Row("Bo owes 7.", "0-7=-7\n#### -7"),
    ],
    "test": [
        Row("Cy packs 1,000 and 234. How many?", "All: <<1000+234=1234>>1,234\n#### 1,234"),
        Row("Di?", "#### 9"),
    ],
}
SMALL = ScriptTask("small", "small/script", SCRIPT_STOP, "last-number", lambda s, _: ROWS[s])


def test_the_prompt_is_the_scripts_byte_for_byte() -> None:
    first, second = SMALL.samples(TaskSettings(1319, 2))
    assert first.prompt == (
        "Question: Ann has 2 pens and buys 3. How many?\n"
        "Answer: 2+3=<<2+3=5>>5\n#### 5\n\n"
        "Question: Bo owes 7.\n"
        "Answer: 0-7=-7\n#### -7\n\n"
        "Question: Cy packs 1,000 and 234. How many?\n"
        "Answer:"
    )
    assert (first.index, first.target) == (0, "1234")
    assert (second.index, second.target) == (1, "9")


def test_gen_prefix_stands_in_shots_and_question() -> None:
    sample = SMALL.samples(TaskSettings(1, 1, " Let me think."))[0]
    assert sample.prompt == (
        "Question: Ann has 2 pens and buys 3. How many?\n"
        "Answer: Let me think. 2+3=<<2+3=5>>5\n#### 5\n\n"
        "Question: Cy packs 1,000 and 234. How many?\n"
        "Answer: Let me think."
    )


def test_no_shots_and_too_many_shots() -> None:
    assert SMALL.samples(TaskSettings(2, 0))[1].prompt == "Question: Di?\nAnswer:"
    with pytest.raises(ConfigError, match="num_fewshot: 3 shots asked for, there are 2"):
        SMALL.samples(TaskSettings(1, 3))


def test_the_profile_tells_prompts_apart() -> None:
    settings = [TaskSettings(2, 2), TaskSettings(2, 1), TaskSettings(1, 2), TaskSettings(2, 2, " ")]
    hashes = {profile_of(SMALL, SMALL.samples(item)).prompt_hash for item in settings}
    assert len(hashes) == 4
    assert hash_prompts(["ab", "c"]) != hash_prompts(["a", "bc"])


def test_tasks_are_found_by_name_and_unknown_ones_are_answered_with_the_closest() -> None:
    assert tasks.names() == ["gsm8k", "gsm8k-border", "gsm8k-lm-eval", "gsm8k_cot", "minigsm"]
    with pytest.raises(ConfigError, match="'gms8k'; did you mean 'gsm8k'"):
        tasks.get("gms8k")
    with pytest.raises(ConfigError, match="no metric 'strict'; did you mean 'strict-match'"):
        tasks.gating_metric(SMALL, "strict")


def test_profiles_stops_and_default_metrics() -> None:
    found = {
        name: (tasks.get(name).profile, tasks.get(name).stop, tasks.get(name).default_metric)
        for name in tasks.names()
    }
    script = ("Question", "Assistant:", "<|separator|>")
    border = ("\nQuestion:", "\nAssistant:", "<|separator|>")
    assert found == {
        "gsm8k": ("gsm8k/script", script, "last-number"),
        "gsm8k-border": ("gsm8k/border", border, "numeric"),
        "gsm8k-lm-eval": ("gsm8k/lm-eval", ("Question:", "</s>", "<|im_end|>"), "strict-match"),
        "gsm8k_cot": ("gsm8k_cot/lm-eval", ("Q:", "</s>", "<|im_end|>"), "strict-match"),
        "minigsm": ("minigsm/script", script, "last-number"),
    }


def test_the_border_task_is_not_cut_by_a_reply_that_uses_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server obeys the stops it is sent; the script's bare word loses the answer."""
    rows = [{"question": f"{n} and 9?", "answer": f"#### {n + 9}"} for n in range(9)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(data, "GSM8K_SHA256", {"train": digest, "test": digest})
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_bytes(content)
    source = DataSource(data_dir=tmp_path)
    reply = " First I restate the Question. It is {}.\n#### {}\n\nQuestion: and 7?\nAnswer: 8"
    right = {}
    for task in ("gsm8k-border", "gsm8k"):
        settings = config(task=task, num_questions=9)
        with FakeServer(gold_script(samples(settings, source), reply)) as server:
            result = evaluate(server.url, tmp_path / f"{task}.l", settings, data=source)
        right[task] = (result.metric, result.accuracy, result.num_correct["numeric"])
    assert right == {"gsm8k-border": ("numeric", 1.0, 9), "gsm8k": ("last-number", 0.0, 0)}
    texts = {record.text for record in read_ledger(tmp_path / "gsm8k-border.l")}
    assert " First I restate the Question. It is 9.\n#### 9\n" in texts


@needs_gsm8k
def test_the_real_prompts_have_the_published_lengths() -> None:
    samples = tasks.get("gsm8k").samples(TaskSettings(1319, 5, data=real_source()))
    lengths = [len(sample.prompt) for sample in samples]
    assert len(samples) == 1319
    assert (min(lengths), max(lengths)) == (1951, 2726)
    assert round(statistics.mean(lengths)) == 2118
    shots = samples[0].prompt.removesuffix(f"Question: {samples[0].question}\nAnswer:")
    assert len(shots) == 1860
    assert all(sample.prompt.startswith(shots) for sample in samples)
    assert sum(sample.target.startswith("-") for sample in samples) == 2
    assert sum("." in sample.target for sample in samples) == 0


@needs_gsm8k
def test_every_gold_answer_is_right_under_every_reading() -> None:
    data = real_source()
    for name in ("gsm8k", "gsm8k-border", "gsm8k-lm-eval"):
        task = tasks.get(name)
        for row in task.rows("test", data):
            for metric in task.metrics:
                assert task.score(metric, row.gold, row.answer, "stop").outcome == "correct"


@needs_gsm8k
def test_more_questions_than_there_are_is_all_of_them() -> None:
    settings = TaskSettings(5000, 0, data=real_source())
    assert len(tasks.get("gsm8k").samples(settings)) == 1319


def test_missing_data_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        tasks.get("gsm8k").samples(TaskSettings(5, 5, data=DataSource(data_dir=tmp_path)))
    message = str(caught.value)
    assert f"no train.jsonl in {tmp_path}" in message
    assert "evalsuite data get gsm8k" in message
    assert "EVALSUITE_GSM8K_DIR" in message
