"""Other people's clients against the embedded model: each runs to its end, with equal scores."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_model import served_model

from evalsuite import tasks
from moeserve.tiny import MODEL_NAME, model_dir
from moeserve.tiny.minigsm import SPLIT_SEEDS, Example, generate

NUM_QUESTIONS = 60
SHOTS = generate("train", 8, SPLIT_SEEDS["train"])
STOPS = ["\nQuestion:"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def questions(count: int) -> list[Example]:
    return generate("test", count, SPLIT_SEEDS["test"])


def prompt_of(question: str) -> str:
    shots = "".join(f"Question: {e.question}\nAnswer: {e.answer}\n\n" for e in SHOTS[:2])
    return f"{shots}Question: {question}\nAnswer:"


def gold(example: Example) -> str:
    return example.answer.rsplit("#### ", 1)[1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_model(tmp_path_factory.mktemp("server")) as root:
        yield root


def test_openai_package_sync_async_and_streaming(url: str) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    prompts = [prompt_of(e.question) for e in questions(12)]
    fields = {"model": MODEL_NAME, "max_tokens": 64, "temperature": 0, "stop": STOPS}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [m.id for m in client.models.list()] == [MODEL_NAME]
        whole = client.completions.create(prompt=prompts, **fields)
        texts = [choice.text for choice in sorted(whole.choices, key=lambda c: c.index)]
        assert len(texts) == len(prompts)
        assert whole.usage.completion_tokens > 12
        streamed = [""] * len(prompts)
        for chunk in client.completions.create(prompt=prompts, stream=True, **fields):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts
        # The chat template writes the same question, without shots.
        message = {"role": "user", "content": questions(1)[0].question}
        chat = client.chat.completions.create(
            messages=[message], model=MODEL_NAME, max_tokens=32, temperature=0, logprobs=True
        )
        plain = client.completions.create(
            prompt=f"Question: {message['content']}\nAnswer:",
            model=MODEL_NAME,
            max_tokens=32,
            temperature=0,
        )
        assert chat.choices[0].message.content == plain.choices[0].text
        assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            client.completions.create(prompt="x", model="gpt-4")

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def whole(prompt: str) -> str:
                reply = await client.completions.create(prompt=prompt, **fields)
                return str(reply.choices[0].text)

            async def in_parts(prompt: str) -> str:
                stream = await client.completions.create(prompt=prompt, stream=True, **fields)
                return "".join([part.choices[0].text async for part in stream])

            return await asyncio.gather(*map(whole, prompts), *map(in_parts, prompts))

    assert asyncio.run(ask_all()) == texts + texts


def write_tasks(folder: Path, count: int) -> None:
    """Write lm-eval's own gsm8k and gsm8k_cot over MiniGSM rows, and a task of choices."""
    import lm_eval

    files = {}
    for split, rows in (("train", SHOTS), ("test", questions(count))):
        path = folder / f"{split}.jsonl"
        lines = [json.dumps({"question": e.question, "answer": e.answer}) + "\n" for e in rows]
        path.write_text("".join(lines), encoding="utf-8")
        files[split] = str(path)
    stock = Path(lm_eval.__file__).parent / "tasks" / "gsm8k"
    common = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    choice = {
        "task": "choice_local",
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{[answer, answer|replace('#### ', '#### 9')]}}",
        "doc_to_target": 0,
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}],
    }
    made = [
        {"include": str(stock / "gsm8k.yaml"), "task": "gsm8k_local"},
        # The first rows for every question: the prompts share their prefix.
        {
            "include": str(stock / "gsm8k.yaml"),
            "task": "gsm8k_first_local",
            "fewshot_config": {"sampler": "first_n"},
        },
        {"include": str(stock / "gsm8k-cot.yaml"), "task": "gsm8k_cot_local"},
        choice,
    ]
    for task in made:
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**task, **common}))


