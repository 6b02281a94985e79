"""A diff -> the jobs that it can have changed, each with the reason.

Receives changed paths (from git, or a list) and the planned jobs; returns `Choice`s. A diff
that cannot be had selects every job: not knowing is no reason to test nothing.
"""

from __future__ import annotations

import subprocess
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalsuite.ci.plan import Planned
from evalsuite.ci.templates import output_path, providers
from evalsuite.jobs import EvalJob

# Paths of this repository that any job's outcome hangs on; a leading ! takes a part out again.
COMMON = (
    "evalsuite",
    "!evalsuite/report",
    "!evalsuite/ci",
    "ci/providers",
    "pyproject.toml",
    "constraints.txt",
)
# The same for jobs of one engine: the server of this repository is no part of the others.
OF_ENGINE = {"moeserve": ("kernels",)}
_GIT_TIMEOUT_S = 60.0


class DiffError(Exception):
    """What changed cannot be told."""


@dataclass(frozen=True)
class Choice:
    """One job, and why it is run or not.

    Attributes:
        job: The job.
        pool: Name of its pool.
        config: The `--config` value that holds it.
        reason: What selects it, "" where nothing does.
    """

    job: EvalJob
    pool: str
    config: str
    reason: str

    @property
    def is_selected(self) -> bool:
        """Whether it is to be run."""
        return bool(self.reason)


def changed_paths(base: str, head: str = "HEAD", folder: Path | None = None) -> list[str]:
    """Paths that differ between the merge base of two commits and the second.

    A rename is reported as both its names, so that one out of a watched folder counts.

    Args:
        base: Commit that the change goes into.
        head: The change.
        folder: Anywhere in the repository.

    Returns:
        Paths relative to the repository's root, as git has them.

    Raises:
        DiffError: No git, no such commit, or no common ancestor (a shallow clone).
    """
    if not base or not head:
        raise DiffError(f"the {'head' if base else 'base'} is empty")
    argv = [
        "diff",
        "--name-only",
        "--no-renames",
        "-z",
        "--end-of-options",
        f"{base}...{head}",
        "--",
    ]
    names = _git(argv, folder)
    # Bytes that are no UTF-8 stay what they are, so that they match the name on disk.
    return [name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name]


def repository_root(folder: Path | None = None) -> Path:
    """The folder that git's paths are relative to.

    Raises:
        DiffError: Not in a repository.
    """
    return Path(_git(["rev-parse", "--show-toplevel"], folder).decode().rstrip("\n")).resolve()


def _git(argv: Sequence[str], folder: Path | None) -> bytes:
    command = ["git", *(["-C", str(folder)] if folder else []), *argv]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise DiffError(f"git cannot be asked: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DiffError(lines[0] if lines else f"git exits with {done.returncode}")
    return done.stdout


def matches(path: str, rules: Iterable[str]) -> bool:
    """Whether a path is one of the rules, or lies below one; `!rule` takes it out again.

    Whole names count: `vllm2/x` is not below `vllm`.
    """
    is_in = False
    for rule in rules:
        name = rule.removeprefix("!").strip("/")
        if path == name or path.startswith(f"{name}/"):
            is_in = not rule.startswith("!")
    return is_in


def select(
    planned: Sequence[Planned], changed: Collection[str], top: Path, watch: Sequence[str] = ()
) -> list[Choice]:
    """Find the jobs that a change can have an effect on.

    Args:
        planned: What there is.
        changed: Paths relative to `top`, the old and the new name of what was renamed.
        top: The repository's root.
        watch: More paths that every job hangs on, such as the engine's sources.
    """
    by_form = {_form(path): path for path in changed}
    common = (*COMMON, *map(_form, watch), *_pipeline_files())
    choices = []
    for part in planned:
        for job in part.jobs:
            files = (
                (job.path, "its YAML"),
                (part.lists[job.id], "its list"),
                (part.hardware, "the file of pools"),
            )
            rules = [*common, *OF_ENGINE.get(job.config.engine, ())]
            if job.config.baseline:
                rules.append("baselines")
            reason = _named(by_form, top, files) or _watched(by_form, rules)
            choices.append(Choice(job, part.pool.name, part.value, reason))
    return choices


def select_all(planned: Sequence[Planned], reason: str) -> list[Choice]:
    """Every job, for the one reason."""
    return [
        Choice(job, part.pool.name, part.value, reason) for part in planned for job in part.jobs
    ]


def _pipeline_files() -> list[str]:
    """What runs GPU jobs: who changes how jobs are run wants to see them run."""
    return [
        output_path(provider, pipeline)
        for provider in providers()
        for pipeline in ("nightly", "changes")
    ]


def _named(by_form: dict[str, str], top: Path, files: Iterable[tuple[Path, str]]) -> str:
    for path, what in files:
        full = path.resolve()
        if full.is_relative_to(top):
            form = _form(full.relative_to(top).as_posix())
            if form in by_form:
                return f"{what} changed: {shown(by_form[form])}"
    return ""


def _watched(by_form: dict[str, str], rules: Sequence[str]) -> str:
    found = sorted(path for form, path in by_form.items() if matches(form, rules))
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"what it runs on changed: {shown(found[0])}{more}"


def _form(path: str) -> str:
    """One spelling of accented letters, whichever way the file system writes them."""
    return unicodedata.normalize("NFC", path)


def shown(path: str) -> str:
    """A file name for a log: nothing in it ends a line or reaches the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in path
    )
