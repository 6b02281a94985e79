"""What lm-eval is told: the task file and the child's job.

Receives an `EvaluationRequest`, writes data and a task file that includes lm-eval's own, returns
the `WorkerJob`. Running it is `lm_eval.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import yaml

from evalsuite.client import ClientSettings
from evalsuite.evaluators.base import EvaluationRequest
from evalsuite.evaluators.limits import allow_sockets
from evalsuite.evaluators.lm_eval_form import Form, find_form
from evalsuite.evaluators.lm_eval_worker import WorkerJob
from evalsuite.ledger import LedgerRecord
from evalsuite.tasks.base import Row, Task
from evalsuite.tasks.gsm8k_cot import lm_eval_task_file
from evalsuite.wire import SamplingSettings


def _task_name(form: Form) -> str:
    return f"evalsuite_{form.task}"


def write_task(form: Form, task: Task, request: EvaluationRequest, folder: Path) -> None:
    """Write data and a task file that includes lm-eval's own."""
    files = {}
    # The chain-of-thought task brings its examples along.
    for split in ("test",) if form.task == "gsm8k_cot" else ("train", "test"):
        path = folder / f"{split}.jsonl"
        path.write_text(_jsonl(task.rows(split, request.data)), encoding="ascii")
        files[split] = str(path)
    content: dict[str, object] = {
        "include": str(lm_eval_task_file(form.file)),
        "task": _task_name(form),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
    }
    if form.is_first_n:
        content["fewshot_config"] = {"sampler": "first_n"}
        content["generation_kwargs"] = {"until": list(task.stop), "do_sample": False}
    (folder / "task.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def _jsonl(rows: list[Row]) -> str:
    return "".join(json.dumps({"question": r.question, "answer": r.answer}) + "\n" for r in rows)


def worker_job(
    request: EvaluationRequest,
    folder: Path,
    num_questions: int,
    kept: Iterable[LedgerRecord],
) -> WorkerJob:
    """Describe the job to the child.

    Args:
        request: What is asked for.
        folder: Where `write_task` wrote.
        num_questions: Questions there are.
        kept: Records whose questions are not asked again.
    """
    config = request.config
    sampling = SamplingSettings(
        request.served_model, config.max_tokens, config.temperature, config.seed
    )
    known: list[dict[str, str]] = [{} for _ in range(request.repeats)]
    for record in kept:
        known[record.repeat][record.prompt_hash] = record.text or ""
    # A repeat that is on record already would only cost lm-eval's start; one must tell the prompts.
    repeats = [n for n, texts in enumerate(known) if len(texts) < num_questions] or [0]
    concurrency, _ = allow_sockets(config.max_concurrency or num_questions)
    return WorkerJob(
        task=_task_name(find_form(config)),
        folder=str(folder),
        url=ClientSettings(request.base_url, sampling).root + sampling.route,
        model=request.served_model,
        num_questions=num_questions,
        num_fewshot=config.num_fewshot,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        # lm-eval's serial path for 1 sends another stop list and reports nothing.
        num_concurrent=max(2, concurrency),
        max_attempts=config.max_retries + 1,
        timeout_s=math.ceil(request.request_timeout_s),
        repeats=repeats,
        known=known,
        api_key=request.api_key,
    )
