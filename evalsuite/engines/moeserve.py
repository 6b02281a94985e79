"""Engine `moeserve`: the server of this distribution.

Started as `python -P -m moeserve MODEL`; it binds a free port itself and writes it to a file.
`/v1/backends` says which backend the oracle chose and why (level "logged"), `/v1/evidence` which
kernels a profiler saw (level "executed"; asked only where the config wants it, because it runs
two steps under the profiler).
"""

from __future__ import annotations

import functools
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalsuite.config import EvalConfig
from evalsuite.engines.base import LaunchSpec
from evalsuite.engines.declared import MOE_BACKEND_FLAGS, declared_backend, served_model
from evalsuite.engines.kernels_seen import executed_backend
from evalsuite.errors import ConfigError, Problem
from evalsuite.evidence import BackendEvidence, canonical_backend
from evalsuite.jobs import EvalJob
from evalsuite.launching import api_key_of
from evalsuite.names import closest
from evalsuite.readiness import get
from evalsuite.server_args import flag_values

# A profiled prefill and decode step on every rank.
_PROFILE_TIMEOUT_S = 120.0
_BACKENDS_TIMEOUT_S = 10.0
# In a clone the package lies beside this one; installed, it is found like any other.
_IN_CLONE = Path(__file__).resolve().parents[2] / "kernels"


def _source_root() -> str:
    """Folder to put on the server's path, "" where it is installed."""
    if importlib.util.find_spec("moeserve") is not None:
        return ""
    return str(_IN_CLONE) if (_IN_CLONE / "moeserve").is_dir() else ""


class Moeserve:
    """See the module's text."""

    name = "moeserve"

    def version(self) -> str:
        """Version of the distribution that both packages come in."""
        try:
            return importlib.metadata.version("moe-evalsuite")
        except importlib.metadata.PackageNotFoundError:
            from evalsuite import __version__

            return __version__

    def launch_spec(self, job: EvalJob) -> LaunchSpec:
        """`python -P -m moeserve MODEL ARGS --port 0 --port-file FILE`.

        Raises:
            ConfigError: A flag that the server would refuse at its start, a misspelt backend.
        """
        config = job.config
        _check_flags(config)
        _check_backend(config)
        root = _source_root()
        path = [root, *filter(None, [config.env.get("PYTHONPATH", "")])] if root else []
        return LaunchSpec(
            argv=(
                *(sys.executable, "-P", "-m", "moeserve", config.model_name),
                *config.server_args,
            ),
            env={**config.env, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})},
            served_model=served_model(job),
            port_args=("--host", "127.0.0.1", "--port", "0", "--port-file", "{port_file}"),
        )

    def unavailable_reason(self, job: EvalJob | None = None) -> str:
        """Say what of the `server` extra is missing; nothing is imported."""
        missing = [
            name
            for name in ("torch", "fastapi", "uvicorn", "tokenizers", "safetensors")
            if importlib.util.find_spec(name) is None
        ]
        if importlib.util.find_spec("moeserve") is None and not _source_root():
            missing.insert(0, "moeserve")
        if missing:
            return (
                f"engine moeserve needs {', '.join(missing)}; "
                "install them with pip install 'moe-evalsuite[server]'"
            )
        return ""

    def evidence(
        self, job: EvalJob, base_url: str, log_text: str, api_key: str = ""
    ) -> BackendEvidence:
        """Ask the server; what it does not answer stays unknown, with the reason in `detail`."""
        known = self.early_evidence(job, base_url, api_key)
        expected = job.config.expect_backend
        if expected is None or expected.level != "executed":
            return known
        ask = functools.partial(_ask, base_url, api_key=_key(job, api_key))
        seen, fault = ask("/v1/evidence", _PROFILE_TIMEOUT_S)
        if seen is None:
            why = "; ".join(filter(None, [str(known.detail.get("why", "")), fault]))
            return replace(known, detail={**known.detail, "why": why})
        body = known.detail.get("backends")
        plan = body.get("moe") if isinstance(body, dict) else None
        executed, kernels = executed_backend(seen, plan)
        detail = {**known.detail, "kernels": kernels, "evidence": seen}
        return replace(known, executed=executed, detail=detail)

    def early_evidence(self, job: EvalJob, base_url: str, api_key: str = "") -> BackendEvidence:
        """The server's choice, made once at its load; another engine than ours answers 404."""
        expected = job.config.expect_backend
        body, fault = _ask(
            base_url, "/v1/backends", _BACKENDS_TIMEOUT_S, api_key=_key(job, api_key)
        )
        if body is None:
            return BackendEvidence(declared=declared_backend(job), detail={"why": fault})
        why = why_chosen(body, expected.name if expected else "")
        detail = {"backends": body, "why": why}
        return BackendEvidence(declared_backend(job), chosen_backend(body), detail=detail)


