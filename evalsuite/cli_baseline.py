"""Entry functions of `evalsuite baseline`: save, show, diff, approve.

Receives parsed options from `cli_gate.py`, prints, returns an exit code. What a baseline is, is
`baseline.py`; where it lies, `baseline_store.py`; servers come from `warm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evalsuite import baseline_store, replay
from evalsuite.baseline import Baseline, identity_of, make_baseline, with_logprobs
from evalsuite.cli_stats import finished_job, say, score_baseline
from evalsuite.errors import ConfigError
from evalsuite.jobs import EvalJob
from evalsuite.ledger import read_ledger
from evalsuite.model_revision import model_revision
from evalsuite.pipeline import engine_of
from evalsuite.run_options import RunOptions
from evalsuite.verdict import EXIT_OK
from evalsuite.warm import WarmServer, run_repeats


@dataclass(frozen=True)
class SaveWish:
    """What `baseline save` is asked for.

    Attributes:
        baselines: The `baselines/` folder.
        run_dir: A finished run to take the answers from; None to ask anew.
        repeats: Where none is given: how often every question is asked, on one warm server.
        model_revision: Revision or hash of the weights, "" for what was served.
        has_replay: Teacher-force every answer twice, so that the baseline holds
            log-probabilities and their noise.
        folder: Where ledger and server log go, if a server is started.
    """

    baselines: Path
    run_dir: Path | None = None
    repeats: int = 1
    model_revision: str = ""
    has_replay: bool = False
    folder: Path = Path("results")


def baseline_save(job: EvalJob, options: RunOptions, wanted: SaveWish) -> int:
    """Save a baseline; it counts once it is approved.

    Args:
        job: The job as its file says now; its settings become the baseline's identity.
        options: As for a run.
        wanted: Where its answers come from, and what else it holds.

    Raises:
        ConfigError: Neither a run nor a number of repeats that can be meant.
    """
    if wanted.run_dir is not None:
        made = _of_run(job, wanted.run_dir, wanted.model_revision)
        if wanted.has_replay:
            with WarmServer(job, options, wanted.folder) as warm:
                made = _replayed(warm, job, made, options)
    else:
        made = _of_repeats(job, options, wanted)
    path = baseline_store.save(wanted.baselines, job.id, made)
    command = f"evalsuite baseline approve {job.id} {path.stem[:12]}"
    say(baseline_store.describe(made), f"saved {path}", f"it counts after: {command}")
    return EXIT_OK


def _of_run(job: EvalJob, run_dir: Path, revision: str) -> Baseline:
    done = finished_job(run_dir, job.id)
    seen = revision or str(done.verdict.detail.get("model_revision", ""))
    return make_baseline(
        identity_of(job.config, done.result, seen),
        done.result,
        done.records,
        engine=done.verdict.engine,
        hardware=done.verdict.hardware,
        commit=done.verdict.commit,
    )


def _of_repeats(job: EvalJob, options: RunOptions, wanted: SaveWish) -> Baseline:
    """Ask every question several times, shuffled and at varied concurrency."""
    if wanted.repeats < 1:
        raise ConfigError(f"--repeats {wanted.repeats}: ask at least once")
    engine, ledger = engine_of(job, options), wanted.folder / "ledger.jsonl"
    with WarmServer(job, options, wanted.folder) as warm:
        result = run_repeats(warm, job, options, ledger, wanted.repeats)
        revision = wanted.model_revision or model_revision(job.config, options.environ)
        made = make_baseline(
            identity_of(job.config, result, revision),
            result,
            read_ledger(ledger),
            engine=f"{engine.name} {engine.version()}".strip(),
            hardware=options.hardware,
            commit=options.commit,
        )
        return _replayed(warm, job, made, options) if wanted.has_replay else made


def _replayed(warm: WarmServer, job: EvalJob, made: Baseline, options: RunOptions) -> Baseline:
    first, second = (score_baseline(warm, job, made, options, i) for i in range(2))
    logprobs = {index: scored.logprobs for index, scored in first.items()}
    again = {index: scored.logprobs for index, scored in second.items()}
    return with_logprobs(made, logprobs, replay.noise_between(logprobs, again), again)


def baseline_show(job_id: str, root: Path, name: str = "") -> int:
    """Print the approved baselines of a job, or the one whose digest begins with `name`."""
    folder = baseline_store.job_folder(root, job_id)
    if name:
        say(baseline_store.describe(baseline_store.load(baseline_store.find(folder, name))))
        return EXIT_OK
    approved = baseline_store.read_approved(folder)
    for kind in ("current", "previous", "anchor"):
        wanted = getattr(approved, kind)
        if wanted:
            loaded = baseline_store.load(folder / f"{wanted}.json")
            say(f"{kind}:", baseline_store.describe(loaded), "")
        else:
            say(f"{kind}: none", "")
    return EXIT_OK


def baseline_diff(job_id: str, root: Path, name: str) -> int:
    """Print how the saved baseline `name` differs from the current one, and from the anchor."""
    folder = baseline_store.job_folder(root, job_id)
    new = baseline_store.load(baseline_store.find(folder, name))
    approved = baseline_store.read_approved(folder)
    if not approved.current:
        say("no approved baseline yet; the saved one is:", baseline_store.describe(new))
        return EXIT_OK
    for kind in dict.fromkeys(("current", "anchor")):
        digest_of = getattr(approved, kind)
        if kind == "anchor" and digest_of in ("", approved.current):
            continue
        old = baseline_store.load(folder / f"{digest_of}.json")
        say(f"against the {kind} {digest_of[:12]}:", baseline_store.describe_diff(old, new), "")
    return EXIT_OK


def baseline_approve(job_id: str, root: Path, name: str, *, move_anchor: bool = False) -> int:
    """Make the saved baseline `name` the current one; the anchor stays unless asked."""
    folder = baseline_store.job_folder(root, job_id)
    approved = baseline_store.approve(folder, name, move_anchor=move_anchor)
    say(
        f"current  {approved.current}",
        f"previous {approved.previous or 'none'}",
        f"anchor   {approved.anchor}",
    )
    return EXIT_OK
