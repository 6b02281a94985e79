"""The types of an outcome: `Status`, `Verdict`, exit codes.

How a verdict is reached is `judge.py`; what is done with verdicts: `report/` writes them,
`plugin.py` and `cli.py` turn them into exit codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from evalsuite.evaluators.base import EvalResult
from evalsuite.evidence import BackendEvidence


class Status(StrEnum):
    """How a job ended. An ERROR is never a FAIL and never a PASS."""

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIP = "SKIP"


# Exit status of a run, worst first; pytest's own numbers are kept where it has one.
EXIT_OK = 0
EXIT_ACCURACY = 1
EXIT_INTERRUPTED = 2
EXIT_INTERNAL = 3
EXIT_USAGE = 4
EXIT_NOTHING_RAN = 5
EXIT_INFRASTRUCTURE = 75
EXIT_INCONCLUSIVE = 76


@dataclass(frozen=True)
class Verdict:
    """One job's outcome, complete enough to be reported and repeated.

    Attributes:
        job_id: `EvalJob.id`.
        status: PASS, FAIL, ERROR, INCONCLUSIVE or SKIP.
        reason: One sentence that says why, with the numbers.
        gate: Gate name.
        result: The counts, None where no evaluation took place.
        accuracy: Under the gating metric, None where it may not be used.
        interval: 95 % Wilson interval, None as above.
        threshold: From the config.
        tolerance: From the config.
        floor: threshold - tolerance.
        stderr: Binomial standard error of the accuracy, None as above.
        margin_se: (accuracy - floor) / stderr, None as above.
        detectable_drop: Smallest true drop this gate sees, at `power`.
        alpha: Stated false-alarm rate of the gate.
        power: Stated power.
        p_value: Of a paired or statistical gate, None otherwise.
        evidence: What is known of the backend.
        warnings: Things a reader must see beside the verdict.
        log_tail: Last lines of the server's log for an ERROR.
        reproduce: Command line that runs this job again.
        commit: Version-control revision of the code under test, "" if unknown.
        hardware: Accelerator or CPU name.
        engine: Engine name and version.
        duration_s: Whole job, server start included.
        startup_s: Server start to ready, 0 for a shared or external server.
        detail: Gate-specific numbers (discordant pairs, repeats, ...).
        is_config_fault: An ERROR that only a change of config, data or baseline can mend.
    """

    job_id: str
    status: Status
    reason: str
    gate: str = "threshold"
    result: EvalResult | None = None
    accuracy: float | None = None
    interval: tuple[float, float] | None = None
    threshold: float | None = None
    tolerance: float | None = None
    floor: float | None = None
    stderr: float | None = None
    margin_se: float | None = None
    detectable_drop: float | None = None
    alpha: float | None = None
    power: float | None = None
    p_value: float | None = None
    evidence: BackendEvidence = field(default_factory=BackendEvidence)
    warnings: tuple[str, ...] = ()
    log_tail: tuple[str, ...] = ()
    reproduce: str = ""
    commit: str = ""
    hardware: str = ""
    engine: str = ""
    duration_s: float = 0.0
    startup_s: float = 0.0
    detail: dict[str, object] = field(default_factory=dict)
    is_config_fault: bool = False


def exit_code(verdicts: list[Verdict], *, errors_first: bool = False) -> int:
    """Exit status of a run: FAIL beats ERROR beats INCONCLUSIVE; all SKIP is "nothing ran".

    An ERROR that is the user's to mend beats one of infrastructure: what 75 says, that the same
    run may succeed, would not be true of the whole.

    Args:
        verdicts: Of every job.
        errors_first: Let an ERROR beat a FAIL. For callers that forgive a FAIL: a crash beside
            it must not be forgiven with it.
    """
    statuses = {verdict.status for verdict in verdicts}
    if Status.FAIL in statuses and not (errors_first and Status.ERROR in statuses):
        return EXIT_ACCURACY
    if any(verdict.is_config_fault for verdict in verdicts):
        return EXIT_USAGE
    if Status.ERROR in statuses:
        return EXIT_INFRASTRUCTURE
    if Status.INCONCLUSIVE in statuses:
        return EXIT_INCONCLUSIVE
    return EXIT_OK if Status.PASS in statuses else EXIT_NOTHING_RAN
