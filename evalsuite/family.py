"""Many jobs, one false-alarm rate: Holm over the comparisons of a run.

Receives the verdicts of a run, returns them with failures withdrawn that the number of jobs
explains. What makes a single verdict is `judge.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evalsuite.stats.sequential import holm
from evalsuite.verdict import Status, Verdict


def hold_family_rate(verdicts: Sequence[Verdict], alpha: float | None = None) -> list[Verdict]:
    """Apply Holm's step-down over all paired verdicts.

    A paired FAIL whose adjusted p-value is above `alpha` becomes PASS with a remark; a FAIL by
    the floor, and every other gate, stays as it is.

    Args:
        verdicts: Of one run.
        alpha: Rate for the whole run; the largest of the jobs' own where None.
    """
    tested = [v for v in verdicts if v.gate == "paired" and v.p_value is not None]
    if len(tested) < 2:
        return list(verdicts)
    rate = alpha if alpha is not None else max(v.alpha or 0.0 for v in tested)
    # Each p-value is put on the scale of the run's rate: its own look may have had less to spend.
    scaled = [min(1.0, (v.p_value or 0.0) * rate / _level(v, rate)) for v in tested]
    adjusted = dict(zip((v.job_id for v in tested), holm(scaled), strict=True))
    return [
        _held(verdict, adjusted[verdict.job_id], rate, len(tested))
        if verdict.job_id in adjusted
        else verdict
        for verdict in verdicts
    ]


def _level(verdict: Verdict, rate: float) -> float:
    level = verdict.detail.get("level")
    return level if isinstance(level, float) and level > 0 else rate


def _held(verdict: Verdict, p_holm: float, rate: float, jobs: int) -> Verdict:
    detail = {**verdict.detail, "p_holm": p_holm, "family": jobs, "family_alpha": rate}
    if verdict.status is not Status.FAIL or p_holm <= rate or verdict.detail.get("below_floor"):
        return replace(verdict, detail=detail)
    return replace(
        verdict,
        status=Status.PASS,
        detail=detail,
        reason=f"{verdict.reason}; not among {jobs} jobs (Holm-adjusted p {p_holm:.4g} > {rate:g})",
        warnings=(
            *verdict.warnings,
            f"alone this job would have failed; one such p-value is expected among {jobs} jobs",
        ),
    )
