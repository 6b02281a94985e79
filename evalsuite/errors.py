"""The three ways a run goes wrong, kept apart from each other and from a wrong answer.

`ConfigError` is the user's to mend, `ServerError` and `EvalError` are infrastructure and
safe to retry. A low score is none of them: it is a `Verdict` (see `verdict.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


class EvalsuiteError(Exception):
    """Base of every error that this package raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One fault or remark about one place of one file.

    Attributes:
        severity: "error", "warning" or "note".
        message: What is wrong, with the value and the remedy.
        file: Path as the user would write it, or "" where there is no file.
        line: 1-based line, or 0 where it has none.
        key: Dotted key path inside the file, or "".
    """

    severity: str
    message: str
    file: str = ""
    line: int = 0
    key: str = ""

    def __str__(self) -> str:
        """Render as `file:line: severity: key: message`, leaving out what is empty."""
        return f"{self._place}{self.severity}: {self._text}"

    def describe(self) -> str:
        """The same without the severity, for a sentence that says it already."""
        return f"{self._place}{self._text}"

    @property
    def _place(self) -> str:
        line = f":{self.line}" if self.line else ""
        return f"{self.file}{line}: " if self.file or line else ""

    @property
    def _text(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(EvalsuiteError):
    """A config, list or option that cannot be meant; carries every problem found at once."""

    def __init__(self, problems: Problem | list[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = Problem("error", problems)
        self.problems: list[Problem] = [problems] if isinstance(problems, Problem) else problems
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass
class ServerError(EvalsuiteError):
    """The server could not be started, died, or could not be stopped.

    Attributes:
        reason: One sentence, naming the phase ("start", "ready", "evaluation", "stop").
        command: The argv, ready to be pasted into a shell, secrets masked.
        exit_code: Exit status of the server process, None while it lives.
        log_tail: The last lines (at most 40) of the log that matters, control bytes removed.
        log_path: File of the whole log, "" where there is none.
        is_config_fault: Whether no retry can mend it: the server refuses its command line.
    """

    reason: str
    command: str = ""
    exit_code: int | None = None
    log_tail: list[str] = field(default_factory=list)
    log_path: str = ""
    is_config_fault: bool = False

    def __str__(self) -> str:
        """Reason, exit code, command and log tail, in this order."""
        parts = [self.reason]
        if self.exit_code is not None:
            parts.append(f"exit code {self.exit_code}")
        if self.command:
            parts.append(f"command: {self.command}")
        if self.log_tail:
            parts.append("last lines of its log:\n" + "\n".join(f"  | {x}" for x in self.log_tail))
        return "\n".join(parts)


@dataclass
class EvalError(EvalsuiteError):
    """Requests failed beyond what the verdict can stand.

    Attributes:
        reason: One sentence.
        num_failed: Questions without a usable answer.
        num_questions: Questions asked.
        first_error: Type and message of the first failure, never blank.
    """

    reason: str
    num_failed: int = 0
    num_questions: int = 0
    first_error: str = ""

    def __str__(self) -> str:
        """Reason with the counts, where there are any, and the first error."""
        counts = f" ({self.num_failed} of {self.num_questions} requests failed)"
        text = self.reason + (counts if self.num_questions else "")
        return f"{text}; first error: {self.first_error}" if self.first_error else text
