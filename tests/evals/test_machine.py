"""What this machine is, asked through a scripted driver, and why a job cannot run on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from evalsuite.hardware import Hardware, load_hardware
from evalsuite.lists import configs_root, hardware_file
from evalsuite.machine import Machine, Probe, detect_machine, detect_pool, skip_reason

NO_GPU = Machine(missing="nvidia-smi is not installed")
B200 = Machine("nvidia", "sm100", 8, 179.0, "NVIDIA B200")


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware(hardware_file(configs_root()))


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
