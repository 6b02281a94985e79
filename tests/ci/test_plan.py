"""Lists into steps: shards, limits, routing, and what is refused at generation."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from ci_helpers import HARDWARE, rendered, write_configs

from evalsuite import shards
from evalsuite.ci.model import (
    GRACE_S,
    SETUP_LIMIT_S,
    Pipeline,
    Step,
    evaluation_limit_s,
    run_limit_s,
    step_key,
)
from evalsuite.ci.plan import PlanRequest, pipelines, planned_jobs
from evalsuite.errors import ConfigError
from evalsuite.hardware import Pool
from evalsuite.jobs import Selection, load_jobs
from evalsuite.machine import Machine

REPOSITORY = Path(__file__).parents[2]
POOL = Pool("cpu", "cpu", 0, 7, "cpu", {"buildkite": {"queue": "cpu"}}, 30)


def nightly(root: Path, **options: object) -> Pipeline:
    request = PlanRequest(root=root, pipelines=("nightly",), **options)  # type: ignore[arg-type]
    (pipeline,) = pipelines(request)
    return pipeline


def test_the_shards_of_a_pool_are_all_its_jobs_once_and_those_that_a_run_takes() -> None:
    root = REPOSITORY / "configs"
    durations, _ = shards.read_durations(root / "durations.json")
    by_config: dict[str, list[str]] = {}
    for step in nightly(root).steps:
        argv = shlex.split(step.command)
        config = argv[argv.index("--config") + 1]
        jobs = load_jobs(Selection((config,), root), Machine()).jobs
        shard = next((a.partition("=")[2] for a in argv if a.startswith("--shard=")), "1/1")
        taken = shards.take(jobs, durations, shards.parse_shard(shard))
        assert step.job_ids == tuple(job.id for job in taken)
        by_config.setdefault(config, []).extend(step.job_ids)
    for config, ids in by_config.items():
        jobs = load_jobs(Selection((config,), root), Machine()).jobs
        assert sorted(ids) == sorted(job.id for job in jobs)
    assert set(by_config) == {"config-b200.txt", "config-h100.txt", "config-rocm.txt"}


def test_every_limit_of_ci_is_above_the_limits_inside_it_and_within_the_pools() -> None:
    root = REPOSITORY / "configs"
    by_id = {job.id: job for part in planned_jobs((), root) for job in part.jobs}
    for step in nightly(root).steps:
        inside = sum(
            by_id[name].config.startup_max_wait_seconds
            + evaluation_limit_s(by_id[name], step.pool.vendor)
            + GRACE_S
            for name in step.job_ids
        )
        assert step.run_limit_s >= inside
        assert step.timeout_minutes * 60 > SETUP_LIMIT_S + inside + GRACE_S
        assert step.timeout_minutes <= step.pool.timeout_minutes


def test_limits_by_hand(tmp_path: Path) -> None:
    root = write_configs(
        tmp_path,
        {"suite/config-h100.txt": ["a"]},
        extra="startup_max_wait_seconds: 600\nrequest_timeout_seconds: 100\nmax_retries: 2\n",
    )
    (job,) = load_jobs(Selection(("config-h100.txt",), root), Machine()).jobs
    assert job.pool is not None
    # Three attempts of 100 s; or twice what it took.
    assert evaluation_limit_s(job, "nvidia") == 300
    assert evaluation_limit_s(job, "nvidia", recorded_s=1000) == 2000
    assert run_limit_s([job], job.pool, {}) == 600 + 300 + 60
    (step,) = nightly(root).steps
    # 900 setup + 960 + 60 grace + 300 margin = 2220 s.
    assert (step.run_limit_s, step.timeout_minutes) == (960, 37)


def test_durations_on_record_change_shards_and_limits(tmp_path: Path) -> None:
    root = write_configs(
        tmp_path,
        {"suite/config-h100.txt": list("abcd")},
        extra="startup_max_wait_seconds: 600\nrequest_timeout_seconds: 100\n",
    )
    assert [len(step.job_ids) for step in nightly(root).steps] == [4]
    durations = {"suite/a": 5000, "suite/b": 10, "suite/c": 10, "suite/d": 10}
    (root / "durations.json").write_text(json.dumps(durations))
    steps = nightly(root).steps
    assert [step.job_ids for step in steps] == [("suite/a",), ("suite/b", "suite/c", "suite/d")]
    assert [shlex.split(s.command)[4] for s in steps] == ["--shard=1/2", "--shard=2/2"]


def test_a_job_that_no_step_can_hold_is_refused_with_its_file_and_both_numbers(
    tmp_path: Path,
) -> None:
    root = write_configs(
        tmp_path, {"suite/config-h100.txt": ["slow"]}, extra="startup_max_wait_seconds: 14400\n"
    )
    with pytest.raises(ConfigError, match=r"slow\.yaml: .* need a step of 302 min; pool h100 all"):
        nightly(root)


def test_a_step_whose_limit_would_cut_the_suite_cannot_be_made() -> None:
    Step("a", "a", POOL, "true", timeout_minutes=12, run_limit_s=600)
    with pytest.raises(ConfigError, match="could not clean up"):
        Step("a", "a", POOL, "true", timeout_minutes=11, run_limit_s=600)


def test_pipelines_refuse_what_a_provider_would_or_would_take_as_green() -> None:
    step = Step("a", "a", POOL, "true", 5)
    with pytest.raises(ConfigError, match="no steps"):
        Pipeline("ci", "t", ())
    with pytest.raises(ConfigError, match="two steps 'a'"):
        Pipeline("ci", "t", (step, step))
    with pytest.raises(ConfigError, match="waits for 'b'"):
        Pipeline("ci", "t", (Step("c", "c", POOL, "true", 5, depends_on=("b",)),))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("eval", "h100", "1", "of", "4"), "eval-h100-1-of-4"),
        (("eval", "my suite/é.x"), "eval-my-suite-x"),
        (("8gpu",), "eval-8gpu"),
    ],
)
def test_keys_are_what_every_provider_takes(words: tuple[str, ...], key: str) -> None:
    assert step_key(*words) == key
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key)


def test_a_list_of_no_pool_is_an_error_and_no_default_queue(tmp_path: Path) -> None:
    root = write_configs(tmp_path, {"suite/config-nightly.txt": ["a"]})
    with pytest.raises(
        ConfigError, match=r"config-nightly\.txt: a CI step needs one pool, this ha"
    ):
        nightly(root, configs=("config-nightly.txt",))
    with pytest.raises(ConfigError, match=r"no list config-<pool>\.txt of a GPU pool"):
        nightly(root)


def test_an_empty_list_is_an_error(tmp_path: Path) -> None:
    root = write_configs(tmp_path, {"suite/config-h100.txt": []})
    with pytest.raises(ConfigError, match="lists no config"):
        nightly(root)


def test_unknown_pipelines_are_named(tmp_path: Path) -> None:
    root = write_configs(tmp_path, {"suite/config-h100.txt": ["a"]})
    with pytest.raises(ConfigError, match="'weekly'; known: ci, nightly"):
        pipelines(PlanRequest(root=root, pipelines=("weekly",)))


def test_setup_arguments_and_retries_are_the_users(tmp_path: Path) -> None:
    root = write_configs(tmp_path / "my configs", {"suite/config-h100.txt": ["a"]})
    step = nightly(
        root, setup=("pip install moe-evalsuite",), run_args=("--engine", "vllm"), num_retries=3
    ).steps[0]
    assert step.setup == ("pip install moe-evalsuite",)
    assert shlex.split(step.command) == [
        *("evalsuite", "run", "--config", "config-h100.txt"),
        *("--configs-root", str(root), "--engine", "vllm"),
    ]
    assert step.num_retries == 3


def test_one_name_in_two_suites_is_one_run_on_one_pool(tmp_path: Path) -> None:
    lists = {"one/config-h100.txt": ["a"], "two/config-h100.txt": ["b"]}
    root = write_configs(tmp_path, {**lists, "one/config-b200.txt": ["c"]})
    steps = nightly(root).steps
    assert [step.job_ids for step in steps] == [("one/c",), ("one/a", "two/b")]
    assert [step.pool.name for step in steps] == ["b200", "h100"]
    assert steps[1].num_gpus == 2


def test_gsm8k_is_fetched_before_the_run_and_minigsm_needs_nothing(tmp_path: Path) -> None:
    root = write_configs(tmp_path, {"suite/config-h100.txt": ["a"]})
    assert not any("data get" in line for line in nightly(root).steps[0].setup)
    path = root / "suite" / "a.yaml"
    path.write_text(path.read_text().replace("minigsm", "gsm8k"))
    assert nightly(root).steps[0].setup[-1] == "evalsuite data get gsm8k"


def test_buildkite_steps_carry_queue_retry_softness_concurrency_and_artifacts(
    tmp_path: Path,
) -> None:
    root = write_configs(tmp_path, {"suite/config-h100.txt": ["a"]})
    (step,) = rendered("buildkite", PlanRequest(root=root, is_accuracy_soft=True))["steps"]
    assert step["agents"] == {"queue": "h100"}
    assert step["retry"] == {"automatic": [{"exit_status": 75, "limit": 1}]}
    assert step["soft_fail"] == [{"exit_status": 1}]
    assert (step["concurrency"], step["concurrency_group"]) == (2, "evalsuite-h100")
    assert step["artifact_paths"] == ["results/**/*"]
    (hard,) = rendered("buildkite", PlanRequest(root=root, num_retries=0))["steps"]
    assert "soft_fail" not in hard
    assert "retry" not in hard


def test_github_jobs_get_no_right_that_they_do_not_use(tmp_path: Path) -> None:
    root = write_configs(tmp_path, {"suite/config-h100.txt": ["a"]})
    for name in ("ci", "nightly"):
        document = rendered("github", PlanRequest(root=root), name)
        assert document["permissions"] == {"contents": "read"}
        for key, job in document["jobs"].items():
            uses = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"actions/[a-z-]+@v\d+\.\d+\.\d+", one) for one in uses)
            if name == "ci" and key != "all":
                # What any fork can run: hosted runners, no secret.
                assert job["runs-on"] == ["ubuntu-latest"]
                assert "secrets." not in json.dumps(job)
        assert document["jobs"]["all"]["timeout-minutes"] == 5
    job = rendered("github", PlanRequest(root=root))["jobs"]["eval-h100"]
    assert job["runs-on"] == ["self-hosted", "h100"]
    # Both attempts are inside the one job.
    assert job["timeout-minutes"] == 2 * nightly(root).steps[0].timeout_minutes


def test_the_pull_request_pipeline_runs_the_verbs_of_the_makefile() -> None:
    steps = rendered("buildkite", PlanRequest(root=REPOSITORY / "configs"), "ci")["steps"]
    makefile = (REPOSITORY / "Makefile").read_text()
    for step, verb in zip(steps, ("check", "test", "demo"), strict=True):
        assert f"make {verb}\n" in step["command"]
        assert f"\n{verb}:" in makefile


def test_a_concurrency_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    hardware = HARDWARE.replace("concurrency: 2", "concurrency: none")
    root = write_configs(tmp_path, {"suite/config-h100.txt": ["a"]}, hardware)
    with pytest.raises(ConfigError, match=r"h100\.ci\.buildkite\.concurrency: 'none'"):
        nightly(root)
