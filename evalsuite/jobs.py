"""`EvalConfig` x `Pool` -> `EvalJob`: a unique id, what it needs, and why it cannot run here.

Receives configs (from `lists.py` and `config.py`) and a pool; returns frozen jobs. Starting
a server for a job is `engines/` and `server.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evalsuite.config import EvalConfig
from evalsuite.hardware import Pool


@dataclass(frozen=True)
class Layout:
    """Parallel layout read from the server arguments.

    Attributes:
        tp: Tensor-parallel size.
        dp: Data-parallel size.
        pp: Pipeline-parallel size.
        is_ep: Whether experts are spread over all TP x DP ranks.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    is_ep: bool = False

    @property
    def num_gpus(self) -> int:
        """Accelerators one server needs."""
        return self.tp * self.dp * self.pp


@dataclass(frozen=True)
class EvalJob:
    """One config on one pool.

    Attributes:
        id: "<suite>/<file stem>", unique in a run; the pytest id.
        suite: Folder name below `configs/`.
        path: The YAML file.
        config: Its content, command-line overrides applied.
        pool: The pool it is listed for, None for an unknown pool or a bare file.
        layout: TP/DP/PP/EP from the server arguments.
        skip_reason: Why it cannot run on this machine, "" if it can.
    """

    id: str
    suite: str
    path: Path
    config: EvalConfig
    pool: Pool | None
    layout: Layout
    skip_reason: str = ""
