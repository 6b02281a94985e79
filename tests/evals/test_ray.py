"""The Ray executor: what is asked of a cluster, and what becomes of jobs that fit nowhere.

The decisions are tested with a stand-in for Ray; the last test runs the real one where it is
installed.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Suite, statuses

from evalsuite import session
from evalsuite.errors import ConfigError
from evalsuite.executors import ray as ray_executor
from evalsuite.jobs import EvalJob
from evalsuite.progress import PlainDisplay
from evalsuite.run_folder import RunFolder
from evalsuite.verdict import Status, Verdict


class LostError(Exception):
    """What the stand-in raises for a task whose node died."""


class Ref:
    """A submitted task."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.run = lambda: function(*args)


class FakeRay(types.ModuleType):
    """Runs tasks at once in this process; nodes and losses are scripted."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        super().__init__("ray")
        self.asked: list[dict[str, Any]] = []
        self.is_losing = False
        self.exceptions = types.SimpleNamespace(RayError=LostError)
        self._nodes = nodes

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def remote(self, function: Any) -> Any:
        def options(**needs: Any) -> Any:
            self.asked.append(needs)
            return types.SimpleNamespace(remote=lambda *args: Ref(function, args))

        return types.SimpleNamespace(options=options)

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return refs[:1], refs[1:]

    def get(self, ref: Any) -> Any:
        if self.is_losing:
            raise LostError("the node died")
        return ref.run()


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    suite = Suite(tmp_path)
    monkeypatch.setenv("PATH", suite.environ["PATH"])
    return suite


def execute(suite: Suite, config: str, wait_s: float = 0.0) -> dict[str, Verdict]:
    request = session.RunRequest(configs=(config,), root=str(suite.root), executor="ray")
    prepared = session.prepare(request, suite.environ)
    folder = RunFolder(suite.results / "run")
    folder.begin(request.to_json())
    verdicts = ray_executor.execute(
        prepared.jobs,
        prepared.options,
        folder,
        PlainDisplay(print),
        unschedulable_wait_s=wait_s,
    )
    folder.finish(verdicts, "test", 1.0)
    return {verdict.job_id: verdict for verdict in verdicts}


def use(monkeypatch: pytest.MonkeyPatch, *resources: dict[str, float]) -> FakeRay:
    nodes = [{"Alive": True, "Resources": found} for found in resources]
    fake = FakeRay(nodes)
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_each_launch_is_one_task_with_gpus_and_pool(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use(monkeypatch, {"b200": 1.0, "GPU": 8.0, "CPU": 64.0})
    args = f"--tensor-parallel-size 2 {suite.right()}"
    suite.add("a", args, pool="b200", num_questions=5)
    suite.add("b", args, pool="b200", num_questions=4)
    suite.add("c", f"-tp 4 {suite.right()}", pool="b200", num_questions=3)
    verdicts = execute(suite, "config-b200.txt")
    assert fake.asked == [
        {"num_gpus": 2.0, "resources": {"b200": ray_executor.LABEL_SHARE}},
        {"num_gpus": 4.0, "resources": {"b200": ray_executor.LABEL_SHARE}},
    ]
    # This machine is no b200; the cluster is.
    assert [v.status for v in verdicts.values()] == [Status.PASS] * 3
    assert statuses(suite.run_folder()) == {"s/a": "PASS", "s/b": "PASS", "s/c": "PASS"}


def test_a_job_that_fits_nowhere_is_an_error_after_a_bounded_wait(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, {"b200": 1.0, "GPU": 2.0}, {"h100": 1.0, "GPU": 8.0})
    suite.add("fits", f"-tp 2 {suite.right()}", pool="b200", num_questions=3)
    suite.add("big", "-tp 4", pool="b200")
    verdicts = execute(suite, "config-b200.txt", 0.5)
    assert verdicts["s/fits"].status is Status.PASS
    assert verdicts["s/big"].status is Status.ERROR
    assert "no node of the Ray cluster has GPU 4, b200 0.001" in verdicts["s/big"].reason


def test_a_lost_task_is_an_error(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"cpu": 1.0}).is_losing = True
    suite.add("job", suite.right())
    verdict = execute(suite, "config-cpu.txt")["s/job"]
    assert verdict.status is Status.ERROR
    assert "the node died" in verdict.reason


def test_a_cpu_job_asks_for_no_gpu(suite: Suite) -> None:
    suite.add("job", suite.right())
    request = session.RunRequest(configs=("config-cpu.txt",), root=str(suite.root))
    jobs: tuple[EvalJob, ...] = session.prepare(request, suite.environ).jobs
    assert ray_executor.needs_of(jobs) == {"cpu": ray_executor.LABEL_SHARE}


def test_without_ray_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-evalsuite\[ray\]'"):
        ray_executor.load_ray()


def test_real_ray(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    suite.add("right", suite.right(), num_questions=5)
    suite.add("wrong", num_questions=5)
    ray.init(num_cpus=2, resources={"cpu": 1}, include_dashboard=False, log_to_driver=False)
    try:
        verdicts = execute(suite, "config-cpu.txt", 5.0)
    finally:
        ray.shutdown()
    assert verdicts["s/right"].status is Status.PASS
    assert verdicts["s/wrong"].status is Status.FAIL
