"""One job after the other on this machine, jobs with the same launch next to each other.

Receives jobs and what the run has in common; returns verdicts in the order of the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from evalsuite import pipeline
from evalsuite.engines.base import LaunchSpec
from evalsuite.errors import ServerError
from evalsuite.jobs import EvalJob
from evalsuite.pipeline import Run
from evalsuite.progress import Display
from evalsuite.run_folder import RunFolder
from evalsuite.run_options import RunOptions
from evalsuite.verdict import Status, Verdict

OnVerdict = Callable[[Verdict], None]


def group_by_launch(jobs: Sequence[EvalJob], options: RunOptions) -> list[list[EvalJob]]:
    """Jobs that one server can serve, in order of first appearance; skipped jobs stand alone."""
    groups: list[tuple[LaunchSpec | None, list[EvalJob]]] = []
    for job in jobs:
        spec = None if job.skip_reason else pipeline.engine_of(job, options).launch_spec(job)
        for known, group in groups:
            if spec is not None and known == spec:
                group.append(job)
                break
        else:
            groups.append((spec, [job]))
    return [group for _, group in groups]


def execute(
    jobs: Sequence[EvalJob],
    options: RunOptions,
    folder: RunFolder,
    display: Display,
    *,
    stops_at_failure: bool = False,
) -> list[Verdict]:
    """Run every job that has no verdict in the folder yet.

    Args:
        jobs: The jobs.
        options: Common to the run.
        folder: Receives each verdict at once.
        display: Told what happens.
        stops_at_failure: Leave the rest after the first FAIL or ERROR.
    """
    verdicts: dict[str, Verdict] = {}
    kept: set[str] = set()
    ordered = [job for group in group_by_launch(jobs, options) for job in group]
    server = pipeline.open_server(options, folder)
    try:
        run = Run(options, folder, server, display)
        for number, job in enumerate(ordered, start=1):
            display.job_started(job.id, f"{number}/{len(ordered)}")
            earlier = folder.kept(job.id)
            if earlier is not None:
                kept.add(job.id)
            verdict = earlier or pipeline.run(job, run)
            unkept = folder.keep(verdict)
            verdicts[job.id] = verdict
            display.job_ended(verdict)
            if unkept:
                display.note(unkept)
            if stops_at_failure and verdict.status in (Status.FAIL, Status.ERROR):
                break
    finally:
        try:
            server.close()
        except ServerError as error:
            # The verdicts stand; whoever uses this machine next must know.
            display.note(str(error))
    for job_id, warning in _other_builds(verdicts, kept).items():
        verdicts[job_id] = replace(verdicts[job_id], warnings=(*verdicts[job_id].warnings, warning))
    return [verdicts[job.id] for job in jobs if job.id in verdicts]


def _other_builds(verdicts: Mapping[str, Verdict], kept: Collection[str]) -> dict[str, str]:
    """Jobs that were decided before a resume, by a server that is no longer the same build."""
    now: dict[str, set[str]] = {}
    for job_id, verdict in verdicts.items():
        if job_id not in kept and (build := verdict.detail.get("server_build")):
            now.setdefault(verdict.engine, set()).add(str(build))
    found = {}
    for job_id in kept:
        verdict = verdicts[job_id]
        before, others = verdict.detail.get("server_build"), now.get(verdict.engine, set())
        if before and others and before not in others:
            found[job_id] = (
                f"decided before the run was resumed, by another build of the server ({before}; "
                f"now {', '.join(sorted(others))})"
            )
    return found
