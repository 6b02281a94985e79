"""What accelerators this machine has, without importing a GPU library.

Receives a `Probe` (command runner and file-system root, both replaceable), returns a frozen
`Machine`. Whether a job can run on it is `skip_reason`; which jobs there are is `jobs.py`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalsuite.hardware import Hardware, Pool

_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,compute_cap",
    "--format=csv,noheader,nounits",
)
# The driver answers in well under a second; a hung one must not hang the suite.
_SMI_TIMEOUT_S = 20.0
# A machine is a pool's when its memory is within this share of the pool's figure.
_MEMORY_SLACK = 0.1


def run_command(argv: Sequence[str]) -> str:
    """Standard output of a command.

    Raises:
        OSError: It is absent, fails or hangs; the message says which.
    """
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise OSError(f"{argv[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{argv[0]} did not answer within {_SMI_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise OSError(f"{argv[0]} failed: {said[0] if said else f'exit {done.returncode}'}")
    return done.stdout


@dataclass(frozen=True)
class Probe:
    """How the machine is asked.

    Attributes:
        run: Standard output of a command, OSError where there is none.
        root: Root of /proc and /sys.
    """

    run: Callable[[Sequence[str]], str] = run_command
    root: Path = Path("/")


@dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        vendor: "nvidia", "amd" or "cpu".
        arch: "sm90", "gfx942", "cpu", "" if the driver does not tell.
        num_gpus: Accelerators that may be used.
        memory_gib: Memory of the smallest of them, 0 if the driver does not tell.
        device_name: As the driver writes it.
        missing: Why there is no accelerator, "" if there is one.
    """

    vendor: str = "cpu"
    arch: str = "cpu"
    num_gpus: int = 0
    memory_gib: float = 0.0
    device_name: str = ""
    missing: str = ""

    def __str__(self) -> str:
        """One phrase for a message."""
        if not self.num_gpus:
            return f"a machine without a GPU ({self.missing})"
        arch = f", {self.arch}" if self.arch else ""
        return f"{self.num_gpus} x {self.device_name}{arch}"


def detect_machine(probe: Probe | None = None, environ: Mapping[str, str] | None = None) -> Machine:
    """Ask the drivers what this machine has.

    Args:
        probe: How to ask.
        environ: Environment; its device selection (CUDA_VISIBLE_DEVICES, ...) limits the count.
    """
    probe, environ = probe or Probe(), environ or {}
    reasons = []
    for detect in (_detect_nvidia, _detect_amd):
        found = detect(probe)
        if found.num_gpus:
            return _select(found, environ)
        reasons.append(found.missing)
    return Machine(missing="; ".join(reasons))


def _detect_nvidia(probe: Probe) -> Machine:
    try:
        rows = [row.split(",") for row in probe.run(_SMI).splitlines() if row.strip()]
        names = [row[0].strip() for row in rows]
        memory = min(float(row[1]) / 1024 for row in rows)
        major, _, minor = rows[0][2].strip().partition(".")
        return Machine("nvidia", f"sm{int(major)}{int(minor)}", len(rows), memory, names[0])
    except (ValueError, IndexError):
        missing = "nvidia-smi names no GPU"
    except OSError as error:
        missing = str(error)
    # A container may hold the driver's /proc tree without the tool.
    names = []
    for path in sorted(probe.root.glob("proc/driver/nvidia/gpus/*/information")):
        match = re.search(r"^Model:\s*(.+)$", _read(path), re.MULTILINE)
        if match:
            names.append(match.group(1).strip())
    if names:
        return Machine("nvidia", "", len(names), 0.0, names[0])
    return Machine(missing=missing)


def _detect_amd(probe: Probe) -> Machine:
    nodes = []
    for path in sorted(probe.root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        values = dict(re.findall(r"^(\w+) (\d+)$", _read(path), re.MULTILINE))
        target = int(values.get("gfx_target_version", 0))
        if not target:
            continue
        banks = [_read(bank) for bank in path.parent.glob("mem_banks/*/properties")]
        sizes = [int(m.group(1)) for b in banks if (m := re.search(r"size_in_bytes (\d+)", b))]
        # 90402 is major 9, minor 4, stepping 2: gfx942.
        arch = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        nodes.append((arch, sum(sizes) / 2**30))
    if not nodes:
        return Machine(missing="no AMD GPU in /sys/class/kfd")
    return Machine("amd", nodes[0][0], len(nodes), min(m for _, m in nodes), f"AMD {nodes[0][0]}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _select(machine: Machine, environ: Mapping[str, str]) -> Machine:
    """Apply the device selection of the environment."""
    names = {
        "nvidia": ("CUDA_VISIBLE_DEVICES",),
        "amd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    }[machine.vendor]
    for name in names:
        if name not in environ:
            continue
        chosen: list[str] = []
        for word in (part.strip() for part in environ[name].split(",")):
            # The runtime stops at the first entry that names no device.
            is_index = word.lstrip("-").isdigit()
            if not word or (is_index and not 0 <= int(word) < machine.num_gpus):
                break
            chosen.append(word)
        if not chosen:
            return Machine(missing=f"{name}={environ[name]!r} hides every GPU")
        return Machine(
            machine.vendor,
            machine.arch,
            min(len(chosen), machine.num_gpus),
            machine.memory_gib,
            machine.device_name,
        )
    return machine


def detect_pool(machine: Machine, hardware: Hardware) -> Pool | None:
    """The pool that this machine belongs to: by device name, else by architecture and memory."""
    same = [pool for pool in hardware.pools.values() if pool.vendor == machine.vendor]
    if machine.vendor == "cpu":
        return same[0] if same else None
    for pool in same:
        for name in pool.device_names:
            if re.search(rf"\b{re.escape(name)}\b", machine.device_name, re.IGNORECASE):
                return pool
    for pool in same:
        slack = _MEMORY_SLACK * pool.memory_gib
        if pool.arch == machine.arch and abs(pool.memory_gib - machine.memory_gib) <= slack:
            return pool
    return None


def skip_reason(pool: Pool | None, num_gpus: int, machine: Machine, hardware: Hardware) -> str:
    """Why a job cannot run on this machine, "" if it can.

    Args:
        pool: The pool it is listed for, None for a bare file.
        num_gpus: Accelerators it needs.
        machine: This machine.
        hardware: All pools, to name the one that this machine is.
    """
    if pool is None:
        if num_gpus > max(1, machine.num_gpus):
            return f"needs {num_gpus} GPUs; this is {machine}"
        return ""
    if pool.vendor == "cpu":
        return ""
    need = f"needs pool {pool.name} ({num_gpus} x {pool.arch}, {pool.vendor})"
    if not machine.num_gpus:
        return f"{need}; no GPU here: {machine.missing}"
    here = detect_pool(machine, hardware)
    if here is None or here.name != pool.name:
        known = f"pool {here.name}" if here else "no known pool"
        return f"{need}; this machine is {known} ({machine})"
    if machine.num_gpus < num_gpus:
        return f"{need}; only {machine.num_gpus} of its GPUs are visible here"
    return ""
