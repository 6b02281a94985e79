"""Jobs: layout, GPUs and memory against the pool, this machine, ids, and shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalsuite.capacity import check_capacity, weights_gib_per_gpu
from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError
from evalsuite.hardware import Hardware, load_hardware
from evalsuite.jobs import JobSet, Selection, load_jobs
from evalsuite.layout import Layout, layout_of
from evalsuite.lists import configs_root, hardware_file
from evalsuite.machine import Machine, Probe, detect_machine, detect_pool, skip_reason
from evalsuite.server_args import parse_server_args
from evalsuite.shards import (
    Shard,
    parse_shard,
    read_durations,
    record_durations,
    split,
    take,
    unknown_durations,
)

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


def probe(root: Path, smi: str | OSError) -> Probe:
    def run(argv: Sequence[str]) -> str:
        assert argv[0] == "nvidia-smi"
        if isinstance(smi, OSError):
            raise smi
        return smi

    return Probe(run, root)


NO_SMI = OSError("nvidia-smi is not installed")


class TestMachine:
    def test_nvidia(self, tmp_path: Path, hardware: Hardware) -> None:
        found = detect_machine(probe(tmp_path, "NVIDIA H100 80GB HBM3, 81559, 9.0\n" * 2))
        assert (found.vendor, found.arch, found.num_gpus) == ("nvidia", "sm90", 2)
        assert found.memory_gib == pytest.approx(79.6, abs=0.1)
        pool = detect_pool(found, hardware)
        assert pool is not None
        assert pool.name == "h100"

    @pytest.mark.parametrize(
        ("name", "memory", "cap", "pool"),
        [
            ("NVIDIA B200", 183359, "10.0", "b200"),
            ("NVIDIA H200", 143771, "9.0", "h200"),
            ("NVIDIA GH200 480GB", 97871, "9.0", ""),
            ("NVIDIA A100-SXM4-80GB", 81920, "8.0", "a100"),
            ("Hopper engineering sample", 143000, "9.0", "h200"),
            ("NVIDIA L4", 23034, "8.9", ""),
        ],
    )
    def test_which_pool_a_card_is(
        self, tmp_path: Path, hardware: Hardware, name: str, memory: int, cap: str, pool: str
    ) -> None:
        found = detect_pool(detect_machine(probe(tmp_path, f"{name}, {memory}, {cap}\n")), hardware)
        assert (found.name if found else "") == pool

    def test_the_drivers_files_where_the_tool_is_missing(
        self, tmp_path: Path, hardware: Hardware
    ) -> None:
        for index in range(2):
            folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
        found = detect_machine(probe(tmp_path, NO_SMI))
        assert (found.num_gpus, found.device_name) == (2, "NVIDIA H200")
        pool = detect_pool(found, hardware)
        assert pool is not None
        assert pool.name == "h200"

    def test_amd(self, tmp_path: Path, hardware: Hardware) -> None:
        for index, version in enumerate((0, 90402, 90402)):
            node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{index}"
            (node / "mem_banks/0").mkdir(parents=True)
            (node / "properties").write_text(f"simd_count 4\ngfx_target_version {version}\n")
            (node / "mem_banks/0/properties").write_text(f"size_in_bytes {192 << 30}\n")
        found = detect_machine(probe(tmp_path, NO_SMI))
        assert (found.vendor, found.arch, found.num_gpus) == ("amd", "gfx942", 2)
        pool = detect_pool(found, hardware)
        assert pool is not None
        assert pool.name == "mi300x"

    @pytest.mark.parametrize(
        ("visible", "num_gpus"),
        [("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("1,9,0", 1), ("GPU-a", 1)],
    )
    def test_device_selection(self, tmp_path: Path, visible: str, num_gpus: int) -> None:
        found = detect_machine(
            probe(tmp_path, "NVIDIA B200, 183359, 10.0\n" * 4), {"CUDA_VISIBLE_DEVICES": visible}
        )
        assert found.num_gpus == num_gpus
        assert ("CUDA_VISIBLE_DEVICES" in found.missing) == (num_gpus == 0)

    def test_a_machine_without_a_gpu_says_what_is_missing(self, tmp_path: Path) -> None:
        found = detect_machine(probe(tmp_path, NO_SMI))
        assert found.num_gpus == 0
        assert found.missing == "nvidia-smi is not installed; no AMD GPU in /sys/class/kfd"

    def test_a_driver_that_answers_nonsense(self, tmp_path: Path) -> None:
        for answer in ("", "No devices were found\n", "a,b,c\n"):
            found = detect_machine(probe(tmp_path, answer))
            assert found.num_gpus == 0
            assert "names no GPU" in found.missing

    def test_why_a_job_cannot_run_here(self, hardware: Hardware) -> None:
        b200, cpu = hardware.find("b200"), hardware.find("cpu")
        reason = skip_reason(b200, 2, NO_GPU, hardware)
        assert reason == (
            "needs pool b200 (2 x sm100, nvidia); no GPU here: nvidia-smi is not installed"
        )
        assert skip_reason(b200, 2, B200, hardware) == ""
        assert skip_reason(cpu, 1, NO_GPU, hardware) == ""
        assert skip_reason(None, 1, NO_GPU, hardware) == ""
        assert "needs 2 GPUs" in skip_reason(None, 2, NO_GPU, hardware)
        h100 = skip_reason(hardware.find("h100"), 2, B200, hardware)
        assert "this machine is pool b200 (8 x NVIDIA B200, sm100)" in h100
        one = Machine("nvidia", "sm100", 1, 179.0, "NVIDIA B200")
        assert "only 1 of its GPUs are visible" in skip_reason(b200, 2, one, hardware)


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


class TestShards:
    LONG = tuple(f"long{index}" for index in range(3))
    SHORT = tuple(f"short{index}" for index in range(12))
    DURATIONS = dict.fromkeys(LONG, 1800.0) | dict.fromkeys(SHORT, 120.0)

    def test_longest_first(self) -> None:
        shards = split([*self.LONG, *self.SHORT], self.DURATIONS, 4)
        loads = sorted(sum(self.DURATIONS[name] for name in shard) / 60 for shard in shards)
        assert loads == [24, 30, 30, 30]

    def test_few_jobs_many_shards(self) -> None:
        assert split(["a", "b"], {}, 4) == [["a"], ["b"], [], []]
        assert split([], {}, 4) == [[], [], [], []]

    def test_without_durations_the_counts_are_even(self) -> None:
        shards = split([*self.LONG, *self.SHORT], {}, 4)
        assert sorted(map(len, shards)) == [3, 4, 4, 4]

    @given(
        st.lists(st.text(max_size=5), unique=True, max_size=30),
        st.integers(1, 8),
        st.lists(st.floats(0, 1e6), min_size=30, max_size=30),
    )
    def test_an_exact_partition_that_depends_on_no_order(
        self, ids: list[str], count: int, seconds: list[float]
    ) -> None:
        durations = dict(zip(ids[::2], seconds, strict=False))
        shards = split(ids, durations, count)
        assert sorted(name for shard in shards for name in shard) == sorted(ids)
        assert len(shards) == count
        backwards = split(ids[::-1], dict(reversed(durations.items())), count)
        assert [sorted(shard) for shard in backwards] == [sorted(shard) for shard in shards]

    def test_take(self, root: Path) -> None:
        jobs = load_jobs(Selection(("config-b200.txt",), root), NO_GPU).jobs
        parts = [take(jobs, {"one/a": 900.0}, Shard(index, 3)) for index in (1, 2, 3)]
        assert sorted(job.id for part in parts for job in part) == sorted(job.id for job in jobs)
        assert take(jobs[:1], {}, Shard(2, 2)) == []

    @pytest.mark.parametrize("text", ["5/4", "0/4", "1/0", "-1/4", "1", "a/b", "", "1/4/2"])
    def test_shards_that_do_not_exist(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--shard"):
            parse_shard(text)

    def test_the_form_of_a_shard(self) -> None:
        assert parse_shard("2/4") == Shard(2, 4)
        assert str(parse_shard(" 1 / 1 ")) == "1/1"

    def test_bad_durations_are_ignored_with_a_notice(self, tmp_path: Path) -> None:
        path = tmp_path / "durations.json"
        path.write_text('{"a": 60, "b": NaN, "c": -1, "d": "9", "e": true, "f": Infinity, "g": 0}')
        durations, problems = read_durations(path)
        assert durations == {"a": 60.0, "g": 0.0}
        assert sorted(problem.key for problem in problems) == ["b", "c", "d", "e", "f"]
        unknown = unknown_durations(["a"], durations)
        assert "1 recorded durations are of no job here: g" in unknown[0].message

    @pytest.mark.parametrize("content", ["", "[1]", "{", "\xff"])
    def test_a_file_of_nonsense_is_ignored_with_a_notice(
        self, tmp_path: Path, content: str
    ) -> None:
        path = tmp_path / "durations.json"
        path.write_text(content, encoding="latin-1")
        durations, problems = read_durations(path)
        assert durations == {}
        assert [problem.severity for problem in problems] == ["warning"]

    def test_recorded_durations_are_read_back(self, tmp_path: Path) -> None:
        path = tmp_path / "durations.json"
        record_durations(path, {"a": 12.34})
        record_durations(path, {"b": 5.0})
        assert json.loads(path.read_text()) == {"a": 12.3, "b": 5.0}
        assert read_durations(path) == ({"a": 12.3, "b": 5.0}, [])
