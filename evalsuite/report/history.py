"""Accuracies of earlier runs, read from their own records: a cache that is never stale.

Receives the folder that holds run folders; returns per job (run, accuracy) for the trend plot, and
the run to compare a failed job with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evalsuite.errors import ConfigError
from evalsuite.report.json_report import read
from evalsuite.verdict import Status, Verdict

# Runs read for a trend; older ones are left out.
MAX_RUNS = 30


def load_history(results: Path, run_id: str) -> Mapping[str, Sequence[tuple[str, float]]]:
    """Read the accuracies of the runs beside `run_id`, oldest first."""
    found: dict[str, list[tuple[str, float]]] = {}
    for name, verdicts in _runs_beside(results, run_id):
        for verdict in verdicts:
            if verdict.accuracy is not None:
                found.setdefault(verdict.job_id, []).append((name, verdict.accuracy))
    return found


def last_pass(results: Path, run_id: str, failed: Verdict) -> str:
    """The newest run beside `run_id` in which a job passed on the same prompts, "" for none."""
    if failed.result is None:
        return ""
    names = [
        name
        for name, verdicts in _runs_beside(results, run_id)
        for v in verdicts
        if (v.job_id, v.status) == (failed.job_id, Status.PASS)
        and v.result is not None
        and v.result.prompt_hash == failed.result.prompt_hash
    ]
    return names[-1] if names else ""


def _runs_beside(results: Path, run_id: str) -> Iterator[tuple[str, list[Verdict]]]:
    """Names and verdicts of the other runs, oldest first.

    A folder that holds no readable run is passed over: it is not this run's business.
    """
    runs = sorted(
        (path.parent for path in results.glob("*/results.json") if path.parent.name != run_id),
        key=lambda folder: (folder / "results.json").stat().st_mtime,
    )
    for folder in runs[-MAX_RUNS:]:
        try:
            yield folder.name, read(folder)
        except (ConfigError, TypeError, KeyError, ValueError):
            continue
