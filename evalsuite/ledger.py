"""One record per question, appended as it arrives.

Receives records from an evaluator, writes `ledger.jsonl`, gives them back for resume, pairing
and reports. The aggregate over records is `EvalResult` in `evaluators/base.py`.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from evalsuite.errors import ConfigError, EvalError, Problem

VERSION = 1

Status = Literal[
    "answered", "truncated", "empty", "http_error", "timeout", "connection_error", "malformed"
]
ANSWERED: frozenset[str] = frozenset({"answered", "truncated", "empty"})


@dataclass(frozen=True)
class LedgerRecord:
    """What happened to one question in one repeat.

    Attributes:
        index: Question index in the task's test set.
        repeat: 0-based repeat on the same warm server.
        status: How the request ended; the last four are failures of infrastructure.
        text: Raw reply, None for a failure.
        target: Gold answer.
        scores: Metric name -> "correct" | "wrong" | "no_answer"; empty for a failure.
        extracted: Metric name -> value read.
        finish_reason: From the server.
        prompt_tokens: Tokens of the prompt as the server counted them.
        completion_tokens: Tokens generated.
        latency_s: Last attempt.
        retries: Failed attempts before the final one.
        error: Type and message of the last error, "" if none.
        retry_errors: All failed attempts' errors.
        prompt_hash: sha256 of the prompt, 16 hex digits.
        token_logprobs: Log-probabilities of generated tokens where recorded.
    """

    index: int
    repeat: int
    status: Status
    text: str | None
    target: str
    scores: dict[str, str] = field(default_factory=dict)
    extracted: dict[str, str] = field(default_factory=dict)
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float = 0.0
    retries: int = 0
    error: str = ""
    retry_errors: tuple[str, ...] = ()
    prompt_hash: str = ""
    token_logprobs: tuple[float, ...] = ()

    @property
    def is_answered(self) -> bool:
        """Whether the server gave an answer (right, wrong, cut or empty)."""
        return self.status in ANSWERED


@dataclass(frozen=True)
class LedgerHead:
    """First line of a ledger: what its answers depend on besides the prompt.

    A run may only go on with a ledger whose head is equal to its own. `server` is the engine with
    the file's environment and arguments, secrets masked; `build` what the server said of its code
    and `weights` their revision, "" where nothing is known: that is equal to everything.
    """

    evaluator: str
    profile: str
    model: str
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[str, ...] = ()
    is_chat: bool = False
    server: str = ""
    build: str = ""
    weights: str = ""
    version: int = VERSION


_HEAD_KEYS = tuple(entry.name for entry in fields(LedgerHead))
_RECORD_KEYS = tuple(entry.name for entry in fields(LedgerRecord))
_TUPLES = ("retry_errors", "token_logprobs")


def encode(record: LedgerRecord) -> bytes:
    """One line of JSON; ASCII, so that any text comes back as it went in."""
    return json.dumps({key: getattr(record, key) for key in _RECORD_KEYS}).encode() + b"\n"


def _decode(data: object) -> LedgerRecord:
    if not isinstance(data, dict):
        raise TypeError(f"a JSON {type(data).__name__} in place of an object")
    content: dict[str, Any] = data
    return LedgerRecord(**{**content, **{key: tuple(content.get(key, ())) for key in _TUPLES}})


class Ledger:
    """The file of one job: opened once, every record on disk as soon as it is added."""

    def __init__(self, path: Path, head: LedgerHead) -> None:
        """Open or continue the ledger at `path`.

        Raises:
            ConfigError: The file was begun with other settings, or is no ledger.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        found_head, self.records, good_bytes = _read(path)
        if found_head is not None:
            _check_head(path, found_head, head)
        # Unbuffered: one write per record, so that even a kill loses none that was added.
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        # What a kill left of a half-written line must not become part of the next one.
        self._file.truncate(good_bytes)
        self._file.seek(good_bytes)
        if found_head is None:
            line = {key: getattr(head, key) for key in _HEAD_KEYS}
            self._write(json.dumps({"ledger": line}).encode() + b"\n")

    def add(self, record: LedgerRecord) -> None:
        """Append a record.

        Raises:
            EvalError: The disk is full or gone; what was added before stays readable.
        """
        self._write(encode(record))
        self.records.append(record)

    def _write(self, line: bytes) -> None:
        """Write a whole line or nothing of it."""
        start = self._file.tell()
        try:
            # A full disk takes a part first; the next call then has the error.
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
                self._file.seek(start)
            reason = f"{self.path} cannot be written ({type(error).__name__}: {error.strerror})"
            raise EvalError(reason) from error

    def answered(self, prompt_hashes: dict[int, str]) -> dict[tuple[int, int], LedgerRecord]:
        """Records that need no second request, by (index, repeat).

        Args:
            prompt_hashes: Question index -> hash of the prompt that would be sent now.

        Raises:
            ConfigError: A recorded answer belongs to another prompt.
        """
        kept = {}
        for record in self.records:
            expected = prompt_hashes.get(record.index)
            if expected is None or not record.is_answered:
                continue
            if record.prompt_hash != expected:
                message = (
                    f"question {record.index} was answered to prompt {record.prompt_hash}, the "
                    f"prompt is now {expected}; {_REMEDY}"
                )
                raise ConfigError(Problem("error", message, file=str(self.path)))
            kept[record.index, record.repeat] = record
        return kept

    def close(self) -> None:
        """Close the file; nothing is waiting to be written."""
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_REMEDY = "give the run another results folder, or delete the file"


