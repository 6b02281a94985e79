"""Builders of jobs, results and ledgers for the tests of the verdict side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalsuite.config import EvalConfig
from evalsuite.evaluators.base import EvalResult
from evalsuite.jobs import EvalJob, Layout
from evalsuite.ledger import LedgerRecord


def make_job(skip_reason: str = "", **config: Any) -> EvalJob:
    values: dict[str, Any] = {
        "model_name": "m",
        "accuracy_threshold": 0.88,
        "num_questions": 1319,
        "num_fewshot": 5,
        "tolerance": 0.02,
        **config,
    }
    return EvalJob(
        "suite/job", "suite", Path("job.yaml"), EvalConfig(**values), None, Layout(), skip_reason
    )


def make_result(right: int, n: int, failed: int = 0, **values: Any) -> EvalResult:
    fields: dict[str, Any] = {
        "task": "gsm8k",
        "evaluator": "builtin",
        "metric": "numeric",
        "profile": "gsm8k/script",
        "prompt_hash": "0123456789abcdef",
        "num_questions": n,
        "repeats": 1,
        "num_correct": {"numeric": right},
        "num_answered": n - failed,
        "num_truncated": 0,
        "num_empty": 0,
        "num_failed": failed,
        "num_no_answer": 0,
        "retries": 0,
        "first_error": "HTTP 500: boom" if failed else "",
        "duration_s": 1.0,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        **values,
    }
    return EvalResult(**fields)


def make_record(
    index: int, text: str | None = "18", right: bool = True, **values: Any
) -> LedgerRecord:
    fields: dict[str, Any] = {
        "index": index,
        "repeat": 0,
        "status": "answered",
        "text": text,
        "target": "18",
        "scores": {"numeric": "correct" if right else "wrong"},
        **values,
    }
    return LedgerRecord(**fields)
