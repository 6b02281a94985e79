"""`configs/hardware.yaml` -> `Pool`: what a pool of machines has and how CI reaches it.

Receives the path of the hardware file, returns frozen pools by name. What a job needs of a
pool is computed in `jobs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pool:
    """One pool of equal machines.

    Attributes:
        name: "b200", "h100", "cpu", ... as in `config-<name>.txt`.
        arch: "sm100", "sm90", "gfx942", "cpu", ...
        num_gpus: Accelerators per node; 0 for a CPU pool.
        memory_gib: Memory of one accelerator in GiB (of the host for a CPU pool).
        vendor: "nvidia", "amd", "intel", "google" or "cpu".
        ci: Provider-specific routing, e.g. {"buildkite": {"queue": ...}, "github": {"runs_on": [...]}}.
        timeout_minutes: Upper limit of one CI step on this pool.
    """

    name: str
    arch: str
    num_gpus: int
    memory_gib: float
    vendor: str
    ci: dict[str, dict[str, object]]
    timeout_minutes: int
