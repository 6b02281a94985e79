"""Which checkpoint of a training run to ship, and how it leaves the machine that made it.

Receives the reports of `train`; ranks them and packs the best model folders as tar files.
"""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path

log = logging.getLogger("moeserve.tiny.train")

# Accuracy a shipped checkpoint must have, and what is aimed at: able to move both ways.
ACCURACY_RANGE = (0.90, 0.98)
ACCURACY_AIM = 0.95


def rank(reports: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the checkpoints, best first: inside the range and nearest to the aim."""
    low, high = ACCURACY_RANGE

    def key(report: dict[str, object]) -> tuple[bool, float]:
        accuracy = float(str(report["accuracy"]))
        return not low <= accuracy <= high, abs(accuracy - ACCURACY_AIM)

    return sorted(reports, key=key)


def export_best(
    run: Path, reports: list[dict[str, object]], out: Path, name: str, count: int
) -> list[Path]:
    """Pack the best checkpoints as `NAME-STEP.tar`, with the run's report beside them.

    Called after each evaluation, so that a run cut short leaves its best behind; the tar files of
    the call before are removed.

    Args:
        run: the folder that `train` wrote its checkpoints and `train_report.json` into.
        reports: what `train` returned.
        out: folder for the tar files; each holds one folder, `minigsm-tiny`.
        name: how the files are called.
        count: how many checkpoints to pack.
    """
    out.mkdir(parents=True, exist_ok=True)
    report = (run / "train_report.json").read_text(encoding="utf-8")
    (out / f"{name}-report.json").write_text(report, encoding="utf-8")
    for old in out.glob(f"{name}-*.tar"):
        old.unlink()
    packed = []
    for chosen in rank(reports)[:count]:
        path = out / f"{name}-{chosen['step']}.tar"
        with tarfile.open(path, "w") as archive:
            archive.add(run / str(chosen["folder"]), arcname="minigsm-tiny")
        log.info("packed step %s, accuracy %s, as %s", chosen["step"], chosen["accuracy"], path)
        packed.append(path)
    return packed
