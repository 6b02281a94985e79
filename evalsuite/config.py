"""One YAML file -> `EvalConfig`, frozen and checked.

Receives a path; returns the config with every default filled in, or raises `ConfigError`
with all problems of the file (file, line, key path, value, closest valid name). Which files
are run is `lists.py`; what a config needs of a machine is `jobs.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

EngineName = str
GateName = Literal["threshold", "statistical", "paired", "equal"]
EvidenceLevel = Literal["declared", "logged", "executed"]


class ExpectBackend(BaseModel):
    """The MoE backend a config was written for, and how strongly it must be shown.

    `level` orders as declared < logged < executed; see `evidence.py`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    level: EvidenceLevel = "logged"


class Gate(BaseModel):
    """How the score becomes PASS or FAIL. A bare string in YAML is the `name`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: GateName = "threshold"
    alpha: float = 0.05
    power: float = 0.8
    max_repeats: int = 1
    max_drop: float | None = None


class Calibration(BaseModel):
    """Noise of this configuration as `evalsuite calibrate` measured it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sigma_run: float
    discordant: float
    repeats: int
    num_questions: int
    hardware: str = ""
    date: str = ""


class EvalConfig(BaseModel):
    """One job's settings. Keys and meanings: `docs/config.md`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # The field's keys.
    model_name: str
    accuracy_threshold: float
    num_questions: int
    num_fewshot: int
    server_args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    startup_max_wait_seconds: float = 1200.0
    tolerance: float = 0.08
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 42
    gen_prefix: str = ""
    use_chat_completions: bool = False
    max_concurrency: int | None = None
    request_timeout_seconds: float = 600.0
    rocm_request_timeout_seconds: float | None = None
    min_acceptance_length: float | None = None
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
    provenance: str = ""
    trust_remote_code: bool = False
    max_retries: int = 3

    @property
    def effective_floor(self) -> float:
        """The lowest accuracy that passes the `threshold` gate."""
        return self.accuracy_threshold - self.tolerance


def load_config(path: Path) -> EvalConfig:
    """Read and check one YAML file.

    Raises:
        ConfigError: With every problem of the file.
    """
    raise NotImplementedError
