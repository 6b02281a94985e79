"""The grid of ranks (dp, tp, ep) and its process groups; the only file that makes any.

Receives the sizes of the two axes, returns a `Parallel` that layers carry. One arange, reshaped to
[dp, tp], is the whole layout: a row is a TP group, a column a DP group, and with expert parallelism
the experts are spread over all of it. Without it, rows never meet: each is a world of its own. The
processes are started by `engine/ranks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

Dispatch = Literal["allgather_reducescatter", "alltoall"]
# Of one collective, the first of which waits for the slowest rank to load its weights. Steps that
# hang are found much sooner, by `engine/board.py`.
COLLECTIVE_LIMIT = timedelta(hours=1)


@dataclass(frozen=True)
class Place:
    """One rank's seat in the grid, and where it meets the others. The default is a single rank.

    Attributes:
        dp_size: Data-parallel ranks.
        dp_rank: This one's.
        tp_size: Tensor-parallel ranks.
        tp_rank: This one's.
        is_expert_parallel: See `Parallel`.
        store: File through which the ranks that meet find each other; "" where none do.
    """

    dp_size: int = 1
    dp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    is_expert_parallel: bool = False
    store: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks of the grid."""
        return self.dp_size * self.tp_size

    @property
    def rank(self) -> int:
        """This one's number in the grid, dp-major."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """Ranks that meet this one in collectives, itself included."""
        return self.num_ranks if self.is_expert_parallel else self.tp_size

    @property
    def label(self) -> str:
        """For logs and messages."""
        return f"rank {self.rank} (dp {self.dp_rank}, tp {self.tp_rank})"


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the grid. The default is a single rank.

    Attributes:
        dp_size: Data-parallel ranks.
        dp_rank: This one's.
        tp_size: Tensor-parallel ranks.
        tp_rank: This one's.
        is_expert_parallel: Experts are spread over dp × tp, whole on their rank; otherwise their
            width is cut over tp, and dp ranks are replicas that never meet.
        tp_group: Process group of this row; None where tp is 1.
        dp_group: Process group of this column; None where dp is 1.
        ep_group: Process group of the whole grid; None without expert parallelism.
        dispatch: How tokens reach experts of other DP ranks.
    """

    dp_size: int = 1
    dp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    is_expert_parallel: bool = False
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    dispatch: Dispatch = "allgather_reducescatter"

    @property
    def ep_size(self) -> int:
        """Ranks the experts are spread over."""
        return self.dp_size * self.tp_size if self.is_expert_parallel else 1

    @property
    def ep_rank(self) -> int:
        """This rank among them: dp-major, as in the grid."""
        return self.dp_rank * self.tp_size + self.tp_rank if self.is_expert_parallel else 0

    @property
    def moe_tp_size(self) -> int:
        """Ranks the width of an expert is cut over."""
        return 1 if self.is_expert_parallel else self.tp_size

    def all_reduce_tp(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the TP group, in place; `x` itself on a single rank."""
        if self.tp_group is not None:
            dist.all_reduce(x, group=self.tp_group)
        return x

    def all_gather_tp(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] of every rank of the TP group as [tp, n, ...], with the same bits on each."""
        if self.tp_group is None:
            return x.unsqueeze(0)
        gathered = x.new_empty(self.tp_size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.tp_group)
        return gathered.view(self.tp_size, *x.shape)

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of a number over all ranks that meet."""
        group = self.ep_group or self.tp_group
        if group is None:
            return number
        value = torch.tensor([number], dtype=torch.int64, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group)
        return int(value)


def grid(dp_size: int, tp_size: int) -> torch.Tensor:
    """Global ranks as [dp, tp]."""
    return torch.arange(dp_size * tp_size).reshape(dp_size, tp_size)


def connect(place: Place, device: torch.device) -> Parallel:
    """Meets the other ranks, over NCCL on CUDA devices and gloo on CPUs, and makes the groups.

    Args:
        place: This rank's.
        device: Of its tensors; a CUDA one is the current one.

    Returns:
        The grid as layers see it: rows that never meet are grids of their own.
    """
    if place.world_size == 1:
        return Parallel()
    rank = place.rank if place.is_expert_parallel else place.tp_rank
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(place.store, place.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=place.world_size,
        timeout=COLLECTIVE_LIMIT,
    )
    dp_size = place.dp_size if place.is_expert_parallel else 1
    return make_parallel(dp_size, place.tp_size, place.is_expert_parallel)


def make_parallel(
    dp_size: int,
    tp_size: int,
    is_expert_parallel: bool = False,
    dispatch: Dispatch = "allgather_reducescatter",
) -> Parallel:
    """Makes the groups of an initialised `torch.distributed` world, on every rank alike.

    Args:
        dp_size: Rows of the grid.
        tp_size: Columns of the grid.
        is_expert_parallel: Whether experts are spread over the whole grid.
        dispatch: How tokens reach experts of other DP ranks.

    Raises:
        ValueError: The world is not dp × tp ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != dp_size * tp_size:
        raise ValueError(
            f"data_parallel_size={dp_size} × tensor_parallel_size={tp_size} needs "
            f"{dp_size * tp_size} ranks; the world has {world}"
        )
    if world == 1:
        return Parallel(is_expert_parallel=is_expert_parallel, dispatch=dispatch)
    rank = dist.get_rank()
    ranks = grid(dp_size, tp_size)
    # Every rank makes every group, in the same order: that is torch's rule.
    rows = [dist.new_group(row.tolist()) for row in ranks] if tp_size > 1 else []
    columns = [dist.new_group(column.tolist()) for column in ranks.T] if dp_size > 1 else []
    whole = dist.new_group(ranks.flatten().tolist()) if is_expert_parallel else None
    dp_rank, tp_rank = divmod(rank, tp_size)
    return Parallel(
        dp_size=dp_size,
        dp_rank=dp_rank,
        tp_size=tp_size,
        tp_rank=tp_rank,
        is_expert_parallel=is_expert_parallel,
        tp_group=rows[dp_rank] if rows else None,
        dp_group=columns[tp_rank] if columns else None,
        ep_group=whole,
        dispatch=dispatch,
    )
