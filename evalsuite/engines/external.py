"""Engine `external`: a server somebody else runs, named by `--base-url`; nothing is started.

Which backend it uses is known only if it answers `/v1/backends`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from evalsuite.engines.base import LaunchSpec
from evalsuite.engines.declared import served_model
from evalsuite.engines.moeserve import ENGINE as MOESERVE
from evalsuite.errors import ConfigError, Problem
from evalsuite.evidence import BackendEvidence
from evalsuite.jobs import EvalJob


@dataclass
class External:
    """See the module's text.

    Attributes:
        base_url: Root of the server, with or without "/v1"; "" until the command line names it.
        api_key: Bearer token it asks for.
    """

    base_url: str = ""
    api_key: str = field(default="", repr=False)
    name: str = "external"

    def version(self) -> str:
        """Nobody knows."""
        return ""

    def launch_spec(self, job: EvalJob) -> LaunchSpec:
        """Name the server.

        Raises:
            ConfigError: No `--base-url`.
        """
        if not self.base_url:
            message = "engine external needs --base-url URL"
            raise ConfigError(Problem("error", message, file=str(job.path), key="engine"))
        env = {"OPENAI_API_KEY": self.api_key} if self.api_key else {}
        return LaunchSpec((), env, served_model(job), (), self.base_url)

    def unavailable_reason(self, job: EvalJob | None = None) -> str:
        """It runs already, or the start says why not."""
        return ""

    def evidence(self, job: EvalJob, base_url: str, log_text: str) -> BackendEvidence:
        """Ask `/v1/backends`; another engine than ours answers 404 and stays unknown."""
        return MOESERVE.evidence(job, base_url, log_text, self.api_key)

    def early_evidence(self, job: EvalJob, base_url: str) -> BackendEvidence:
        """The same, before the questions."""
        return MOESERVE.early_evidence(job, base_url, self.api_key)


ENGINE = External()
