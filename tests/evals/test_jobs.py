"""Jobs: layout, GPUs and memory against the pool, ids, and every fault at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalsuite.capacity import check_capacity, weights_gib_per_gpu
from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError
from evalsuite.hardware import Hardware, load_hardware
from evalsuite.jobs import JobSet, Selection, load_jobs
from evalsuite.layout import Layout, layout_of
from evalsuite.lists import configs_root, hardware_file
from evalsuite.machine import Machine
from evalsuite.server_args import parse_server_args

NO_GPU = Machine(missing="nvidia-smi is not installed")
B200 = Machine("nvidia", "sm100", 8, 179.0, "NVIDIA B200")


def config(args: str = "", model: str = "Qwen/Qwen3-30B-A3B") -> EvalConfig:
    return EvalConfig(
        model_name=model,
        accuracy_threshold=0.88,
        num_questions=1319,
        num_fewshot=5,
        server_args=parse_server_args(args),
    )


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware(hardware_file(configs_root()))


class TestLayout:
    @pytest.mark.parametrize(
        ("args", "layout", "num_gpus", "text"),
        [
            ("", Layout(), 1, "TP1"),
            ("--tensor-parallel-size 2", Layout(tp=2), 2, "TP2"),
            ("--tensor-parallel-size=2", Layout(tp=2), 2, "TP2"),
            ("--tensor_parallel_size 2", Layout(tp=2), 2, "TP2"),
            ("-tp 2", Layout(tp=2), 2, "TP2"),
            ("-tp=2", Layout(tp=2), 2, "TP2"),
            ("--tp 2 -tp 2", Layout(tp=2), 2, "TP2"),
            ("--tp-size 4 --ep-size 4", Layout(tp=4, is_ep=True), 4, "TP4+EP"),
            ("-tp 2 --enable-expert-parallel", Layout(tp=2, is_ep=True), 2, "TP2+EP"),
            ("--enable_expert_parallel -dp 2", Layout(dp=2, is_ep=True), 2, "DP2+EP"),
            ("-ep --no-enable-expert-parallel", Layout(), 1, "TP1"),
            ("-tp 2 -dp 2 -pp 2", Layout(2, 2, 2), 8, "TP2 x DP2 x PP2"),
            ("--data-parallel-size 8", Layout(dp=8), 8, "DP8"),
            ("--tp 8 --dp 8 --enable-dp-attention", Layout(8, 8, 1, False, True), 8, "TP8 x DP8"),
        ],
    )
    def test_read_in_all_spellings(
        self, args: str, layout: Layout, num_gpus: int, text: str
    ) -> None:
        found = layout_of(config(args))
        assert found == layout
        assert found.num_gpus == num_gpus
        assert str(found) == text


class TestCapacity:
    SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"

    def problems(
        self, hardware: Hardware, pool: str, args: str, model: str = "Qwen/Qwen3-30B-A3B"
    ) -> list[tuple[str, str]]:
        cfg = config(args, model)
        found = hardware.find(pool)
        assert found is not None
        return [
            (problem.severity, problem.message)
            for problem in check_capacity(cfg, layout_of(cfg), found, "a.yaml", 7)
        ]

    def test_scout_does_not_fit_two_h100_and_fits_two_b200(self, hardware: Hardware) -> None:
        # 108.64e9 parameters of two bytes on two GPUs.
        assert weights_gib_per_gpu(config("-tp 2", self.SCOUT), Layout(tp=2)) == pytest.approx(
            101.18, abs=0.01
        )
        found = self.problems(hardware, "h100", "-tp 2", self.SCOUT)
        assert [severity for severity, _ in found] == ["error"]
        assert "101.2 GiB of weights on each of 2 GPUs (TP2)" in found[0][1]
        assert not self.problems(hardware, "b200", "-tp 2", self.SCOUT)
        assert not self.problems(hardware, "h100", "-tp 4", self.SCOUT)

    def test_data_parallel_ranks_share_experts_and_repeat_the_rest(self) -> None:
        # 28.99e9 expert parameters over two ranks, 1.54e9 others on each.
        expected = (28.99e9 / 2 + 1.54e9) * 2 / 2**30
        assert weights_gib_per_gpu(config(), Layout(dp=2)) == pytest.approx(expected, rel=1e-3)

    def test_more_gpus_than_a_node_has(self, hardware: Hardware) -> None:
        found = self.problems(hardware, "h100", "-tp 8 -dp 2")
        assert found[0][0] == "error"
        assert "needs 16 GPUs; a node of pool h100 has 8" in found[0][1]

    def test_the_share_of_memory_counts(self, hardware: Hardware) -> None:
        assert not self.problems(hardware, "h100", "")
        found = self.problems(hardware, "h100", "--gpu-memory-utilization 0.5")
        assert found[0][0] == "error"
        assert (
            "hardly fits" in self.problems(hardware, "h100", "--gpu-memory-utilization=0.75")[0][1]
        )

    def test_backends_of_one_family_of_chips(self, hardware: Hardware) -> None:
        args = "--moe-backend flashinfer_trtllm"
        assert "kernels for sm10* only" in self.problems(hardware, "h100", args)[0][1]
        assert not self.problems(hardware, "b200", args)
        assert (
            "kernels for gfx* only" in self.problems(hardware, "b200", "--moe-backend aiter")[0][1]
        )

    def test_an_unknown_model_and_a_cpu_pool_are_not_judged(self, hardware: Hardware) -> None:
        assert not self.problems(hardware, "h100", "", "someone/huge-1000B")
        assert not self.problems(hardware, "cpu", "-tp 2")


CONFIG = "accuracy_threshold: 0.88\nnum_questions: 1319\nnum_fewshot: 5\ntolerance: 0.02\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "configs"
    for suite in ("one", "two"):
        (root / suite / "sub").mkdir(parents=True)
        for name in ("a", "b", "sub/a"):
            text = f"model_name: m/{name}\n{CONFIG}server_args: -tp 2\n"
            (root / suite / f"{name}.yaml").write_text(text)
        (root / suite / "config-b200.txt").write_text("a.yaml\nb.yaml\nsub/a.yaml\n")
    (root / "one/config-h100.txt").write_text("a.yaml\n")
    (root / "one/config-cpu.txt").write_text("b.yaml\n")
    return root


class TestLoadJobs:
    def load(self, root: Path, *configs: str, machine: Machine = NO_GPU, **more: object) -> JobSet:
        return load_jobs(Selection(configs, root, **more), machine)  # type: ignore[arg-type]

    def test_ids_pools_and_reasons(self, root: Path) -> None:
        jobs = self.load(root, "config-b200.txt").jobs
        assert [job.id for job in jobs] == [
            *("one/a", "one/b", "one/sub/a", "two/a", "two/b", "two/sub/a"),
        ]
        assert {job.pool.name for job in jobs if job.pool} == {"b200"}
        assert all("needs pool b200 (2 x sm100, nvidia)" in job.skip_reason for job in jobs)
        assert all(not job.skip_reason for job in self.load(root, "config-cpu.txt").jobs)
        on_b200 = self.load(root, "config-b200.txt", machine=B200).jobs
        assert all(not job.skip_reason for job in on_b200)

    def test_overrides_and_sources(self, root: Path) -> None:
        found = self.load(root, "one/config-cpu.txt", overrides={"num_questions": 50})
        assert found.jobs[0].config.num_questions == 50
        assert found.sources["one/b"]["num_questions"] == "command line"
        assert any("made for 1319" in problem.message for problem in found.problems)

    def test_a_bad_override_is_an_error(self, root: Path) -> None:
        with pytest.raises(ConfigError, match="num_questions"):
            self.load(root, "one/config-cpu.txt", overrides={"num_questions": 0})

    def test_an_external_server_skips_nothing(self, root: Path) -> None:
        jobs = self.load(root, "config-b200.txt", overrides={"engine": "external"}).jobs
        assert all(not job.skip_reason for job in jobs)

    def test_a_bare_yaml_has_no_pool(self, root: Path) -> None:
        job = self.load(root, str(root / "one/a.yaml")).jobs[0]
        assert (job.id, job.pool) == ("one/a", None)
        assert "needs 2 GPUs" in job.skip_reason

    def test_a_pool_named_on_the_command_line(self, root: Path) -> None:
        jobs = self.load(root, str(root / "one/a.yaml"), machine=B200, pool="b200").jobs
        assert jobs[0].pool is not None
        assert not jobs[0].skip_reason
        with pytest.raises(ConfigError, match="is no pool"):
            self.load(root, "config-b200.txt", pool="b20")

    def test_one_file_on_two_pools_needs_two_runs(self, root: Path) -> None:
        with pytest.raises(ConfigError, match=r"has the id one/a of .*separate runs"):
            self.load(root, "config-b200.txt", "config-h100.txt")

    def test_the_same_list_twice_runs_once(self, root: Path) -> None:
        found = self.load(root, "config-cpu.txt", "one/config-cpu.txt")
        assert [job.id for job in found.jobs] == ["one/b"]
        assert any("runs once" in problem.message for problem in found.problems)

    def test_only(self, root: Path) -> None:
        assert [job.id for job in self.load(root, "config-b200.txt", only=("two/b",)).jobs] == [
            "two/b"
        ]
        with pytest.raises(ConfigError, match="no job 'two/c'"):
            self.load(root, "config-b200.txt", only=("two/c",))

    def test_every_fault_of_every_file_at_once(self, root: Path) -> None:
        (root / "one/a.yaml").write_text("model_name: m\nnum_question: 5\n")
        (root / "two/b.yaml").write_text("- 1\n")
        (root / "two/config-b200.txt").write_text("b.yaml\ngone.yaml\n")
        with pytest.raises(ConfigError) as caught:
            self.load(root, "config-b200.txt", "nothing.txt")
        text = str(caught.value)
        for part in ("num_question", "holds a list", "gone.yaml", "nothing.txt"):
            assert part in text
        assert str(root / "one/a.yaml") + ":2:" in text

    def test_a_job_too_large_for_its_pool(self, root: Path) -> None:
        text = f"model_name: Qwen/Qwen3-30B-A3B\n{CONFIG}server_args: -tp 16\n"
        (root / "one/a.yaml").write_text(text)
        with pytest.raises(ConfigError, match="needs 16 GPUs"):
            self.load(root, "one/config-h100.txt")

    def test_nothing_selected(self, root: Path) -> None:
        with pytest.raises(ConfigError, match="no --config given"):
            self.load(root)