LM_EVAL_RUNS = [
    ("gsm8k_local", "num_concurrent=128,tokenized_requests=False,tokenizer_backend=None", 60),
    ("gsm8k_local", "num_concurrent=128,tokenizer={model},tokenized_requests=True", 60),
    ("gsm8k_first_local", "num_concurrent=1000,tokenizer={model},tokenized_requests=True", 1100),
    ("gsm8k_cot_local", "num_concurrent=1000,tokenized_requests=False,tokenizer_backend=None", 60),
    ("choice_local", "num_concurrent=128,tokenizer={model},tokenized_requests=True", 60),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "arguments", "count"), LM_EVAL_RUNS)
def test_lm_eval(url: str, tmp_path: Path, task: str, arguments: str, count: int) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    write_tasks(tmp_path, count)
    model_args = f"model={MODEL_NAME},base_url={url}/v1/completions,max_length=4096,max_retries=1,"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", model_args + arguments.format(model=model_dir())]
    command += ["--tasks", task, "--include_path", str(tmp_path), "--batch_size", "auto"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, env={**os.environ, **OFFLINE},
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    scores = results["results"][task]
    samples = [
        json.loads(line)
        for line in next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    ]
    if task == "choice_local":
        assert len(samples) == count
        # The right worked answer against one with another number at its end.
        assert scores["acc,none"] > 0.9
        return
    builtin = tasks.get("gsm8k_cot" if "cot" in task else "gsm8k-lm-eval")
    for name in ("strict-match", "flexible-extract"):
        read = [sample for sample in samples if sample["filter"] == name]
        assert len(read) == count
        ours = [
            builtin.score(name, gold(Example(**one)), sample["resps"][0][0], "stop").outcome
            for sample in read
            for one in [{"family": "", **sample["doc"]}]
        ]
        assert [outcome == "correct" for outcome in ours] == [s["exact_match"] == 1 for s in read]
        assert scores[f"exact_match,{name}"] == pytest.approx(ours.count("correct") / count)
    if "cot" not in task:
        assert scores["exact_match,strict-match"] > 0.7


@pytest.mark.slow
def test_vllm_bench_serve(url: str, tmp_path: Path) -> None:
    vllm = shutil.which("vllm")
    if vllm is None:
        pytest.skip("no vllm on the PATH")
    command = [vllm, "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--model", MODEL_NAME, "--tokenizer", str(model_dir()), "--dataset-name", "random"]
    command += ["--random-input-len", "64", "--random-output-len", "32", "--num-prompts", "96"]
    command += ["--max-concurrency", "16", "--ignore-eos", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "out.json"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, **OFFLINE},
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["failed"]) == (96, 0)
    assert result["total_output_tokens"] == 96 * 32
    assert result["output_throughput"] > 0


INSPECT_TASK = """\
import json
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def minigsm():
    rows = json.loads(Path(__file__).with_name("rows.json").read_text())
    samples = [Sample(input=row["input"], target=row["target"]) for row in rows]
    return Task(dataset=samples, solver=generate(), scorer=match(numeric=True))
"""


@pytest.mark.slow
def test_inspect_ai(url: str, tmp_path: Path) -> None:
    inspect = shutil.which("inspect")
    if inspect is None:
        pytest.skip("no inspect (inspect_ai) on the PATH")
    shown = questions(NUM_QUESTIONS)
    rows = [{"input": e.question, "target": gold(e)} for e in shown]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "minigsm_task.py").write_text(INSPECT_TASK)
    command = [inspect, "eval", "minigsm_task.py", "--model", f"openai-api/moeserve/{MODEL_NAME}"]
    command += ["--temperature", "0", "--max-tokens", "256", "--max-connections", "64"]
    command += ["--log-format", "json", "--log-dir", "logs", "--display", "plain"]
    keys = {"MOESERVE_API_KEY": "none", "MOESERVE_BASE_URL": f"{url}/v1"}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env={**os.environ, **OFFLINE, **keys}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    log = json.loads(next((tmp_path / "logs").glob("*.json")).read_text())
    assert log["status"] == "success"
    assert len(log["samples"]) == NUM_QUESTIONS
    builtin = tasks.get("minigsm")
    for sample in log["samples"]:
        text = sample["output"]["choices"][0]["message"]["content"]
        ours = builtin.score("last-number", sample["target"], text, "stop").outcome == "correct"
        assert (sample["scores"]["match"]["value"] == "C") == ours, text
