"""`GateOutcome`: what every gate returns, with the error rates it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field

from evalsuite.verdict import Status


@dataclass(frozen=True)
class GateOutcome:
    """Decision of one gate.

    Attributes:
        status: PASS, FAIL, INCONCLUSIVE, or ERROR where missing answers decide.
        reason: One sentence with the numbers.
        alpha: Rate at which the gate fails a build that has not changed.
        power: Rate at which it fails a build that lost `detectable_drop`.
        detectable_drop: Smallest true drop seen at `power`, as a fraction.
        p_value: None where the gate makes no test.
        detail: Further numbers for the reports.
        is_config_fault: An ERROR that no retry mends: the baseline does not fit.
    """

    status: Status
    reason: str
    alpha: float | None = None
    power: float | None = None
    detectable_drop: float | None = None
    p_value: float | None = None
    detail: dict[str, object] = field(default_factory=dict)
    is_config_fault: bool = False


@dataclass(frozen=True)
class Counts:
    """Right and missing answers of the run that gates.

    Attributes:
        num_right: Right under the gating metric.
        num_failed: Questions without an answer after all retries.
        n: Questions asked.
    """

    num_right: int
    num_failed: int
    n: int
