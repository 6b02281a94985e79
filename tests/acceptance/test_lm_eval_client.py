"""The real lm-eval against the HTTP side: every answer is given right, so every score must be 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import EOS, INFO, FakeEngine, live_server, piece_tokenizer, service_for

from moeserve.engine.request import Request
from moeserve.tiny.minigsm import Example, generate

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytestmark = pytest.mark.slow

QUESTIONS = generate("test", 60, 5)
SHOTS = generate("train", 20, 6)


def rows(examples: list[Example]) -> str:
    return "".join(
        json.dumps({"question": e.question, "answer": e.answer}) + "\n" for e in examples
    )


def right_answers(request: Request) -> list[int]:
    """Answer the last question of the prompt, then run on into another as a model would."""
    if request.sampling.max_tokens == 1:  # a text is scored, what follows is not looked at
        return [65]
    prompt = bytes(request.prompt_ids).decode()
    last = prompt.rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
    answer = next(e.answer for e in QUESTIONS if e.question == last)
    return [*f" {answer}\n\nQuestion: and one more?\nAnswer: #### 99999".encode(), EOS]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "train.jsonl").write_text(rows(SHOTS), encoding="utf-8")
    (folder / "test.jsonl").write_text(rows(QUESTIONS), encoding="utf-8")
    stock = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    common = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    gsm8k = {"include": str(stock), "task": "gsm8k_local", **common}
    choice = {
        "task": "choice_local",
        "output_type": "multiple_choice",
        **common,
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": ["H", "A"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    for task in (gsm8k, choice):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(task), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("task", "arguments", "batch"),
    [
        (
            "gsm8k_local",
            "num_concurrent=128,tokenized_requests=False,tokenizer_backend=None",
            "auto",
        ),
        ("gsm8k_local", "num_concurrent=1000,tokenizer_backend=remote", "4"),
        ("choice_local", "num_concurrent=16,tokenizer_backend=remote", "3"),
    ],
)
def test_lm_eval_runs_to_its_end_with_the_right_score(
    tasks: Path, tmp_path: Path, task: str, arguments: str, batch: str
) -> None:
    from dataclasses import replace

    # A byte is a token here: five shots are longer than the embedded model's context.
    info = replace(INFO, max_model_len=65536)
    engine = FakeEngine(respond=right_answers, info=info)
    with live_server(service_for(engine, piece_tokenizer())) as url:
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
        command += ["--model_args", f"model=fake,base_url={url}/v1/completions,max_length=65536,"
                    f"max_retries=1,max_gen_toks=1024,{arguments}"]  # fmt: skip
        command += ["--tasks", task, "--include_path", str(tasks), "--batch_size", batch]
        command += ["--output_path", str(tmp_path), "--log_samples"]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=280, env=environ, check=False
        )
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text(encoding="utf-8"))
    scores = results["results"][task]
    if task == "gsm8k_local":
        assert scores["exact_match,strict-match"] == 1.0
        assert scores["exact_match,flexible-extract"] == 1.0
        assert len(engine.seen) == len(QUESTIONS)
    else:
        # The scripted log-probability of "H" (id 72) is 0, that of "A" (65) is below it.
        assert scores["acc,none"] == 1.0
        assert len(engine.seen) == 2 * len(QUESTIONS)
