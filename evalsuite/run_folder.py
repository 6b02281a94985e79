"""The folder of one run: what was asked for, what is on disk already, the reports at the end.

    results/<run>/run.json              the selection, for --resume and rerun
    results/<run>/jobs/<job>/           ledger.jsonl, verdict.json
    results/<run>/servers/001.log       one per server started
    results/<run>/results.json, junit.xml, summary.md, questions/<job>.jsonl

Receives verdicts as they come, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import secrets
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalsuite import __version__
from evalsuite.errors import ConfigError
from evalsuite.files import file_stem, write_text
from evalsuite.ledger import LedgerRecord, read_ledger
from evalsuite.report import RunMeta, write_all
from evalsuite.report.history import last_pass, load_history
from evalsuite.report.json_report import read_verdict, verdict_to_dict
from evalsuite.verdict import Status, Verdict

# A job with one of these need not run again when its run is resumed.
_DECIDED = frozenset({Status.PASS, Status.FAIL, Status.INCONCLUSIVE})


@dataclass(frozen=True)
class RunFolder:
    """See the module's text.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def servers(self) -> Path:
        """Where server logs go."""
        return self.path / "servers"

    def job(self, job_id: str) -> Path:
        """Folder of one job."""
        return self.path / "jobs" / file_stem(job_id)

    def ledger(self, job_id: str) -> Path:
        """Ledger of one job."""
        return self.job(job_id) / "ledger.jsonl"

    @property
    def is_begun(self) -> bool:
        """Whether it is written down what the run was asked for."""
        return (self.path / "run.json").is_file()

    def how_to_go_on(self) -> str:
        """The line that ends an interrupted run."""
        command = shlex.join(["evalsuite", "run", "--resume", str(self.path)])
        return f"interrupted; go on with: {command}"

    def comparisons(self, verdicts: Sequence[Verdict]) -> list[str]:
        """How to see what changed for jobs that failed here and passed in a run beside it."""
        results, name = self.path.parent, self.path.name
        passed = [last_pass(results, name, v) for v in verdicts if v.status is Status.FAIL]
        return [
            "what changed since it passed: "
            + shlex.join(["evalsuite", "compare", str(results / other), str(self.path)])
            for other in dict.fromkeys(filter(None, passed))
        ]

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Write down what is asked for, before anything starts."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.is_begun:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            data = {"started_at": now, "version": __version__, "asked": dict(asked)}
            write_text(self.path / "run.json", json.dumps(data, indent=1) + "\n")

    @contextlib.contextmanager
    def held(self, *, is_shared: bool = False) -> Iterator[None]:
        """Keep other runs out of a folder that has begun; the system lets go of it at any end.

        Args:
            is_shared: Whether other shared holders may be there: workers of one run.

        Raises:
            ConfigError: Another run is writing there.
        """
        with (self.path / "run.json").open("rb") as file:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                reason = "another run is writing there; wait for its end, or end it"
                raise ConfigError(f"{self.path}: {reason}") from error
            except OSError:
                pass  # a file system that has no locks: then nobody can be kept out
            yield

    def check_writable(self) -> None:
        """Find out, before anything starts, that reports can be written.

        Raises:
            ConfigError: No folder can be made there.
        """
        place = self.path.absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        # Asked of the system, not of the mode bits: a mount may be read-only for everybody.
        if not place.is_dir():
            reason = f"{place} is no folder"
        elif not os.access(place, os.W_OK | os.X_OK):
            reason = f"{place} cannot be written"
        else:
            return
        raise ConfigError(f"{self.path.parent}: {reason}; name another folder by --results")

    def asked(self) -> dict[str, Any]:
        """What the run was asked for.

        Raises:
            ConfigError: No run folder.
        """
        return dict(self._read_run()["asked"])

    def keep(self, verdict: Verdict) -> str:
        """Write one job's verdict.

        Returns:
            What to say where the disk refuses it, "" usually; the verdict stands all the same.
        """
        text = json.dumps(verdict_to_dict(verdict), indent=1, default=str) + "\n"
        try:
            write_text(self.job(verdict.job_id) / "verdict.json", text)
        except OSError as error:
            return f"{verdict.job_id}: its verdict.json cannot be written: {error}"
        return ""

    def kept(self, job_id: str) -> Verdict | None:
        """The job's verdict where it is decided, None where it has to run (again).

        Raises:
            ConfigError: The file is damaged.
        """
        path = self.job(job_id) / "verdict.json"
        if not path.is_file():
            return None
        verdict = read_verdict(path)
        return verdict if verdict.status in _DECIDED else None

    def records(self, job_id: str) -> list[LedgerRecord]:
        """The job's ledger, [] where nothing was asked."""
        path = self.ledger(job_id)
        return read_ledger(path) if path.is_file() else []

    def finish(self, verdicts: Sequence[Verdict], command: str, duration_s: float) -> None:
        """Write every report."""
        run = self._read_run()
        meta = RunMeta(
            run_id=self.path.name,
            started_at=str(run.get("started_at", "")),
            command=command,
            version=__version__,
            host=socket.gethostname(),
            duration_s=duration_s,
            history=load_history(self.path.parent, self.path.name),
        )
        ledgers = {verdict.job_id: self.records(verdict.job_id) for verdict in verdicts}
        write_all(self.path, verdicts, ledgers, meta)

    def _read_run(self) -> dict[str, Any]:
        path = self.path / "run.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: not the folder of a run: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("asked"), dict):
            raise ConfigError(f"{path}: not what this version writes")
        return data


def new_folder(results: Path) -> RunFolder:
    """A folder that no other run has: time, and a few random digits."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return RunFolder(results / f"{now}-{secrets.token_hex(2)}")
