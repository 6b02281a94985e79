"""`--shard i/n`: which jobs this machine runs, longest first from recorded durations.

Receives jobs and a file of durations in seconds by job id; returns this shard's jobs in their
old order. The split depends on nothing but its arguments, so every machine computes the same,
and the shards together are all jobs, each once.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalsuite.errors import ConfigError, Problem
from evalsuite.jobs import EvalJob


@dataclass(frozen=True)
class Shard:
    """The i-th of n parts, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """Read `i/n`.

    Raises:
        ConfigError: Not of that form, or i outside 1 to n.
    """
    match = re.fullmatch(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*", text)
    if match is None:
        raise ConfigError(f"--shard {text!r} is not of the form i/n, such as 1/4")
    index, count = int(match.group(1)), int(match.group(2))
    if count < 1 or not 1 <= index <= count:
        raise ConfigError(f"--shard {text!r}: shards are counted from 1 to n, such as 1/4 to 4/4")
    return Shard(index, count)


def read_durations(path: Path) -> tuple[dict[str, float], list[Problem]]:
    """Seconds by job id; what cannot be meant is left out, with a warning each.

    Args:
        path: A JSON object {"<job id>": seconds, ...}.
    """

    def warn(message: str, key: str = "") -> Problem:
        return Problem("warning", message, str(path), key=key)

    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}, [warn("no durations recorded yet; every job counts the same")]
    except (OSError, ValueError, RecursionError) as error:
        return {}, [warn(f"durations ignored, the file cannot be read: {error}")]
    if not isinstance(values, dict):
        return {}, [warn('durations ignored; the file must hold {"<job id>": seconds}')]
    durations, problems = {}, []
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value < 1e9 and math.isfinite(value):
            durations[name] = float(value)
        else:
            problems.append(warn(f"duration {value!r} ignored; seconds are meant", name))
    return durations, problems


def record_durations(path: Path, measured: Mapping[str, float]) -> None:
    """Add measured seconds to the file of durations; a file of nonsense is replaced."""
    durations, _ = read_durations(path)
    durations.update({name: round(seconds, 1) for name, seconds in measured.items()})
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(durations, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


def unknown_durations(ids: Sequence[str], durations: Mapping[str, float]) -> list[Problem]:
    """One note about recorded names that are no job of this selection."""
    unknown = sorted(set(durations) - set(ids))
    if not unknown:
        return []
    shown = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
    return [Problem("note", f"{len(unknown)} recorded durations are of no job here: {shown}")]


def launch_keys(jobs: Sequence[EvalJob]) -> dict[str, str]:
    """Job id -> what its server is started with; equal keys share one start.

    Read from the config alone, so that a machine without the engine computes the same.
    """
    keys = ("engine", "model_name", "server_args", "env", "trust_remote_code")
    return {
        job.id: json.dumps([job.config.model_dump(include=set(keys)), job.pool and job.pool.name])
        for job in jobs
    }


def split(
    ids: Sequence[str],
    durations: Mapping[str, float],
    count: int,
    launches: Mapping[str, str] | None = None,
) -> list[list[str]]:
    """Partition ids into `count` shards, longest first onto the shard with the least so far.

    Jobs with the same launch stay together, so that their server is started once, unless they
    take longer than a shard's fair share: then they are dealt out one by one, because a longer
    run costs more than a second start. A job without a recorded duration counts as the median of
    the others, so that new jobs spread evenly. Ties go by id and by shard number, so that the
    split is the same everywhere.

    Args:
        ids: Job ids.
        durations: Seconds by job id.
        count: Shards.
        launches: Job id -> key of its launch; a job without one stands alone.
    """
    known = [durations[name] for name in ids if name in durations]
    usual = statistics.median(known) if known else 1.0
    # A recorded zero still takes a place: otherwise all of them would land on one shard.
    seconds = {name: max(durations.get(name, usual), 1e-3) for name in ids}
    together: dict[str, list[str]] = {}
    for name in sorted(seconds):
        together.setdefault((launches or {}).get(name, name), []).append(name)
    # With a shard for every job nothing is gained by an empty one.
    fair = sum(seconds.values()) / count if count < len(seconds) else 0.0
    units: list[list[str]] = []
    for names in together.values():
        is_short = sum(seconds[name] for name in names) <= fair
        units += [names] if is_short else [[name] for name in names]
    loads = [0.0] * count
    shard_of = {}
    lengths = [(sum(seconds[name] for name in names), names) for names in units]
    for length, names in sorted(lengths, key=lambda unit: (-unit[0], unit[1])):
        lightest = min(range(count), key=lambda index: (loads[index], index))
        loads[lightest] += length
        shard_of.update(dict.fromkeys(names, lightest))
    return [[name for name in ids if shard_of[name] == index] for index in range(count)]


def take(jobs: Sequence[EvalJob], durations: Mapping[str, float], shard: Shard) -> list[EvalJob]:
    """This shard's jobs, in their old order; may be none where there are fewer jobs than shards."""
    parts = split([job.id for job in jobs], durations, shard.count, launch_keys(jobs))
    mine = set(parts[shard.index - 1])
    return [job for job in jobs if job.id in mine]
