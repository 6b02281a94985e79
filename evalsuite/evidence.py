"""Which MoE backend ran: declared < logged < executed.

Receives what the config declares, what the server says of itself, and what a profiler saw;
returns `BackendEvidence` and, against the config's expectation, the reason why it does not hold.
That such a reason makes the job an ERROR is decided in `judge.py`; reading logs is `engines/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from evalsuite.config import ExpectBackend

LEVELS = ("declared", "logged", "executed")

# Left: any spelling met in configs, environment values and log lines, after `_spell`.
# Right: the one name used here. Log spellings are the field's enum values.
_ALIASES = {
    "rocm_aiter": "aiter",
    "flashinfer_trt_llm": "flashinfer_trtllm",
    "fi_trtllm": "flashinfer_trtllm",
    "trtllm": "flashinfer_trtllm",
    "fi_cutlass": "flashinfer_cutlass",
    "grouped_mm": "torch_grouped_mm",
    "torch_grouped_gemm": "torch_grouped_mm",
    "out_of_tree": "oot",
}
# What names no backend: the choice was left to the server.
_UNSET = frozenset({"", "auto", "none", "default"})


def _spell(name: str) -> str:
    text = re.sub(r"(?i)\s+(unquantized\s+)?(moe\s+)?backend$", "", name.strip())
    return re.sub(r"[\s\-]+", "_", text).lower()


def canonical_backend(name: str) -> str:
    """Return the one spelling of a backend name; "" where it names none ("auto")."""
    spelled = _spell(name)
    return "" if spelled in _UNSET else _ALIASES.get(spelled, spelled)


@dataclass(frozen=True)
class BackendEvidence:
    """The three levels, each "" where nothing is known.

    Attributes:
        declared: Backend named by flag, environment or `expect_backend`.
        logged: Backend the server reports (`/v1/backends`, or its log line).
        executed: Backend whose kernels a profiler saw on every rank.
        ignored_switches: Flags or variables that the server logged as unknown or unused.
        detail: Kernel names with launch counts, log lines; "why": the server's reason.
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

    @property
    def why(self) -> str:
        """The server's own reason for its choice, as the end of a message; "" if it gave none."""
        why = self.detail.get("why")
        return f"; {why}" if why else ""

    def describe(self) -> str:
        """Render the three levels and the ignored switches in one line."""
        levels = ", ".join(f"{level} {getattr(self, level) or 'unknown'}" for level in LEVELS)
        if self.ignored_switches:
            levels += f"; ignored switches: {', '.join(self.ignored_switches)}"
        return levels


def contradiction(evidence: BackendEvidence, expected: ExpectBackend | None) -> str:
    """Say why the evidence does not carry the job's verdict, "" where it does.

    Without an expectation the declared backend, where there is one, must be the one observed.
    With one, every level that is known must name it, the asked level must be known, and the
    server must have ignored no switch.
    """
    if expected is None:
        declared = canonical_backend(evidence.declared)
        for level in ("executed", "logged"):
            seen = canonical_backend(getattr(evidence, level))
            if declared and seen and seen != declared:
                return (
                    f"backend {evidence.declared!r} was declared and {level} is "
                    f"{getattr(evidence, level)!r} ({evidence.describe()}){evidence.why}"
                )
        return ""
    wanted = canonical_backend(expected.name)
    for level in reversed(LEVELS):
        seen = canonical_backend(getattr(evidence, level))
        if seen and seen != wanted:
            return (
                f"expect_backend names {expected.name!r} and {level} is "
                f"{getattr(evidence, level)!r} ({evidence.describe()}){evidence.why}"
            )
    if evidence.ignored_switches:
        return f"the server ignored switches of this config ({evidence.describe()})"
    strongest = max(
        (i for i, level in enumerate(LEVELS) if canonical_backend(getattr(evidence, level))),
        default=-1,
    )
    if strongest < LEVELS.index(expected.level):
        return (
            f"expect_backend asks for level {expected.level!r} and it is not known "
            f"({evidence.describe()}){evidence.why}"
        )
    return ""


def early_contradiction(evidence: BackendEvidence, expected: ExpectBackend | None) -> str:
    """The same for what a server says before the questions: what is not known yet may follow."""
    if not canonical_backend(evidence.logged):
        return ""
    if expected is not None:
        expected = expected.model_copy(update={"level": "declared"})
    return contradiction(evidence, expected)
