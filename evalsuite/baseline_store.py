"""Where baselines lie, which one is approved, and how two of them differ.

A job's folder below `baselines/` holds content-addressed files and `approved.json`, which names
the current one, the one before it, and a pinned anchor: a run is compared with the current one
and with the anchor, so that many small accepted losses cannot add up unseen. What a baseline
is, is `baseline.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from evalsuite.baseline import Baseline, BaselinePair, differences, digest, parse, render
from evalsuite.errors import ConfigError
from evalsuite.files import file_stem, write_text
from evalsuite.stats.paired import repeats_test

APPROVED = "approved.json"


@dataclass(frozen=True)
class Approved:
    """Which files of a job's folder count; each is a digest, "" where there is none.

    Attributes:
        current: What runs are compared with.
        previous: The one before it.
        anchor: Pinned; moves only when asked to.
    """

    current: str = ""
    previous: str = ""
    anchor: str = ""


def job_folder(root: Path, job_id: str) -> Path:
    """Folder of a job's baselines."""
    return root / file_stem(job_id)


def save(root: Path, job_id: str, baseline: Baseline) -> Path:
    """Write a baseline under its digest; it counts only once approved."""
    path = job_folder(root, job_id) / f"{digest(baseline)}.json"
    return write_text(path, render(baseline))


def load(path: Path) -> Baseline:
    """Read one file and check that its content still has the digest in its name.

    Raises:
        ConfigError: Missing, unreadable, or edited by hand.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such baseline; `evalsuite baseline save JOB` makes one")
    baseline = parse(path.read_text(encoding="utf-8"), str(path))
    if re.fullmatch(r"[0-9a-f]{64}", path.stem) and digest(baseline) != path.stem:
        raise ConfigError(
            f"{path}: the content has digest {digest(baseline)[:12]}…, not the one in its name; "
            "the file was changed after it was made"
        )
    return baseline


def read_approved(folder: Path) -> Approved:
    """Read `approved.json`; all "" where there is none.

    Raises:
        ConfigError: Not of this form.
    """
    path = folder / APPROVED
    if not path.is_file():
        return Approved()
    try:
        return Approved(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: needs current, previous and anchor: {error}") from error


def find(folder: Path, name: str) -> Path:
    """Path of the baseline whose digest begins with `name`.

    Raises:
        ConfigError: None or several do.
    """
    found = sorted(path for path in folder.glob("*.json") if path.stem.startswith(name.lower()))
    found = [path for path in found if path.name != APPROVED]
    if len(found) != 1:
        known = ", ".join(sorted(p.stem[:12] for p in folder.glob("*.json") if p.name != APPROVED))
        raise ConfigError(
            f"{folder}: {len(found)} baselines begin with {name!r}; known: {known or 'none'}"
        )
    return found[0]


def approve(folder: Path, name: str, *, move_anchor: bool = False) -> Approved:
    """Make a saved baseline the current one; the first one approved becomes the anchor."""
    path = find(folder, name)
    load(path)
    before = read_approved(folder)
    if before.current == path.stem and not move_anchor:
        return before
    after = Approved(
        current=path.stem,
        previous=before.current if before.current != path.stem else before.previous,
        anchor=path.stem if move_anchor or not before.anchor else before.anchor,
    )
    write_text(folder / APPROVED, json.dumps(asdict(after), indent=1, sort_keys=True) + "\n")
    return after


def resolve(reference: str | None, job_id: str, root: Path) -> BaselinePair:
    """Find what a job is compared with.

    Args:
        reference: The config's `baseline`: a file, a folder with `approved.json`, or None for
            the job's own folder below `root`.
        job_id: `EvalJob.id`.
        root: The `baselines/` folder.

    Raises:
        ConfigError: Nothing approved there.
    """
    path = Path(reference) if reference else job_folder(root, job_id)
    if reference and not path.exists() and (root / reference).exists():
        path = root / reference
    if path.suffix == ".json":
        return BaselinePair(load(path))
    approved = read_approved(path)
    if not approved.current:
        raise ConfigError(
            f"{path}: no approved baseline; `evalsuite baseline save {job_id}` and "
            f"`evalsuite baseline approve {job_id}` make one"
        )
    current = load(path / f"{approved.current}.json")
    if approved.anchor in ("", approved.current):
        return BaselinePair(current)
    return BaselinePair(current, load(path / f"{approved.anchor}.json"))


def describe(baseline: Baseline) -> str:
    """Several lines for `baseline show`."""
    identity = baseline.identity
    sampling = ", ".join(f"{key} {value}" for key, value in sorted(identity.sampling.items()))
    with_logprobs = sum(bool(answer.logprobs) for answer in baseline.answers.values())
    return "\n".join(
        [
            f"digest      {digest(baseline)}",
            f"model       {identity.model_name} revision {identity.model_revision or 'unknown'}",
            f"task        {identity.task} ({identity.profile}), metric {identity.metric}",
            f"prompts     {identity.prompt_hash}, {identity.num_questions} questions",
            f"sampling    {sampling}",
            f"made by     {identity.evaluator}, {baseline.engine or 'unknown engine'}, "
            f"{baseline.hardware or 'unknown hardware'}, commit {baseline.commit or 'unknown'}",
            f"accuracy    {baseline.accuracy:.4f} over {baseline.repeats} repeat(s)",
            f"logprobs    {with_logprobs} of {len(baseline.answers)} answers",
        ]
    )


def describe_diff(old: Baseline, new: Baseline) -> str:
    """Several lines for `baseline diff`: what differs, which questions flipped, the test."""
    lines = [f"not comparable: {text}" for text in differences(old.identity, new.identity)]
    for name in ("engine", "hardware", "commit"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            lines.append(f"{name}: {before or 'unknown'} -> {after or 'unknown'}")
    if old.identity.prompt_hash != new.identity.prompt_hash:
        return "\n".join(lines)
    test = repeats_test(old.outcomes, new.outcomes)
    changed = sum(
        answer.text_sha256 != new.answers[index].text_sha256
        for index, answer in old.answers.items()
        if index in new.answers
    )
    lines += [
        f"accuracy {old.accuracy:.4f} -> {new.accuracy:.4f} (drop {100 * test.drop:+.2f} points, "
        f"standard error {100 * test.stderr:.2f}, one-sided p {test.p_value:.4f})",
        f"{changed} of {len(old.answers)} replies changed",
    ]
    for index, answer in sorted(old.answers.items()):
        other = new.answers.get(index)
        if other is not None and _mean(answer.outcomes) != _mean(other.outcomes):
            lines.append(
                f"question {index}: {_mean(answer.outcomes):.2f} -> {_mean(other.outcomes):.2f}"
            )
    return "\n".join(lines)


def _mean(outcomes: tuple[bool | None, ...]) -> float:
    known = [x for x in outcomes if x is not None]
    return sum(known) / len(known) if known else 0.0
