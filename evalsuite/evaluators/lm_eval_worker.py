"""The child process in which the real lm-eval runs; started by `lm_eval.py`, never imported by it.

Receives a job as one JSON line on its standard input, which then stays open: when it ends, the
suite is gone and so is this process. Appends events as JSON lines to a file: the prompts, every
reply or failure as it comes, lm-eval's scores at the end. lm-eval builds, sends, retries and
scores; what this adds is that nothing it sees at the wire is lost.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from evalsuite.evaluators.lm_eval_calls import CALL, Call, ListeningSession, describe
from evalsuite.http_reply import one_line
from evalsuite.tasks.base import hash_prompts, hash_text


@dataclass(frozen=True)
class WorkerJob:
    """What the child is to do.

    Attributes:
        task: Name of the task in the YAML file of `folder`.
        folder: Holds the task file and the data, takes the events.
        url: Full address of the completions route.
        model: Served model name.
        num_questions: First questions to ask.
        num_fewshot: Shots.
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy.
        seed: Sent with each request.
        num_concurrent: Requests in flight, at least 2.
        max_attempts: Attempts per request.
        timeout_s: Limit of one attempt; lm-eval takes whole seconds.
        repeats: Numbers of the repeats to run.
        known: Per repeat, prompt hash -> reply text that is on record already.
        api_key: Bearer token, "" for none.
    """

    task: str
    folder: str
    url: str
    model: str
    num_questions: int
    num_fewshot: int
    max_tokens: int
    temperature: float
    seed: int
    num_concurrent: int
    max_attempts: int
    timeout_s: int
    repeats: list[int] = field(default_factory=lambda: [0])
    known: list[dict[str, str]] = field(default_factory=list)
    api_key: str = field(default="", repr=False)

    @property
    def events(self) -> Path:
        """File of events."""
        return Path(self.folder) / "events.jsonl"


class _Events:
    """Appends events; one write each, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def add(self, kind: str, **content: object) -> None:
        self._file.write(json.dumps({"kind": kind, **content}).encode() + b"\n")


class _Recording:
    """Goes before lm-eval's own class; an attempt too many is an event, not the end of the run."""

    # Set by lm-eval's class from the arguments below.
    max_retries: int
    timeout: int

    def __init__(self, job: WorkerJob, events: _Events) -> None:
        self._key = job.api_key
        super().__init__(  # type: ignore[call-arg]
            base_url=job.url,
            model=job.model,
            tokenizer_backend=None,
            tokenized_requests=False,
            num_concurrent=job.num_concurrent,
            max_retries=job.max_attempts,
            max_gen_toks=job.max_tokens,
            timeout=job.timeout_s,
            seed=job.seed,
        )
        self.events = events
        self.repeat = 0
        self.known: dict[str, str] = {}
        self.doc_ids: dict[str, list[int]] = {}
        self.attempt_errors: dict[str, list[str]] = {}

    @property
    def api_key(self) -> str:
        return self._key

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = [request.args[0] for request in requests]
        self.doc_ids, self.attempt_errors = {}, {}
        for request, prompt in zip(requests, prompts, strict=True):
            self.doc_ids.setdefault(prompt, []).append(request.doc_id)
        hashes = [hash_text(prompt) for prompt in prompts]
        by_doc = {r.doc_id: h for r, h in zip(requests, hashes, strict=True)}
        self.events.add("prompts", repeat=self.repeat, hash=hash_prompts(prompts), by_doc=by_doc)
        open_requests = [r for r, h in zip(requests, hashes, strict=True) if h not in self.known]
        lm_eval_replies = super().generate_until  # type: ignore[misc]
        fresh = iter(lm_eval_replies(open_requests) if open_requests else [])
        return [self.known[h] if h in self.known else next(fresh) for h in hashes]

    async def amodel_call(
        self, session: aiohttp.ClientSession, sem: Any, messages: list[str], **kwargs: Any
    ) -> list[str]:
        call = Call()
        token = CALL.set(call)
        started = time.perf_counter()
        errors = self.attempt_errors.setdefault(messages[0], [])
        try:
            listening = ListeningSession(session)
            answers: list[str] = await super().amodel_call(  # type: ignore[misc]
                listening, sem, messages, **kwargs
            )
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            kind, message, is_final = describe(error, call, self.timeout)
            message = one_line(message, self._key)
            errors.append(message)
            if not is_final and len(errors) < self.max_retries:
                raise
            self._note(messages[0], "failure", failure=kind, message=message, call=call)
            # lm-eval would end the run here and lose every answer. It gets a text that the
            # parent never counts, because the failure is on record.
            return [""]
        finally:
            CALL.reset(token)
        latency = time.perf_counter() - started
        self._note(messages[0], "reply", text=answers[0], call=call, latency_s=latency)
        return answers

    def _note(self, prompt: str, kind: str, *, call: Call, **content: object) -> None:
        choice = asdict(call.choice) if call.choice else {}
        for name in ("text", "token_ids", "token_logprobs"):
            choice.pop(name, None)
        errors = self.attempt_errors[prompt]
        for doc_id in self.doc_ids[prompt][:1]:
            self.events.add(
                kind,
                index=doc_id,
                repeat=self.repeat,
                prompt_hash=hash_text(prompt),
                status=call.status,
                retry_errors=errors,
                **choice,
                **content,
            )


def _model(job: WorkerJob, events: _Events) -> Any:
    """lm-eval's local-completions with every attempt recorded; only now is lm-eval imported."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return type("RecordingCompletions", (_Recording, LocalCompletionsAPI), {})(job, events)


def run(job: WorkerJob) -> None:
    """Let lm-eval ask and score every question, for each repeat."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    events = _Events(job.events)
    model = _model(job, events)
    manager = TaskManager(include_path=job.folder, include_defaults=False)
    for repeat in job.repeats:
        model.repeat = repeat
        model.known = job.known[repeat]
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[job.task],
            num_fewshot=job.num_fewshot,
            limit=job.num_questions,
            gen_kwargs={"temperature": job.temperature, "max_gen_toks": job.max_tokens},
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
            torch_random_seed=None,
        )
        for sample in found["samples"][job.task]:
            events.add(
                "score",
                index=sample["doc_id"],
                repeat=repeat,
                metric=sample["filter"],
                extracted=sample["filtered_resps"][0],
                is_right=bool(sample["exact_match"]),
            )
    events.add("done", version=lm_eval.__version__)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Read the job, run it."""
    job = WorkerJob(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Before lm-eval's import: no network, and no trace in anyone's cache.
    cache = str(Path(job.folder) / "cache")
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        HF_HOME=cache,
        HF_DATASETS_CACHE=cache,
        TOKENIZERS_PARALLELISM="false",
    )
    run(job)


if __name__ == "__main__":
    main()
