"""Owns the model and its KV cache on one rank; runs one `ForwardBatch` at a time.

Receives batches from `engine.py`, returns hidden states and logits. Choosing tokens is
`sampler.py`, filling parameters `weights.py`, the order of steps `engine/scheduler.py`. Decode
batches may later be replayed from captured graphs: `decode_graphs` is that seam.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from moeserve.errors import Unsupported, UsageError
from moeserve.layers.attention import AttentionBackend, AttentionShape
from moeserve.layers.attention_torch import DEFAULT_PAGE_SIZE, TorchPagedAttention
from moeserve.models import model_class
from moeserve.models.base import BuildContext, Model
from moeserve.models.config import ModelSpec
from moeserve.moe.oracle import select_unquantized_moe_backend
from moeserve.moe.platforms import detect_platform
from moeserve.moe.spec import MoESpec, Plan
from moeserve.parallel import Parallel
from moeserve.runner.weights import fill_dummy, load_safetensors

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch
    from moeserve.engine.config import EngineConfig

logger = logging.getLogger(__name__)
# Logits of this many rows at a time: a scored prompt times a large vocabulary is gigabytes.
LOGITS_ROWS = 512


class DecodeGraphs(Protocol):
    """Captured forward passes of decode batches."""

    def covers(self, batch: ForwardBatch) -> bool:
        """Whether a captured graph fits the batch."""
        ...

    def replay(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H], equal to the eager ones."""
        ...


@dataclass(frozen=True)
class RunnerOptions:
    """What is left of the engine's options once "auto" is resolved.

    Attributes:
        device: Where the model runs.
        dtype: Of weights, activations and cache.
        max_model_len: Tokens of one sequence.
        max_num_batched_tokens: Largest T.
        page_size: Tokens a KV page.
    """

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int


class ModelRunner:
    """Model, weights, cache."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, options: RunnerOptions, parallel: Parallel
    ) -> None:
        self.spec = spec
        self.options = options
        self.attention = _attention_backend(config, spec, options)
        self.moe_spec = _moe_spec(spec, options, parallel, config.is_deterministic)
        self.moe_plan: Plan | None = None
        if self.moe_spec is not None:
            self.moe_plan = select_unquantized_moe_backend(
                self.moe_spec, config.moe_backend, self.moe_spec.platform, config.env
            )
        context = BuildContext(
            spec=spec,
            dtype=options.dtype,
            device=options.device,
            max_positions=options.max_model_len,
            attention=self.attention,
            moe_spec=self.moe_spec,
            moe_plan=self.moe_plan,
            parallel=parallel,
        )
        with options.device:
            module = model_class(spec.architecture)(context).eval()
        self.model = cast(Model, module)
        self.decode_graphs: DecodeGraphs | None = None
        self._load(config)
        self.num_pages = 0

    def _load(self, config: EngineConfig) -> None:
        destinations = self.model.destinations()
        if config.load_format == "dummy":
            fill_dummy(destinations, config.seed)
        else:
            load_safetensors(Path(config.model), destinations)
        for layer in self.model.moe_layers():
            layer.process_weights()

    def allocate_cache(self, num_pages: int) -> None:
        """Give every attention layer its KV cache."""
        self.num_pages = num_pages
        for layer in self.model.attention_layers():
            layer.cache = self.attention.allocate(num_pages)

    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.attention.page_bytes() * self.spec.num_layers

    def clear_pages(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN: a weight of zero does not silence one."""
        for layer in self.model.attention_layers():
            self.attention.clear(layer.cache, pages)

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H] of a batch."""
        graphs = self.decode_graphs
        if graphs is not None and graphs.covers(batch):
            return graphs.replay(batch)
        return self.model.forward(batch)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits [R, V] float32 of some rows of [T, H]."""
        if rows.shape[0] == hidden.shape[0]:
            return self.model.logits(hidden)
        return self.model.logits(hidden.index_select(0, rows))

    def nan_rows(self) -> int:
        """Router rows with a NaN since start."""
        return sum(int(getattr(layer, "nan_rows", 0)) for layer in self.model.moe_layers())

    def padding_rows(self) -> int:
        """Rows of padding since start; every layer sees the same ones."""
        layers = self.model.moe_layers()
        return layers[0].padding_rows if layers else 0


def _attention_backend(
    config: EngineConfig, spec: ModelSpec, options: RunnerOptions
) -> AttentionBackend:
    known = ("auto", TorchPagedAttention.name)
    if config.attention_backend not in known:
        raise UsageError(
            f"attention backend {config.attention_backend!r} is unknown; known: {', '.join(known)}"
        )
    if options.device.type != "cpu":
        raise Unsupported(f"no attention backend for device {options.device.type!r} in this build")
    if config.is_deterministic:
        raise Unsupported(
            "deterministic mode: attention backend 'torch' pads a batch to its longest sequence, "
            "so a result depends on its neighbours"
        )
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, options.dtype)
    return TorchPagedAttention(shape, options.page_size or DEFAULT_PAGE_SIZE)


def _moe_spec(
    spec: ModelSpec, options: RunnerOptions, parallel: Parallel, is_deterministic: bool
) -> MoESpec | None:
    if not spec.num_moe_layers:
        return None
    return MoESpec(
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.moe_intermediate_size // parallel.moe_tp_size,
        routing=spec.routing,
        dtype=options.dtype,
        ep_size=parallel.ep_size,
        ep_rank=parallel.ep_rank,
        tp_size=parallel.moe_tp_size,
        dp_size=parallel.dp_size,
        platform="cpu" if options.device.type == "cpu" else detect_platform(),
        is_deterministic=is_deterministic,
        max_num_tokens=options.max_num_batched_tokens,
    )
