"""Level `executed` for vLLM: its own profiler over one request, where it has one.

Receives the version and the config; returns the words that turn the profiler on, and the backend
whose kernels its traces name. From 0.13 on it is `--profiler-config`, before that a variable. What
the names of kernels mean is `kernels_seen.py`; the log's lines are read in `vllm.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import re
import shutil
import tempfile
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

from evalsuite.engines.kernels_seen import backend_of
from evalsuite.jobs import EvalJob
from evalsuite.launching import api_key_of

_OLD_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
_FLAG = "--profiler-config"
_FLAG_SINCE = (0, 13)
_TIMEOUT_S = 120.0
# One prefill and some decode steps; more tokens make traces of hundreds of megabytes.
_REQUEST = {"prompt": "1 2 3 4 5 6 7 8", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
# Its experts on a CPU; on a GPU they have the names that `kernels_seen.py` knows.
_ON_CPU = "_C::cpu_fused_moe"
# Operators of a CPU build, kernels of a GPU.
_CATEGORIES = frozenset({"kernel", "cpu_op"})


def folder_of(job: EvalJob) -> Path:
    """Where this process has the traces of a job's server."""
    name = hashlib.sha256(job.id.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"evalsuite-{os.getpid()}-vllm-{name}"


def is_wanted(job: EvalJob) -> bool:
    """Whether the config asks for it; a profiler of the file's own is left alone."""
    expected = job.config.expect_backend
    own = _FLAG in job.config.server_args or _OLD_VARIABLE in job.config.env
    return expected is not None and expected.level == "executed" and not own


def launch_words(job: EvalJob, version: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that turn the profiler on."""
    folder = folder_of(job)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < _FLAG_SINCE:
        return [], {_OLD_VARIABLE: str(folder)}
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder),
        "torch_profiler_with_stack": False,
    }
    return [_FLAG, json.dumps(config, separators=(",", ":"))], {}


def executed_backend(job: EvalJob, base_url: str, model: str) -> tuple[str, dict[str, object]]:
    """Profile one request and name what every rank ran, "" where nothing is recognised.

    Returns:
        The backend, names of ranks that differ joined by "+"; and what was seen.
    """
    folder = folder_of(job)
    key = api_key_of(job.config.server_args, job.config.env)
    try:
        for path, body in (
            ("/start_profile", None),
            ("/v1/completions", {**_REQUEST, "model": model}),
            ("/stop_profile", None),
        ):
            status, text = _post(base_url, path, body, key)
            if status != 200:
                return "", {"profiler": f"{path} answers {status}: {text[:200]}"}
        counts = _counts(folder)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return "", {"profiler": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return named(counts)


def named(counts: dict[str, Counter[str]]) -> tuple[str, dict[str, object]]:
    """The one backend of all traces: a trace without an expert kernel is the front's."""
    seen = {name: _backend_of(one) for name, one in counts.items()}
    ranks = {name: backend for name, backend in seen.items() if backend}
    detail: dict[str, object] = {
        "profiled": ranks or "no expert kernel was recognised",
        "kernels": {name: dict(counts[name].most_common(12)) for name in ranks or counts},
    }
    return "+".join(sorted(set(ranks.values()))), detail


def _backend_of(counts: Counter[str]) -> str:
    """Backend of one trace; how many layers have experts is not known here, so one is enough."""
    if counts[_ON_CPU]:
        return "cpu"
    name = backend_of(counts, 1)
    # Plain products name no backend here: other layers have them too.
    return "" if name == "cpu" else name


def _post(base_url: str, path: str, body: dict[str, Any] | None, key: str) -> tuple[int, str]:
    parts = urllib.parse.urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request("POST", path, json.dumps(body) if body else "{}", headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode("utf-8", errors="replace")
    finally:
        connection.close()


def _counts(folder: Path) -> dict[str, Counter[str]]:
    """Launches by name, for every trace that is there and whole."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not (found := sorted(folder.glob("**/*.json*"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return {path.name: _names_in(path) for path in found}


def _names_in(path: Path) -> Counter[str]:
    raw = path.read_bytes()
    events = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    return Counter(
        str(event["name"])
        for event in events
        if event.get("cat") in _CATEGORIES and event.get("name")
    )
