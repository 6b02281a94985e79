"""Each launch of a run as one task on a Ray cluster, with its GPU count and its pool resource.

A node of pool `b200` is started with `ray start --resources '{"b200": 1}'`; Ray packs the jobs
onto its GPUs. Jobs that share a launch go together, so that their server starts once. The run
folder must be on a file system that all nodes share. A job that no node can ever hold is an
ERROR after a bounded wait (an autoscaler may still bring one), where Ray itself would wait for
ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from evalsuite.errors import ConfigError, ServerError
from evalsuite.evidence import BackendEvidence
from evalsuite.executors import local
from evalsuite.jobs import EvalJob
from evalsuite.judge import RunContext, judge
from evalsuite.progress import Display, PlainDisplay
from evalsuite.run_folder import RunFolder
from evalsuite.run_options import RunOptions
from evalsuite.verdict import Verdict

# A pool resource is a label, not an amount: any number of jobs may share a node's.
LABEL_SHARE = 0.001
UNSCHEDULABLE_WAIT_S = 300.0
_POLL_S = 1.0


def load_ray() -> Any:
    """Import Ray.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"--executor ray: {error}; install it with pip install 'moe-evalsuite[ray]'"
        ) from error
    return ray


def needs_of(group: Sequence[EvalJob]) -> dict[str, float]:
    """Ray resources of the jobs of one launch: GPUs, and the pool as a label."""
    job = group[0]
    needs: dict[str, float] = {}
    if job.pool is not None:
        needs[job.pool.name] = LABEL_SHARE
    is_on_gpu = job.pool is None or job.pool.vendor != "cpu"
    if is_on_gpu and job.config.engine != "external":
        needs["GPU"] = float(job.layout.num_gpus)
    return needs


def can_hold(nodes: Sequence[dict[str, Any]], needs: dict[str, float]) -> bool:
    """Whether some living node has room for `needs` when it is empty."""
    return any(
        node.get("Alive") and all(node["Resources"].get(k, 0.0) >= v for k, v in needs.items())
        for node in nodes
    )


def _task(group: list[EvalJob], options: RunOptions, folder: RunFolder) -> list[Verdict]:
    """Runs on the node: the local executor over one launch."""
    return local.execute(group, options, folder, PlainDisplay(print))


def execute(
    jobs: Sequence[EvalJob],
    options: RunOptions,
    folder: RunFolder,
    display: Display,
    *,
    unschedulable_wait_s: float = UNSCHEDULABLE_WAIT_S,
) -> list[Verdict]:
    """Submit every launch, wait for all; jobs that fit nowhere are ERRORs.

    Raises:
        ConfigError: Ray is not installed.
    """
    ray = load_ray()
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, log_to_driver=False)
    remote = ray.remote(_task)
    verdicts: dict[str, Verdict] = {}
    open_groups: dict[Any, list[EvalJob]] = {}
    homeless: list[list[EvalJob]] = []
    # The pool is the node's business: a job skipped on this machine may run on another.
    for group in local.group_by_launch(jobs, options):
        needs = needs_of(group)
        gpus = needs.pop("GPU", 0.0)
        if can_hold(ray.nodes(), needs_of(group)):
            ref = remote.options(num_gpus=gpus, resources=needs).remote(group, options, folder)
            open_groups[ref] = group
            display.job_started(", ".join(job.id for job in group), "submitted")
        else:
            homeless.append(group)
    deadline = time.monotonic() + unschedulable_wait_s
    try:
        while open_groups or homeless:
            _collect(ray, open_groups, verdicts, display)
            for group in list(homeless):
                needs = needs_of(group)
                if can_hold(ray.nodes(), needs):
                    gpus = needs.pop("GPU", 0.0)
                    ref = remote.options(num_gpus=gpus, resources=needs)
                    open_groups[ref.remote(group, options, folder)] = group
                elif time.monotonic() >= deadline:
                    for job in group:
                        _book(verdicts, display, folder, _unschedulable(job, needs))
                else:
                    continue
                homeless.remove(group)
            if homeless and not open_groups:
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        for ref in open_groups:
            ray.cancel(ref)
        raise
    return [verdicts[job.id] for job in jobs if job.id in verdicts]


def _collect(
    ray: Any, open_groups: dict[Any, list[EvalJob]], verdicts: dict[str, Verdict], display: Display
) -> None:
    """Take what has ended within a second."""
    if not open_groups:
        return
    ended, _ = ray.wait(list(open_groups), num_returns=1, timeout=_POLL_S)
    for ref in ended:
        group = open_groups.pop(ref)
        try:
            done = ray.get(ref)
        except ray.exceptions.RayError as error:
            # The node died or the task was lost: infrastructure, safe to retry.
            lost = ServerError(f"evaluation: the Ray task was lost: {error}")
            context = RunContext(error=lost)
            done = [judge(job, None, BackendEvidence(), context=context) for job in group]
        for verdict in done:
            verdicts[verdict.job_id] = verdict
            display.job_ended(verdict)


def _unschedulable(job: EvalJob, needs: dict[str, float]) -> Verdict:
    wanted = ", ".join(f"{key} {value:g}" for key, value in sorted(needs.items()))
    error = ServerError(f"start: no node of the Ray cluster has {wanted}")
    return judge(job, None, BackendEvidence(), context=RunContext(error=error))


def _book(
    verdicts: dict[str, Verdict], display: Display, folder: RunFolder, verdict: Verdict
) -> None:
    verdicts[verdict.job_id] = verdict
    unkept = folder.keep(verdict)
    display.job_ended(verdict)
    if unkept:
        display.note(unkept)
