"""`results.json` and `questions/<job>.jsonl`: the record a run can be read back from.

Receives verdicts and ledgers, writes files; reads them back for `compare`, `rerun` and the
trend plot. Schema: `docs/verdicts.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalsuite.errors import ConfigError, Problem
from evalsuite.evaluators.base import EvalResult
from evalsuite.evidence import BackendEvidence
from evalsuite.files import file_stem, write_text
from evalsuite.ledger import LedgerRecord, encode
from evalsuite.verdict import Status, Verdict, exit_code

if TYPE_CHECKING:
    from evalsuite.report import Ledgers, RunMeta

SCHEMA = "evalsuite.results/1"


def verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    """Turn a verdict into JSON types; derived accuracy fields included."""
    data = asdict(verdict)
    data["status"] = verdict.status.value
    if verdict.result is not None:
        data["result"]["per_question"] = {
            str(index): list(outcomes)
            for index, outcomes in sorted(verdict.result.per_question.items())
        }
        data["result"]["accuracy"] = verdict.accuracy
    return data


def verdict_from_dict(data: Mapping[str, Any]) -> Verdict:
    """Invert `verdict_to_dict`."""
    fields = dict(data)
    result = fields.pop("result")
    if result is not None:
        # JSON knows lists only; `per_question` below is the one mapping that holds them.
        result = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in result.items()
            if key != "accuracy"
        }
        result["per_question"] = {
            int(index): tuple(outcomes) for index, outcomes in result["per_question"].items()
        }
        result = EvalResult(**result)
    evidence = dict(fields.pop("evidence"))
    evidence["ignored_switches"] = tuple(evidence["ignored_switches"])
    interval = fields.pop("interval")
    return Verdict(
        **{
            **fields,
            "status": Status(fields["status"]),
            "result": result,
            "evidence": BackendEvidence(**evidence),
            "interval": None if interval is None else (interval[0], interval[1]),
            "warnings": tuple(fields["warnings"]),
            "log_tail": tuple(fields["log_tail"]),
        }
    )


def write(path: Path, verdicts: Sequence[Verdict], meta: RunMeta) -> Path:
    """Write `results.json`; keys are sorted so that two runs can be diffed."""
    counts = {status.value: 0 for status in Status}
    for verdict in verdicts:
        counts[verdict.status.value] += 1
    data = {
        "schema": SCHEMA,
        "run": {
            "id": meta.run_id,
            "started_at": meta.started_at,
            "command": meta.command,
            "version": meta.version,
            "host": meta.host,
            "duration_s": meta.duration_s,
        },
        "exit_code": exit_code(list(verdicts)),
        "counts": counts,
        "verdicts": [verdict_to_dict(verdict) for verdict in verdicts],
    }
    return write_text(path, json.dumps(data, indent=1, sort_keys=True, default=str) + "\n")


def read(run_dir: Path) -> list[Verdict]:
    """Read a run's verdicts back.

    Raises:
        ConfigError: No `results.json` there, a damaged one, or one of another schema.
    """
    path = run_dir / "results.json"
    if not path.is_file():
        raise ConfigError(f"{run_dir}: no results.json here; name the folder of a finished run")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(f"{path}: schema is {found!r}, this version reads {SCHEMA!r}")
    try:
        return [verdict_from_dict(item) for item in data["verdicts"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: {_not_ours(error)}") from error


def read_verdict(path: Path) -> Verdict:
    """Read one job's `verdict.json` back.

    Raises:
        ConfigError: The file is damaged, or of a version that wrote something else.
    """
    try:
        return verdict_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: {_not_ours(error)}; delete it to run the job again") from error


def _not_ours(error: Exception) -> str:
    return f"not a verdict as this version writes it ({type(error).__name__}: {error})"


def ledger_name(job_id: str) -> str:
    """File name of a job's questions, below `questions/`."""
    return file_stem(job_id) + ".jsonl"


def write_ledgers(folder: Path, ledgers: Ledgers) -> Path:
    """Write one JSONL per job, ordered by repeat and question."""
    folder.mkdir(parents=True, exist_ok=True)
    for job_id, records in ledgers.items():
        if not records:
            continue
        ordered = sorted(records, key=lambda record: (record.repeat, record.index))
        text = b"".join(encode(record) for record in ordered).decode("ascii")
        write_text(folder / ledger_name(job_id), text)
    return folder


def read_questions(path: Path) -> list[LedgerRecord]:
    """Read one job's questions back; a running ledger's head line is passed over.

    Raises:
        ConfigError: A line that is no record, with its number.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            data = json.loads(line)
            if "ledger" in data:
                continue
            for key in ("retry_errors", "token_logprobs"):
                data[key] = tuple(data.get(key, ()))
            records.append(LedgerRecord(**data))
        except (ValueError, TypeError) as error:
            message = f"not a ledger record: {error}"
            raise ConfigError(Problem("error", message, file=str(path), line=number)) from error
    return records
