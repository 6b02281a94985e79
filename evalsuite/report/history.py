"""Accuracies of earlier runs, read from their own records: a cache that is never stale.

Receives the folder that holds run folders, returns per job (run, accuracy) for the trend plot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evalsuite.errors import ConfigError
from evalsuite.report.json_report import read

# Runs read for a trend; older ones are left out.
MAX_RUNS = 30


def load_history(results: Path, run_id: str) -> Mapping[str, Sequence[tuple[str, float]]]:
    """Read the accuracies of the runs beside `run_id`, oldest first.

    A folder that holds no readable run is passed over: it is not this run's business.
    """
    found: dict[str, list[tuple[str, float]]] = {}
    runs = sorted(
        (path.parent for path in results.glob("*/results.json") if path.parent.name != run_id),
        key=lambda folder: (folder / "results.json").stat().st_mtime,
    )
    for folder in runs[-MAX_RUNS:]:
        try:
            verdicts = read(folder)
        except (ConfigError, TypeError, KeyError, ValueError):
            continue
        for verdict in verdicts:
            if verdict.accuracy is not None:
                found.setdefault(verdict.job_id, []).append((folder.name, verdict.accuracy))
    return found