def read_ledger(path: Path) -> list[LedgerRecord]:
    """Read the last record of every (index, repeat), in the order of questions.

    Raises:
        ConfigError: The file is no ledger.
    """
    _, records, _ = _read(path)
    latest = {(record.repeat, record.index): record for record in records}
    return [latest[key] for key in sorted(latest)]


def read_build(path: Path) -> str:
    """The build of the server that a ledger was begun with, "" where nothing is known of it.

    Raises:
        ConfigError: The file is no ledger.
    """
    head, _, _ = _read(path)
    return head.build if head else ""


def _read(path: Path) -> tuple[LedgerHead | None, list[LedgerRecord], int]:
    """Head, records and the number of bytes that are whole lines."""
    if not path.exists():
        return None, [], 0
    content = path.read_bytes()
    good = content.rfind(b"\n") + 1
    lines = content[:good].split(b"\n")[:-1]
    head: LedgerHead | None = None
    records: list[LedgerRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            if number == 1:
                data = data["ledger"]
                head = LedgerHead(**{**data, "stop": tuple(data["stop"])})
            else:
                records.append(_decode(data))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            message = f"not a line of a ledger ({type(error).__name__}: {error}); {_REMEDY}"
            raise ConfigError(Problem("error", message, file=str(path), line=number)) from error
    return head, records, good


# What is found out of a server; the rest of a head is asked for.
_IDENTITY = {"build": "server", "weights": "model's weights"}


def _check_head(path: Path, found: LedgerHead, wanted: LedgerHead) -> None:
    different = [
        f"{key} {getattr(found, key)!r} (now {getattr(wanted, key)!r})"
        for key in _HEAD_KEYS
        if key not in _IDENTITY
        and getattr(found, key) != getattr(wanted, key)
        # Earlier versions did not write it down.
        and not (key == "server" and not found.server)
    ]
    if different:
        message = f"was begun with other settings: {', '.join(different)}; {_REMEDY}"
        raise ConfigError(Problem("error", message, file=str(path)))
    for key, what in _IDENTITY.items():
        before, now = getattr(found, key), getattr(wanted, key)
        if before and now and before != now:
            message = (
                f"holds answers of another build: the {what} had {before!r} and now {now!r}, and "
                "answers of both are no one accuracy; ask all again in a new folder "
                "(`evalsuite rerun RUN`), or delete the file"
            )
            raise ConfigError(Problem("error", message, file=str(path)))
