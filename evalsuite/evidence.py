"""Which MoE backend ran: declared < logged < executed.

Receives what the config declares, what the server says of itself, and what a profiler saw;
returns `BackendEvidence`. Whether a mismatch is an ERROR is decided in `verdict.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BackendEvidence:
    """The three levels, each "" where nothing is known.

    Attributes:
        declared: Backend named by flag, environment or `expect_backend`.
        logged: Backend the server reports (`/v1/backends`, or its log line).
        executed: Backend whose kernels a profiler saw on every rank.
        ignored_switches: Flags or variables that the server logged as unknown or unused.
        detail: Reasons, kernel names with launch counts, log lines.
    """

    declared: str = ""
    logged: str = ""
    executed: str = ""
    ignored_switches: tuple[str, ...] = ()
    detail: dict[str, object] = field(default_factory=dict)

    @property
    def observed(self) -> str:
        """The strongest observation there is, "" if none."""
        return self.executed or self.logged
