"""The parallel layout that a config's server arguments ask for.

Receives a config, returns a frozen `Layout`. Spellings of the flags are `server_args.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from evalsuite.config import EvalConfig
from evalsuite.server_args import (
    DP_ATTENTION_FLAGS,
    DP_FLAGS,
    EP_FLAGS,
    EP_SIZE_FLAGS,
    PP_FLAGS,
    TP_FLAGS,
    has_switch,
    parallel_size,
)


@dataclass(frozen=True)
class Layout:
    """Parallel layout read from the server arguments.

    Attributes:
        tp: Tensor-parallel size.
        dp: Data-parallel size.
        pp: Pipeline-parallel size.
        is_ep: Whether experts are spread over all TP x DP ranks.
        is_dp_inside_tp: Whether DP ranks share the TP ranks' accelerators (SGLang's
            data-parallel attention) and need none of their own.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    is_ep: bool = False
    is_dp_inside_tp: bool = False

    @property
    def num_gpus(self) -> int:
        """Accelerators one server needs."""
        return self.tp * self.pp * (1 if self.is_dp_inside_tp else self.dp)

    def __str__(self) -> str:
        """`TP2+EP`, `DP2`, `TP2 x DP4`; `TP1` for a single device."""
        sizes = [("DP", self.dp), ("PP", self.pp)]
        parts = [f"{name}{size}" for name, size in sizes if size > 1]
        if self.tp > 1 or not parts:
            parts.insert(0, f"TP{self.tp}")
        return " x ".join(parts) + ("+EP" if self.is_ep else "")


def layout_of(config: EvalConfig) -> Layout:
    """Read TP, DP, PP and EP from the server arguments.

    Raises:
        ValueError: A size is no positive number (a loaded config was checked for that).
    """
    argv = config.server_args
    return Layout(
        tp=parallel_size(argv, TP_FLAGS),
        dp=parallel_size(argv, DP_FLAGS),
        pp=parallel_size(argv, PP_FLAGS),
        is_ep=has_switch(argv, EP_FLAGS) or parallel_size(argv, EP_SIZE_FLAGS) > 1,
        is_dp_inside_tp=has_switch(argv, DP_ATTENTION_FLAGS),
    )
