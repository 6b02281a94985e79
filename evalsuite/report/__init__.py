"""Verdicts and ledgers -> files of one run folder, each format one module.

Receives the run folder, verdicts, ledgers and `RunMeta`; writes `results.json`,
`questions/<job>.jsonl`, `junit.xml`, `summary.md` and `report.html`. The terminal table is
`terminal.py`; what a verdict is, `verdict.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalsuite.flips import Flip
from evalsuite.ledger import LedgerRecord
from evalsuite.verdict import Verdict

Ledgers = Mapping[str, Sequence[LedgerRecord]]


@dataclass(frozen=True)
class RunMeta:
    """What the reports say of the run as a whole.

    Attributes:
        run_id: Name of the run folder.
        started_at: ISO 8601 time with zone.
        command: Command line that made the run.
        version: Version of this package.
        host: Host name, "" to leave it out.
        duration_s: Wall time of the whole run.
        history: Job id -> earlier (run id, accuracy), oldest first, for the trend plot.
        flips: Job id -> flips to show in place of the verdict's own (explained by a replay).
    """

    run_id: str = ""
    started_at: str = ""
    command: str = ""
    version: str = ""
    host: str = ""
    duration_s: float = 0.0
    history: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)
    flips: Mapping[str, Sequence[Flip]] = field(default_factory=dict)


def write_all(
    run_dir: Path, verdicts: Sequence[Verdict], ledgers: Ledgers, meta: RunMeta
) -> dict[str, Path]:
    """Write every report file of a run.

    Args:
        run_dir: Folder of the run; made if absent.
        verdicts: One per job, in the order of the run.
        ledgers: Job id -> its records; a job without records gets no file.
        meta: Facts of the whole run.

    Returns:
        Format name -> path of the file written ("questions" -> their folder).
    """
    from evalsuite.report import html, json_report, junit, markdown

    run_dir.mkdir(parents=True, exist_ok=True)
    return {
        "json": json_report.write(run_dir / "results.json", verdicts, meta),
        "questions": json_report.write_ledgers(run_dir / "questions", ledgers),
        "junit": junit.write(run_dir / "junit.xml", verdicts, meta, ledgers),
        "html": html.write(run_dir / "report.html", verdicts, ledgers, meta),
        "markdown": markdown.write(run_dir / "summary.md", verdicts, meta),
    }
