"""Engine `sglang`: `python -m sglang.launch_server --model-path MODEL ARGS`.

A file written for `vllm serve` runs here through the table below; flags that are SGLang's own
pass through; flags that only vLLM has and that would change the measurement are refused.

Flags and log lines are those of the source of SGLang 0.5.23 and of the form before it; no
server of SGLang was ever started by this project: its wheels pin CUDA builds.
"""

from __future__ import annotations

import re
import sys

from evalsuite.engines.base import LaunchSpec
from evalsuite.engines.declared import declared_backend, served_model
from evalsuite.engines.embedded import model_argument
from evalsuite.engines.installed import version_here
from evalsuite.errors import ConfigError, Problem
from evalsuite.evidence import BackendEvidence
from evalsuite.jobs import EvalJob
from evalsuite.server_args import canonical_flag

# vLLM's flag -> SGLang's, same meaning, same value.
_RENAMED = {
    "--tensor-parallel-size": "--tp-size",
    "-tp": "--tp-size",
    "--data-parallel-size": "--dp-size",
    "-dp": "--dp-size",
    "--pipeline-parallel-size": "--pp-size",
    "-pp": "--pp-size",
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--moe-backend": "--moe-runner-backend",
    "--enforce-eager": "--disable-cuda-graph",
    "--seed": "--random-seed",
}
# Only about vLLM's own log or front: dropping them changes nothing that is measured.
_DROPPED = ("--disable-uvicorn-access-log", "--disable-log-requests", "--disable-log-stats")
_REFUSED = {
    "--all2all-backend": "SGLang's is --moe-a2a-backend, with other values",
    "--compilation-config": "SGLang has no counterpart",
    "--speculative-config": "SGLang's are --speculative-algorithm and its companions",
    "--enable-eplb": "SGLang's is --enable-eplb with --ep-num-redundant-experts",
    "--api-server-count": "SGLang has no counterpart",
}
_CHOICES = (
    # The dump of all arguments: `ServerArgs(moe_runner_backend='x', ...)`, in 0.5.23 a mapping.
    # The draft model has one of its own (`speculative_moe_runner_backend`), which is not meant.
    re.compile(r"\bmoe_runner_backend'?\s*[=:]\s*'(?P<name>[\w-]+)'"),
    re.compile(r"\bUs(?:e|ing) (?P<name>[\w-]+) as (?:the )?MoE runner backend", re.IGNORECASE),
)


class Sglang:
    """See the module's text."""

    name = "sglang"

    def version(self) -> str:
        """Version of this environment's SGLang, "" if absent."""
        return version_here("sglang")

    def launch_spec(self, job: EvalJob) -> LaunchSpec:
        """Translate the flags.

        Raises:
            ConfigError: A flag without a counterpart.
        """
        config = job.config
        model, naming = model_argument(config.model_name)
        args = translate(job)
        if served_model(job) == config.model_name and "--served-model-name" not in args:
            args.extend(naming)
        if config.trust_remote_code and "--trust-remote-code" not in args:
            args.append("--trust-remote-code")
        head = (sys.executable, "-m", "sglang.launch_server", "--model-path", model)
        return LaunchSpec(
            argv=(*head, *args),
            env=dict(config.env),
            served_model=served_model(job),
            port_args=("--host", "127.0.0.1", "--port", "{port}"),
        )

    def unavailable_reason(self, job: EvalJob | None = None) -> str:
        """The package is not there."""
        return "" if self.version() else "engine sglang: the package sglang is not installed here"

    def early_evidence(self, job: EvalJob, base_url: str) -> BackendEvidence:
        """It has no route that says it."""
        return BackendEvidence()

    def evidence(self, job: EvalJob, base_url: str, log_text: str) -> BackendEvidence:
        """Read the log; its argument dump counts only where it names a backend."""
        found: list[str] = []
        for pattern in reversed(_CHOICES):
            found += [m["name"] for m in pattern.finditer(log_text) if m["name"] != "auto"]
        return BackendEvidence(
            declared=declared_backend(job), logged=found[0] if found else "", detail={}
        )


def translate(job: EvalJob) -> list[str]:
    """`server_args` in SGLang's words.

    Raises:
        ConfigError: A flag without a counterpart.
    """
    out: list[str] = []
    for word in job.config.server_args:
        flag = canonical_flag(word)
        _, equals, value = word.partition("=")
        if flag in _REFUSED:
            message = f"engine sglang cannot take {flag}: {_REFUSED[flag]}"
            raise ConfigError(Problem("error", message, file=str(job.path), key="server_args"))
        if flag in _DROPPED:
            continue
        if flag in ("--enable-expert-parallel", "-ep"):
            # vLLM spreads experts over all TP x DP ranks; SGLang is told the number.
            out += ["--ep-size", str(job.layout.tp * job.layout.dp)]
        else:
            out.append(f"{_RENAMED[flag]}{equals}{value}" if flag in _RENAMED else word)
    return out


ENGINE = Sglang()
