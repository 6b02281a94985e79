"""Steps on a GPU: numbers over in one copy, a graph or an eager pass, greedy tokens back.

Receives a `StepPlan` and the block table; returns a `DeviceStep`, whose tokens can be asked for
later: the next step may be launched before that, because it takes the tokens of this one from the
device (`last_tokens`). What a step computes is the model's business, what comes after it the
engine's; steps on a CPU are `host_steps.py`, where `Step` is described.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.batch import ForwardBatch, SharedStep, host_batch, logits_rows
from moeserve.engine.scheduler import StepPlan
from moeserve.layers.attention_triton import (
    TritonPagedAttention,
    TritonPlan,
    find_shared_prefix,
    no_shared_prefix,
)
from moeserve.layers.step_inputs import SampledRows, StepSizes, StepViews, pack
from moeserve.runner.compile_ahead import compile_ahead, sample_steps
from moeserve.runner.cuda_graph import Capturable, CudaCapture, GraphLadder, graph_sizes
from moeserve.runner.sampler import Sampled, sample
from moeserve.triton_kernels.sample import argmax

if TYPE_CHECKING:
    from moeserve.engine.sequence import Sequence
    from moeserve.layers.attention import Array
    from moeserve.runner.compile_process import CompileProcess
    from moeserve.runner.model_runner import ModelRunner

# Host buffers in rotation: the copy of one step may still run while the next is prepared.
_NUM_STAGES = 3


@dataclass(frozen=True)
class StepLimits:
    """Largest step, for buffers: its sequences, its tokens, and pages of one sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_pages: int


@dataclass(frozen=True)
class DeviceStep:
    """See `Step`.

    Attributes:
        logits: [R, V] in the model's dtype, valid until the next launch.
        tokens: [at least R] int32 on the host, valid after `event`; -1 for a bad row.
        event: Recorded behind the step; None without a GPU.
        owner: Told about tokens that the host chooses.
    """

    rows: list[Sequence]
    hidden: Tensor | None
    may_wait: bool
    logits: Tensor
    tokens: Tensor
    event: Any
    owner: DeviceSteps

    def take(self, chosen: Sampled) -> None:
        """See `Step.take`; waits, so that no more steps are in flight than there are stages."""
        if self.event is not None:
            self.event.synchronize()
        self.owner.set_last_tokens(self.rows, chosen.tokens)

    def sampled(self) -> Sampled | None:
        """See `Step.sampled`."""
        if self.event is not None:
            self.event.synchronize()
        if not self.rows:
            return None
        if not all(row.is_greedy for row in self.rows):
            chosen = sample(self.logits.float(), self.rows)
            self.owner.set_last_tokens(self.rows, chosen.tokens)
            return chosen
        tokens: list[int] = self.tokens[: len(self.rows)].tolist()
        bad = frozenset(i for i, token in enumerate(tokens) if token < 0)
        return Sampled(tokens, bad, None, {})


