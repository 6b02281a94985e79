"""The contract of an engine: how a server is started, when it is ready, what it says it runs.

One engine is one module of this folder with an `ENGINE` object, found by name. It builds the
command line and reads logs; processes are started by `server.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from evalsuite.evidence import BackendEvidence
from evalsuite.jobs import EvalJob


@dataclass(frozen=True)
class LaunchSpec:
    """How to start one server.

    Attributes:
        argv: Command, without the port (see `port_args`).
        env: Variables on top of the inherited environment.
        served_model: Name that `/v1/models` must list before the server counts as ready.
        port_args: Template of the port argument, "{port}" replaced; () for an external server.
        base_url: Set for an external server only; nothing is started then.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    served_model: str = ""
    port_args: tuple[str, ...] = ("--port", "{port}")
    base_url: str = ""


class Engine(Protocol):
    """An engine module's `ENGINE` object."""

    name: str

    def version(self) -> str:
        """Version text without importing the engine into this process, "" if absent."""
        ...

    def launch_spec(self, job: EvalJob) -> LaunchSpec:
        """Build the launch; flags are passed through, nothing is trusted by default.

        Raises:
            ConfigError: A flag this engine cannot take (e.g. a port of the user's own).
        """
        ...

    def unavailable_reason(self, job: EvalJob | None = None) -> str:
        """Why this engine cannot serve the job (or any) on this machine, "" if it can."""
        ...

    def early_evidence(self, job: EvalJob, base_url: str) -> BackendEvidence:
        """Ask a ready server what it will not change its mind about; all "" where it cannot say."""
        ...

    def evidence(self, job: EvalJob, base_url: str, log_text: str) -> BackendEvidence:
        """Collect what the server says about its MoE backend and the switches it ignored."""
        ...
