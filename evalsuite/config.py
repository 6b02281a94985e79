"""One YAML file -> `EvalConfig`, frozen and checked.

Receives a path; returns the config with every default filled in, or raises `ConfigError`
with all problems of the file (file, line, key path, value, closest valid name). The reading
of YAML is `yaml_loader.py`; what one value may be is here and in `config_types.py`, what values
mean together in `config_checks.py`, the texts of the messages in `config_faults.py`. Which
files are run is `lists.py`; what a config needs of a machine is `jobs.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from evalsuite import names
from evalsuite.config_types import (
    FINITE,
    MAX_SEED,
    Calibration,
    Count,
    EvidenceLevel,
    ExpectBackend,
    Fraction,
    Gate,
    GateName,
    Provenance,
    Seconds,
    Strict,
    between,
)
from evalsuite.errors import ConfigError, Problem
from evalsuite.server_args import TRUST_FLAGS, has_switch, parse_server_args
from evalsuite.server_args_file import expand_config_file
from evalsuite.yaml_loader import UNREADABLE, Document, load_document

EngineName = str

__all__ = [
    "Calibration",
    "EngineName",
    "EvalConfig",
    "EvidenceLevel",
    "ExpectBackend",
    "Gate",
    "GateName",
    "LoadedConfig",
    "Provenance",
    "load_config",
    "read_config",
]

# A server that is being restarted is back by then; a wrong address should not cost 20 minutes.
ABSENT_GRACE_S = 10.0
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODEL_NAME = re.compile(r"[^\s\x00-\x1f-][^\s\x00-\x1f]*")


class EvalConfig(Strict):
    """One job's settings. Keys, meanings and defaults: `docs/config.md`."""

    # The field's keys; defaults are those of its script, but for `server_args`, to which
    # nothing is added.
    model_name: str
    accuracy_threshold: Fraction
    num_questions: Count
    num_fewshot: Annotated[int, between(0, 1000)]
    server_args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    startup_max_wait_seconds: Seconds = 1200.0
    tolerance: Fraction = 0.08
    max_tokens: Count = 256
    temperature: Annotated[float, between(0, 10)] = 0.0
    seed: Annotated[int, between(0, MAX_SEED)] = 42
    gen_prefix: str = ""
    use_chat_completions: bool = False
    max_concurrency: Count | None = None
    request_timeout_seconds: Seconds = 600.0
    rocm_request_timeout_seconds: Seconds | None = None
    min_acceptance_length: Annotated[float, between(1, FINITE)] | None = None
    startup_rpc_checks: tuple[str, ...] = ()

    # Ours.
    engine: EngineName = "moeserve"
    task: str = "gsm8k"
    evaluator: str = "builtin"
    metric: str | None = None
    expect_backend: ExpectBackend | None = None
    gate: Gate = Field(default_factory=Gate)
    baseline: str | None = None
    calibration: Calibration | Literal["uncalibrated"] = "uncalibrated"
    tags: tuple[str, ...] = ()
    provenance: Provenance = Field(default_factory=Provenance)
    trust_remote_code: bool = False
    max_retries: Annotated[int, between(0, 100)] = 3

    @field_validator("model_name")
    @classmethod
    def _check_model_name(cls, value: str) -> str:
        if not _MODEL_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is no model id or folder (empty, blanks, or a leading -)")
        return value

    @field_validator("server_args", mode="before")
    @classmethod
    def _read_server_args(cls, value: Any) -> tuple[str, ...]:
        return expand_config_file(parse_server_args(value))

    @field_validator("env", mode="before")
    @classmethod
    def _read_env(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for name, text in value.items():
                if not _ENV_NAME.fullmatch(str(name)):
                    raise ValueError(f"{name!r} is not the name of an environment variable")
                if isinstance(text, str) and "\0" in text:
                    raise ValueError(f"the value of {name} holds a NUL character")
        return {} if value is None else value

    @field_validator("tags", "startup_rpc_checks", mode="before")
    @classmethod
    def _read_names(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("tags", "startup_rpc_checks")
    @classmethod
    def _check_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name or value.count(name) > 1:
                raise ValueError(f"{name!r} is given twice" if name else "holds an empty name")
        return value

    @field_validator("gate", "expect_backend", mode="before")
    @classmethod
    def _read_name_or_mapping(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("provenance", mode="before")
    @classmethod
    def _read_provenance(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("engine", "task", "evaluator")
    @classmethod
    def _check_known(cls, value: str, info: ValidationInfo) -> str:
        names.check_known(str(info.field_name), value)
        return value

    @property
    def effective_floor(self) -> float:
        """The lowest accuracy that passes the `threshold` gate."""
        return self.accuracy_threshold - self.tolerance

    @property
    def absent_limit_s(self) -> float:
        """Seconds in which nothing may listen at an external server's address."""
        limit_s = self.startup_max_wait_seconds
        is_asked_for = "startup_max_wait_seconds" in self.model_fields_set
        return limit_s if is_asked_for else min(limit_s, ABSENT_GRACE_S)

    @property
    def sampling(self) -> dict[str, float]:
        """What every request carries besides its prompt and the task's stop strings."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}

    @property
    def has_remote_code(self) -> bool:
        """Whether the file trusts the model's own Python code, by key or by flag."""
        return self.trust_remote_code or has_switch(self.server_args, TRUST_FLAGS)

    def timeout_for(self, vendor: str) -> float:
        """Seconds a request may take on a pool of `vendor`."""
        if vendor == "amd" and self.rocm_request_timeout_seconds is not None:
            return self.rocm_request_timeout_seconds
        return self.request_timeout_seconds


@dataclass(frozen=True)
class LoadedConfig:
    """One file as read.

    Attributes:
        path: The file.
        config: None where there is any error.
        problems: Errors, warnings and notes, in file order.
        sources: Top-level key -> "file:line", "command line" or "default".
        lines: Top-level key -> line of the file, for keys that the file gives.
    """

    path: Path
    config: EvalConfig | None
    problems: list[Problem]
    sources: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def has_errors(self) -> bool:
        """Whether the file may not be run."""
        return any(problem.severity == "error" for problem in self.problems)


def read_config(
    path: Path, overrides: Mapping[str, Any] | None = None, display: str = ""
) -> LoadedConfig:
    """Read and check one YAML file; faults are returned, never raised.

    Args:
        path: The file.
        overrides: Top-level keys set on the command line; they win over the file.
        display: How messages name the file.
    """
    from evalsuite import config_checks

    document = load_document(path, display)
    problems = list(document.problems)
    overrides = dict(overrides or {})
    if not isinstance(document.value, dict):
        kinds = {list: "a list", type(None): "nothing"}
        if not problems:
            kind = kinds.get(type(document.value), "a single value")
            message = f"holds {kind}; a config is `key: value` lines"
            problems.append(Problem("error", message, document.file, 1))
        return LoadedConfig(path, None, problems)
    problems += config_checks.check_keys(document)
    values = {
        key: value
        for key, value in document.value.items()
        if key in EvalConfig.model_fields and not _holds_unreadable(value)
    }
    config, faults = _validate({**values, **overrides}, document)
    problems += faults
    if config is not None:
        problems += config_checks.check_meaning(config, document)
    problems.sort(key=lambda problem: problem.line)
    has_errors = any(problem.severity == "error" for problem in problems)
    lines = {key: document.line((key,)) for key in values}
    sources = {key: f"{document.file}:{line}" for key, line in lines.items()}
    sources |= dict.fromkeys(overrides, "command line")
    sources = {key: sources.get(key, "default") for key in EvalConfig.model_fields}
    return LoadedConfig(path, None if has_errors else config, problems, sources, lines)


def load_config(path: Path) -> EvalConfig:
    """Read and check one YAML file.

    Raises:
        ConfigError: With every problem of the file.
    """
    loaded = read_config(path)
    if loaded.config is None:
        raise ConfigError([problem for problem in loaded.problems if problem.severity == "error"])
    return loaded.config


def _holds_unreadable(value: Any) -> bool:
    """Whether a refused value is anywhere inside; its fault is reported already."""
    if isinstance(value, dict):
        return any(_holds_unreadable(item) for item in value.values())
    if isinstance(value, list):
        return any(_holds_unreadable(item) for item in value)
    return value is UNREADABLE


def _validate(
    values: dict[str, Any], document: Document
) -> tuple[EvalConfig | None, list[Problem]]:
    """Run the model over the values; faults come back with file, line and key."""
    from evalsuite import config_checks, config_faults

    try:
        return EvalConfig.model_validate(values), []
    except ValidationError as error:
        refused = {key for key, value in document.value.items() if _holds_unreadable(value)}
        # A misspelt key is one fault, not an unknown key and a missing one.
        refused |= config_checks.meant_keys(document.value)
        faults = [
            fault
            for fault in error.errors()
            if not config_faults.is_noise_of_union(fault)
            and not (fault["type"] == "missing" and fault["loc"][0] in refused)
        ]
        return None, config_faults.describe_all(faults, document)