class DeviceSteps:
    """Static buffers, graphs and the launch of each step."""

    def __init__(self, runner: ModelRunner, limits: StepLimits, *, has_graphs: bool) -> None:
        assert isinstance(runner.attention, TritonPagedAttention)
        self.runner = runner
        self.attention = runner.attention
        self.limits = limits
        device = self.device = runner.options.device
        self._is_cuda = device.type == "cuda"
        max_seqs, max_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self.last_tokens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        largest = StepSizes(max_tokens, max_seqs, max_seqs, max_tokens)
        room = largest.capacity((max_seqs, limits.max_pages))
        self._numbers = torch.zeros(room, dtype=torch.int32, device=device)
        self._stages = [self._host_buffer(room) for _ in range(_NUM_STAGES)]
        self._arrays: list[Array] = [stage.numpy() for stage in self._stages]
        self._tokens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._results = [self._host_buffer(max_seqs) for _ in range(_NUM_STAGES)]
        self._logits = torch.empty(
            max_seqs, runner.spec.vocab_size, dtype=runner.options.dtype, device=device
        )
        # One tensor for all layers, so that their counts come back in one copy.
        layers = runner.model.moe_layers()
        self._nan_rows = torch.zeros(len(layers), dtype=torch.int64, device=device)
        self._nan_rows_seen = torch.zeros(len(layers), dtype=torch.int64, pin_memory=self._is_cuda)
        for index, layer in enumerate(layers):
            layer.kernel.nan_rows = self._nan_rows[index : index + 1]
        self._count = 0
        self.num_padding_rows = 0
        self.graphs: GraphLadder | None = None
        if has_graphs:
            capture = CudaCapture() if self._is_cuda else _Repeat
            self.graphs = GraphLadder(graph_sizes(max_seqs), self._decode_step, capture)

    def warm_up(self, compiling: CompileProcess | None = None) -> None:
        """Compile what steps of any size will run, then capture the graphs."""
        if self._is_cuda and self.runner.is_triton_only:
            limits, captured = self.limits, self.graphs.sizes if self.graphs is not None else ()
            steps = sample_steps(limits.max_num_seqs, limits.max_num_batched_tokens, captured)
            num_layers = self.runner.num_sample_layers
            compile_ahead([partial(self._eager, *step, num_layers) for step in steps], compiling)
        if self.graphs is not None:
            self.graphs.capture_all()

    def _host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda)

    @torch.inference_mode()
    def launch(
        self, plan: StepPlan, block_table: Array, shared_step: SharedStep | None = None
    ) -> DeviceStep:
        """Enqueue a step; returns before it has run.

        Args:
            plan: Who runs. A token id of -1 - r is what the step before chose for row r.
            block_table: [max_num_seqs, P] int32 of the scheduler.
            shared_step: What the DP ranks that share experts run.
        """
        host = host_batch(plan, block_table, self.attention.page_size)
        rows = plan.sampled()
        size = self._graph_size(plan, shared_step)
        if size is None:
            sizes = self.attention.sizes(host, len(rows))
        else:
            sizes = StepSizes(size, size, size)
            self.num_padding_rows += size - len(rows)
        # A prefix taken apart wants a graph of its own, captured when it is first met: a run with
        # collectives that other DP ranks would know nothing of.
        shared = find_shared_prefix(host) if shared_step is None else no_shared_prefix(host)
        stage = self._count % _NUM_STAGES
        self._count += 1
        places = np.array([seq.row for seq in rows], dtype=np.int32)
        sampled = SampledRows(places, logits_rows(plan, host.cu_seqlens_q))
        numbers, attention = self._arrays[stage], self.attention
        used = pack(host, sizes, shared, attention.block_tokens, numbers, sampled)
        self._numbers[:used].copy_(self._stages[stage][:used], non_blocking=True)
        has_shared = shared.num_tokens > 0
        attention.prepare(host, sizes, has_shared=has_shared, in_graph=size is not None)
        hidden = None
        if size is None:
            counts = shared_step.num_tokens if shared_step else None
            hidden = self._eager(sizes, has_shared, dp_num_tokens=counts)
        else:
            self._replay(size, has_shared)
        return self._finished(plan, rows, hidden, self._results[stage])

    def _graph_size(self, plan: StepPlan, shared: SharedStep | None) -> int | None:
        """Rows of the graph for a step, None for none: one answer on all ranks that share it."""
        if self.graphs is None or plan.prefills:
            return None
        if shared is None:
            return self.graphs.size_for(len(plan.decodes))
        return self.graphs.size_for(max(shared.num_tokens)) if shared.is_decode_only else None

    def idle(self, shared: SharedStep) -> None:
        """See `Steps.idle`."""
        size = self._graph_size(StepPlan([], []), shared)
        self.runner.idle(shared.num_tokens if size is None else (size,) * len(shared.num_tokens))

    def num_nan_rows(self) -> int:
        """See `Steps.num_nan_rows`."""
        return int(self._nan_rows_seen.sum())

    def _finished(
        self, plan: StepPlan, rows: list[Sequence], hidden: Tensor | None, result: Tensor
    ) -> DeviceStep:
        """Start the copy of the tokens and mark the step's end."""
        if rows:
            result[: len(rows)].copy_(self._tokens[: len(rows)], non_blocking=True)
        self._nan_rows_seen.copy_(self._nan_rows, non_blocking=True)
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        may_wait = all(row.is_greedy for row in rows) and not any(
            seq.needs_prompt_logprobs for seq, _ in plan.prefills
        )
        return DeviceStep(rows, hidden, may_wait, self._logits[: len(rows)], result, event, self)

    def _replay(self, size: int, has_shared: bool) -> None:
        assert self.graphs is not None
        if not self.graphs.has(size, has_shared):
            # Capturing runs the step once, and its tokens must not become the next one's input.
            kept = self.last_tokens.clone()
            self.graphs.get(size, has_shared)
            self.last_tokens.copy_(kept)
        self.graphs.get(size, has_shared).replay()

    def set_last_tokens(self, rows: list[Sequence], tokens: list[int]) -> None:
        """Tell the device which tokens the host chose, where it was not the largest logit's."""
        if rows:
            places = torch.tensor([seq.row for seq in rows], device=self.device)
            values = torch.tensor(tokens, dtype=torch.int32, device=self.device)
            self.last_tokens[places] = values

    def _batch(
        self, sizes: StepSizes, has_shared: bool, dp_num_tokens: tuple[int, ...] | None
    ) -> tuple[ForwardBatch, TritonPlan]:
        views = StepViews(self._numbers, sizes)
        attention = self.attention.plan_of(views, sizes, has_shared)
        batch = ForwardBatch(
            token_ids=views.token_ids,
            positions=views.positions,
            slot_mapping=views.slots,
            logits_rows=views.logits_rows,
            num_decodes=sizes.num_decodes,
            num_padding_tokens=0,
            attention=attention,
            last_tokens=self.last_tokens,
            dp_num_tokens=dp_num_tokens,
        )
        return batch, attention

    def _eager(
        self,
        sizes: StepSizes,
        has_shared: bool,
        num_layers: int | None = None,
        dp_num_tokens: tuple[int, ...] | None = None,
    ) -> Tensor:
        """One pass over the step's numbers; leaves logits and tokens in their buffers."""
        if dp_num_tokens is None and (dp_size := self.runner.parallel.dp_size) > 1:
            # In a graph, or before serving: every rank has as many.
            dp_num_tokens = (sizes.num_tokens,) * dp_size
        batch, attention = self._batch(sizes, has_shared, dp_num_tokens)
        hidden = self.runner.hidden(batch, num_layers)
        R = sizes.num_sampled
        if R:
            wanted = hidden
            if sizes.num_decodes != sizes.num_tokens:
                wanted = hidden.index_select(0, batch.logits_rows)
            logits = self.runner.model.raw_logits(wanted, self._logits[:R])
            argmax(logits, attention.views.places, self._tokens, self.last_tokens)
        return hidden

    def _decode_step(self, size: int, has_shared: bool) -> Capturable:
        """What a graph of `size` rows holds."""
        sizes = StepSizes(size, size, size)
        self.attention.prepare_capture(size, self.limits.max_pages)

        @torch.inference_mode()
        def run(num_layers: int | None = None) -> None:
            self._eager(sizes, has_shared, num_layers)

        return Capturable(run, partial(run, self.runner.num_sample_layers))


@dataclass(frozen=True)
class _Repeat:
    """A captured step where nothing can be captured: it runs again."""

    step: Capturable

    def replay(self) -> None:
        """Run it."""
        self.step.run()
