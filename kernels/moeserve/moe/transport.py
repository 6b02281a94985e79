"""How tokens reach the ranks that hold their experts, and how the results come back.

Receives this rank's tokens with their routing, returns what this rank's experts have to compute;
then receives their output and returns the sum for this rank's tokens. Three ways: local (every rank
of a TP group has the same tokens), all-gather with reduce-scatter, and all-to-all. Groups are made
in `parallel.py`; the experts run in `dispatch.py`.

Every collective is entered by every rank, whatever its number of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from moeserve.moe.routing import TopK
from moeserve.moe.spec import MoESpec
from moeserve.parallel import Parallel


class Transport(ABC):
    """Prepare and finalise.

    Attributes:
        is_partial: The result is this rank's part of a sum over the TP group.
        is_local: Tokens stay where they are.
        carries_logits: `prepare_logits` works.
    """

    is_partial: bool
    is_local = False
    carries_logits = True

    @abstractmethod
    def prepare(
        self, x: torch.Tensor, topk: TopK, dp_num_tokens: Sequence[int] | None
    ) -> tuple[torch.Tensor, TopK, object]:
        """Tokens [T, H] and choices of this rank to those that its experts see, and a state."""

    def prepare_logits(
        self, x: torch.Tensor, logits: torch.Tensor, dp_num_tokens: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor, object]:
        """The same with router logits [T, E] in place of choices.

        Raises:
            NotImplementedError: This transport needs to know the choices.
        """
        raise NotImplementedError(f"{type(self).__name__} needs ids, not logits")

    @abstractmethod
    def finalise(self, out: torch.Tensor, state: object) -> torch.Tensor:
        """Experts' output to the sum for this rank's tokens, [T, H]."""

    def experts_spec(self, spec: MoESpec) -> MoESpec:
        """The layer as its experts see it."""
        return spec


class Local(Transport):
    """Nothing moves: one rank, or a TP group whose ranks all hold the same tokens."""

    is_local = True

    def __init__(self, parallel: Parallel) -> None:
        self.is_partial = parallel.tp_size > 1

    def prepare(
        self, x: torch.Tensor, topk: TopK, dp_num_tokens: Sequence[int] | None
    ) -> tuple[torch.Tensor, TopK, object]:
        """See `Transport.prepare`."""
        return x, topk, None

    def prepare_logits(
        self, x: torch.Tensor, logits: torch.Tensor, dp_num_tokens: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor, object]:
        """See `Transport.prepare_logits`."""
        return x, logits, None

    def finalise(self, out: torch.Tensor, state: object) -> torch.Tensor:
        """See `Transport.finalise`."""
        return out


class AllGather(Transport):
    """Every rank of the DP group sees all tokens, and computes those of its own experts.

    Rows are padded to the largest rank's number, so that one plain all-gather and one plain
    reduce-scatter do; padding has id -1 and adds nothing.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.is_partial = parallel.tp_size > 1

    def prepare(
        self, x: torch.Tensor, topk: TopK, dp_num_tokens: Sequence[int] | None
    ) -> tuple[torch.Tensor, TopK, object]:
        """See `Transport.prepare`."""
        rows = self._rows(x, dp_num_tokens)
        # Weights travel as int32 beside the ids: one collective less.
        choices = torch.cat([topk.ids, topk.weights.view(torch.int32)], dim=1)
        choices = self._gather(choices, rows, fill=-1)
        ids, bits = choices.chunk(2, dim=1)
        weights = bits.contiguous().view(torch.float32)
        # The fill's bits are a NaN as a float; a slot of nobody weighs nothing.
        weights = torch.where(ids < 0, 0.0, weights)
        return self._gather(x, rows), TopK(weights, ids.contiguous()), (x.shape[0], rows)

    def prepare_logits(
        self, x: torch.Tensor, logits: torch.Tensor, dp_num_tokens: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor, object]:
        """See `Transport.prepare_logits`; padding rows are computed, and cut off at the end."""
        rows = self._rows(x, dp_num_tokens)
        return self._gather(x, rows), self._gather(logits, rows), (x.shape[0], rows)

    def finalise(self, out: torch.Tensor, state: object) -> torch.Tensor:
        """See `Transport.finalise`."""
        assert isinstance(state, tuple)
        num_tokens, rows = state
        part = out.new_empty(rows, out.shape[1])
        dist.reduce_scatter_tensor(part, out.contiguous(), group=self.parallel.dp_group)
        return part[:num_tokens]

    def _rows(self, x: torch.Tensor, dp_num_tokens: Sequence[int] | None) -> int:
        """Rows that each rank contributes: the largest T of the group."""
        if dp_num_tokens is not None:
            return max(dp_num_tokens)
        count = torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.parallel.dp_group)
        return int(count)

    def _gather(self, rows: torch.Tensor, num_rows: int, fill: int = 0) -> torch.Tensor:
        """[T, n] of every rank as [dp · num_rows, n]."""
        if rows.shape[0] < num_rows:
            padding = rows.new_full((num_rows - rows.shape[0], rows.shape[1]), fill)
            rows = torch.cat([rows, padding])
        gathered = rows.new_empty(self.parallel.dp_size * num_rows, rows.shape[1])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=self.parallel.dp_group)
        return gathered