_STAND_IN = "qwen3-30b-a3b"
# What makes a file of the server's folder of backends a backend, and not a helper.
_BACKEND_MARK = re.compile(r"^BACKEND\b", re.MULTILINE)
# A name farther from every known one than this may be a backend that only the server's machine has.
_TYPING_ERROR = 0.82


@functools.cache
def backend_names() -> tuple[str, ...]:
    """MoE backends of the server and of other packages; found without importing torch."""
    spec = importlib.util.find_spec("moeserve")
    places = list(spec.submodule_search_locations or ()) if spec else [str(_IN_CLONE / "moeserve")]
    found = [
        path.stem
        for place in places
        for path in sorted(Path(place, "moe", "backends").glob("*.py"))
        if _BACKEND_MARK.search(path.read_text(encoding="utf-8"))
    ]
    points = importlib.metadata.entry_points(group="moeserve.moe_backends")
    return (*found, *(point.name for point in points))


def _check_backend(config: EvalConfig) -> None:
    """Refuse a misspelt backend before a server is started for it.

    Raises:
        ConfigError: A name that is none, and close to one.
    """
    asked = [value for value in flag_values(config.server_args, MOE_BACKEND_FLAGS) if value]
    named = {"server_args": asked[-1:], "expect_backend": []}
    if config.expect_backend is not None:
        named["expect_backend"] = [config.expect_backend.name]
    valid = backend_names()
    problems = [
        Problem("error", f"moeserve has no MoE backend {name!r}; did you mean {near!r}?", key=key)
        for key, names in named.items()
        for name in names
        if canonical_backend(name) not in ("", *valid)
        and (near := closest(canonical_backend(name), valid, cutoff=_TYPING_ERROR))
    ]
    if problems:
        raise ConfigError(problems)


def _check_flags(config: EvalConfig) -> None:
    """Let the server's own parser read the flags; without the server here nothing is checked."""
    try:
        from moeserve.args import parse
        from moeserve.errors import UsageError
    except ModuleNotFoundError:
        return
    try:
        # Any model whose shapes are known: whether the weights are on this machine is a matter of
        # the machine, and the server says it at its start.
        parse((_STAND_IN, *config.server_args, "--load-format", "dummy"), config.env)
    except UsageError as error:
        said = str(error).replace(_STAND_IN, config.model_name)
        message = f"moeserve refuses these flags: {said}"
        raise ConfigError(Problem("error", message, key="server_args")) from error


def _key(job: EvalJob, given: str) -> str:
    """A server that asks for a key asks here too."""
    return given or api_key_of(job.config.server_args, job.config.env)


def _ask(base_url: str, path: str, timeout_s: float, *, api_key: str) -> tuple[Any, str]:
    """The body of a reply, else None and why there is none."""
    try:
        status, body = get(base_url, path, timeout_s=timeout_s, api_key=api_key)
        return (json.loads(body), "") if status == 200 else (None, f"{path} answers {status}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return None, f"{path}: {type(error).__name__}: {error}"


def chosen_backend(body: Any) -> str:
    """The backend of a `/v1/backends` body: that of the largest batches; "" if it names none."""
    moe = body.get("moe") if isinstance(body, dict) else None
    layers = moe if isinstance(moe, list) else [moe]
    names = {
        str(layer.get("primary") or layer.get("backend") or "")
        for layer in layers
        if isinstance(layer, dict)
    }
    names.discard("")
    # Layer groups served by different backends have no one name.
    return names.pop() if len(names) == 1 else "+".join(sorted(names))


def why_chosen(body: Any, expected: str) -> str:
    """The server's reason for its choice, and for its refusal of the expected backend."""
    moe = body.get("moe") if isinstance(body, dict) else None
    if not isinstance(moe, dict) or not isinstance(refused := moe.get("rejected", {}), dict):
        return ""
    found = [f"{moe.get('requested')} was asked of the server: {moe.get('reason')}"]
    for name, reason in refused.items():
        if canonical_backend(name) == canonical_backend(expected):
            found.append(f"{name} was refused: {reason}")
    return "; ".join(found)


ENGINE = Moeserve()
