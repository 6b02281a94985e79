"""Entry functions of `evalsuite compare` and `replay`.

Receives parsed options from `cli.py`, prints, returns an exit code. The logic is in `compare.py`
and `replay.py`; servers come from `warm.py`. `baseline` is `cli_baseline.py`, `calibrate`
`cli_calibrate.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from evalsuite import baseline_store, compare, near_ties, replay
from evalsuite.baseline import Baseline, digest
from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError
from evalsuite.evaluators.base import EvalResult
from evalsuite.files import write_text
from evalsuite.flips import flips_from_baseline
from evalsuite.jobs import EvalJob
from evalsuite.ledger import LedgerRecord
from evalsuite.replay_client import Scored, score
from evalsuite.report.comparison import print_comparison, render_html, render_markdown
from evalsuite.report.json_report import ledger_name, read, read_questions
from evalsuite.report.text import visible
from evalsuite.run_options import RunOptions
from evalsuite.verdict import EXIT_ACCURACY, EXIT_INFRASTRUCTURE, EXIT_OK, Status, Verdict
from evalsuite.warm import WarmServer, prompts_of


def say(*lines: str) -> None:
    """Print lines as they are; nothing in them is markup."""
    console = Console(soft_wrap=True)
    for line in lines:
        console.print(Text(visible(line)))


@dataclass(frozen=True)
class FinishedJob:
    """One job of a finished run, read back."""

    verdict: Verdict
    result: EvalResult
    records: Sequence[LedgerRecord]


def finished_job(run_dir: Path, job_id: str) -> FinishedJob:
    """Read one job of a run folder.

    Raises:
        ConfigError: No such job there, or one that was not evaluated.
    """
    verdicts = read(run_dir)
    found = [v for v in verdicts if v.job_id == job_id]
    if not found or found[0].result is None:
        known = ", ".join(v.job_id for v in verdicts if v.result is not None)
        raise ConfigError(
            f"{run_dir}: no evaluated job {job_id!r}; evaluated here: {known or 'none'}"
        )
    path = run_dir / "questions" / ledger_name(job_id)
    return FinishedJob(found[0], found[0].result, read_questions(path) if path.is_file() else [])


def compare_runs(
    paths: Sequence[Path],
    *,
    metric: str | None = None,
    markdown: Path | None = None,
    html: Path | None = None,
) -> int:
    """Compare finished runs on the same questions; print, and write the files asked for."""
    comparisons = compare.compare(compare.load(paths), metric)
    print_comparison(comparisons)
    if markdown is not None:
        write_text(markdown, render_markdown(comparisons))
    if html is not None:
        write_text(html, render_html(comparisons))
    return EXIT_OK


@dataclass(frozen=True)
class ReplayWish:
    """What `replay` is asked for.

    Attributes:
        baselines: The `baselines/` folder.
        reference: Baseline file or folder; the job's own where None.
        run_dir: A sampled run of the build under test; its flips are then explained.
        limits: What passes.
    """

    baselines: Path
    reference: str | None = None
    run_dir: Path | None = None
    limits: replay.ReplayLimits = field(default_factory=replay.ReplayLimits)


def replay_job(
    job: EvalJob,
    options: RunOptions,
    folder: Path,
    wanted: ReplayWish,
) -> int:
    """Teacher-force a baseline's answers through the server under test and gate on the shift.

    Args:
        job: Names the server and the prompts.
        options: As for a run.
        folder: Where the server's log goes.
        wanted: What to compare with, and what passes.
    """
    named = wanted.reference or job.config.baseline
    baseline = baseline_store.resolve(named, job.id, wanted.baselines).current
    before = {i: answer.logprobs for i, answer in baseline.answers.items() if answer.logprobs}
    if not before:
        raise ConfigError(
            f"baseline {digest(baseline)[:12]} holds no log-probabilities; save it with replay"
        )
    noise = {
        i: answer.logprob_noise
        for i, answer in baseline.answers.items()
        if answer.logprob_noise is not None
    }
    old = {i: answer.logprobs_again for i, answer in baseline.answers.items()}
    is_paired = any(old.values()) and not wanted.limits.has_other_kernels
    with WarmServer(job, options, folder) as warm:
        scored = score_baseline(warm, job, baseline, options, 0)
        twice = score_baseline(warm, job, baseline, options, 1) if is_paired else {}
        explained = _explain(warm, job, baseline, options, wanted.run_dir, scored)
    after = {index: one.logprobs for index, one in scored.items()}
    again = (old, {index: one.logprobs for index, one in twice.items()}) if is_paired else None
    outcome = replay.compare_logprobs(before, after, wanted.limits, noise or None, again)
    say(f"{job.id}: {outcome.status}: {outcome.reason}")
    if baseline.logprob_source == "sampled":
        say("note: the baseline's log-probabilities are of sampling, not of a replay")
    say(*(f"  question {index}: {shift:+.4f} nats a token" for index, shift in outcome.largest))
    say(*explained)
    codes = {Status.FAIL: EXIT_ACCURACY, Status.ERROR: EXIT_INFRASTRUCTURE}
    return codes.get(outcome.status, EXIT_OK)


def score_baseline(
    warm: WarmServer, job: EvalJob, baseline: Baseline, options: RunOptions, number: int
) -> dict[int, Scored]:
    """Teacher-force every answer, in an order of its own.

    Args:
        warm: The server.
        job: Names the prompts.
        baseline: Whose answers.
        options: Where data are.
        number: Of the replay: the same number means the same load, so that replays of two builds
            differ by what the builds differ by.
    """
    prompts = prompts_of(_asked(job.config, baseline), options, baseline.identity.prompt_hash)
    texts = {
        index: (prompts[index], answer.text)
        for index, answer in baseline.answers.items()
        if answer.text and index in prompts
    }
    order = random.sample(sorted(texts), len(texts))
    server = replace(warm.replay, concurrency=max(1, warm.replay.concurrency >> number))
    return score(server, {index: texts[index] for index in order})


def _asked(config: EvalConfig, baseline: Baseline) -> EvalConfig:
    """The config with the baseline's number of questions: prompts must be the same."""
    return config.model_copy(update={"num_questions": baseline.identity.num_questions})


def _explain(
    warm: WarmServer,
    job: EvalJob,
    baseline: Baseline,
    options: RunOptions,
    run_dir: Path | None,
    scored: dict[int, Scored],
) -> list[str]:
    """Lines that explain the flips of a sampled run of the build under test."""
    if run_dir is None:
        return []
    done = finished_job(run_dir, job.id)
    flips = [
        flip
        for flip in flips_from_baseline(baseline, done.records, baseline.identity.metric)
        if flip.index in scored
    ]
    prompts = prompts_of(_asked(job.config, baseline), options, baseline.identity.prompt_hash)
    changed = score(
        warm.replay, {flip.index: (prompts[flip.index], flip.after) for flip in flips if flip.after}
    )
    return [
        f"  flip {flip.index} ({'right' if flip.was_right else 'wrong'} -> "
        f"{'right' if flip.is_right else 'wrong'}): {flip.note or 'no reply to compare'}"
        for flip in near_ties.explain_flips(flips, scored, changed)
    ]