@dataclass(frozen=True)
class _Journey:
    """Where the slots went: what all-to-all needs for the way back."""

    order: torch.Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int
    share: slice
    top_k: int


class AllToAll(Transport):
    """Each slot travels to the rank that owns its expert, and its result travels back.

    The ranks of a TP group hold the same tokens, so each takes its share of them, and the shares
    are put together at the end: the result is complete on every rank.
    """

    is_partial = False
    carries_logits = False

    def __init__(self, spec: MoESpec, parallel: Parallel) -> None:
        self.parallel = parallel
        owners = [
            rank
            for rank in range(spec.ep_size)
            for _ in range(replace(spec, ep_rank=rank).num_local_experts)
        ]
        self.owner_of = torch.tensor(owners, dtype=torch.int64)

    def experts_spec(self, spec: MoESpec) -> MoESpec:
        """A slot that travelled is a token with one expert."""
        routing = replace(spec.routing, top_k=1, num_groups=1, top_k_groups=1)
        return replace(spec, routing=routing)

    def prepare(
        self, x: torch.Tensor, topk: TopK, dp_num_tokens: Sequence[int] | None
    ) -> tuple[torch.Tensor, TopK, object]:
        """See `Transport.prepare`."""
        share = _share(x.shape[0], self.parallel)
        rows, ids, weights = x[share], topk.ids[share], topk.weights[share]
        top_k = ids.shape[1]
        owners = self.owner_of.to(x.device)[ids.reshape(-1).long()]
        owners, order = owners.sort(stable=True)
        counts = torch.bincount(owners, minlength=self.parallel.ep_size)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.parallel.ep_group)
        journey = _Journey(order, counts.tolist(), arriving.tolist(), x.shape[0], share, top_k)
        moved = self._send(rows[order // top_k], journey.sent, journey.received)
        pairs = torch.stack(
            [ids.reshape(-1)[order], weights.reshape(-1)[order].view(torch.int32)], dim=1
        )
        pairs = self._send(pairs, journey.sent, journey.received)
        moved_weights = pairs[:, 1:].contiguous().view(torch.float32)
        return moved, TopK(moved_weights, pairs[:, :1].contiguous()), journey

    def finalise(self, out: torch.Tensor, state: object) -> torch.Tensor:
        """See `Transport.finalise`."""
        assert isinstance(state, _Journey)
        back = self._send(out, state.received, state.sent)
        slots = torch.empty_like(back)
        slots[state.order] = back
        mine = slots.view(-1, state.top_k, out.shape[1]).float().sum(1).to(out.dtype)
        if self.parallel.tp_size == 1:
            return mine
        whole = out.new_zeros(state.num_tokens, out.shape[1])
        whole[state.share] = mine
        return self.parallel.all_reduce_tp(whole)

    def _send(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(
            arrived, rows.contiguous(), received, sent, group=self.parallel.ep_group
        )
        return arrived


def _share(num_tokens: int, parallel: Parallel) -> slice:
    """The rows that this TP rank sends; the shares of a group are disjoint and cover all."""
    first = num_tokens * parallel.tp_rank // parallel.tp_size
    return slice(first, num_tokens * (parallel.tp_rank + 1) // parallel.tp_size)


def make_transport(spec: MoESpec, parallel: Parallel) -> Transport:
    """The transport for a layer: local unless DP ranks share experts."""
    if parallel.ep_size == 1:
        return Local(parallel)
    if parallel.dispatch == "alltoall":
        return AllToAll(spec, parallel)
    return AllGather(parallel) if parallel.dp_size > 1 else Local(parallel)
