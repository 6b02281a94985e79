"""Owns the model and its KV cache on one rank; runs one `ForwardBatch` at a time.

Receives batches, returns hidden states and logits. Choosing tokens is `sampler.py`, filling
parameters `weights.py`, the order of steps `engine/scheduler.py`; `engine/host_steps.py` and
`engine/device_steps.py` run the model, the latter through the graphs of `cuda_graph.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moeserve.errors import Unsupported, UsageError
from moeserve.layers.attention import AttentionBackend, AttentionShape
from moeserve.layers.attention_native import NativePagedAttention
from moeserve.layers.attention_native import obstacle as native_obstacle
from moeserve.layers.attention_torch import DEFAULT_PAGE_SIZE, TorchPagedAttention
from moeserve.layers.linear import Projection, fixed_projection
from moeserve.models import model_class
from moeserve.models.base import BuildContext, Model
from moeserve.models.config import ModelSpec
from moeserve.models.shards import local_spec
from moeserve.moe.oracle import select_unquantized_moe_backend
from moeserve.moe.platforms import detect_platform
from moeserve.moe.spec import MoESpec, Plan
from moeserve.parallel import Parallel
from moeserve.runner.weights import fill_dummy, load_safetensors

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch
    from moeserve.engine.config import EngineConfig

logger = logging.getLogger(__name__)
# Why an installed FlashInfer is not the choice of "auto"; docs/performance.md has the figures.
SLOWER_FLASHINFER = "slower on the GPUs measured; --attention-backend flashinfer takes it"
# Logits of this many rows at a time: a scored prompt times a large vocabulary is gigabytes.
LOGITS_ROWS = 512


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


@dataclass(frozen=True)
class IdleBatch:
    """What an expert layer reads of a batch, where this rank has no tokens.

    Attributes:
        dp_num_tokens: T of every DP rank.
        num_padding_tokens: None of this rank's.
    """

    dp_num_tokens: tuple[int, ...]
    num_padding_tokens: int = 0


class ModelRunner:
    """Model, weights, cache."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, options: RunnerOptions, parallel: Parallel
    ) -> None:
        # As this rank sees it: heads and widths are its own.
        self.spec = local_spec(spec, parallel)
        self.options = options
        self.parallel = parallel
        self.attention = _attention_backend(config, self.spec, options)
        self.moe_spec = _moe_spec(config, spec, options, parallel)
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
            projection=_projection(config, options),
        )
        with options.device:
            module = model_class(spec.architecture)(context).eval()
        self.model = cast(Model, module)
        self.loaded_bytes = 0
        self._load(config)
        self.num_pages = 0

    def _load(self, config: EngineConfig) -> None:
        destinations, shards = self.model.destinations(), self.model.shards()
        if config.load_format == "dummy":
            fill_dummy(destinations, config.seed, shards)
        else:
            self.loaded_bytes = load_safetensors(Path(config.model), destinations, shards)
        for layer in self.model.moe_layers():
            layer.process_weights()

    @property
    def is_triton_only(self) -> bool:
        """Whether nothing but Triton and plain products runs, in steps of any size."""
        plan = self.moe_plan
        is_triton = plan is None or all(name == "triton" for _, name in plan.ranges)
        return is_triton and self.attention.name == "triton"

    @property
    def num_sample_layers(self) -> int:
        """Leading layers that between them launch every kernel of the model.

        Those before the first layer with experts, that one, and one that takes what it leaves.
        """
        flags = self.spec.is_moe_layer
        first = flags.index(True) if True in flags else 0
        return min(len(flags), first + 2)

    def allocate_cache(self, num_pages: int) -> None:
        """Give every attention layer its KV cache."""
        self.num_pages = num_pages
        for layer in self.model.attention_layers():
            layer.cache = self.attention.allocate(num_pages)

    def step_bytes(self) -> int:
        """Bytes that the largest step takes beside weights, cache and the experts' scratch.

        Counted where most is alive at once, with room for the allocator: the residual stream, the
        normed rows, the fused projection and attention's result, or the experts' rows; the router's
        part and a split attention's float32 parts are small beside them.
        """
        spec, width = self.spec, self.options.dtype.itemsize
        heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
        dense = 3 * spec.intermediate_size if spec.num_moe_layers < spec.num_layers else 0
        row = 5 * spec.hidden_size + heads * spec.head_dim + dense
        return 2 * row * width * self.options.max_num_batched_tokens

    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.attention.page_bytes() * self.spec.num_layers

    def clear_pages(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN: a weight of zero does not silence one."""
        for layer in self.model.attention_layers():
            self.attention.clear(layer.cache, pages)

    def hidden(self, batch: ForwardBatch, num_layers: int | None = None) -> Tensor:
        """Hidden states [T, H] of a batch, after the leading layers where not all are meant."""
        return self.model.forward(batch, num_layers)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits [R, V] float32 of some rows of [T, H]."""
        if rows.shape[0] == hidden.shape[0]:
            return self.model.logits(hidden)
        return self.model.logits(hidden.index_select(0, rows))

    @torch.inference_mode()
    def idle(self, dp_num_tokens: tuple[int, ...]) -> None:
        """Take part in a step of other DP ranks with no tokens: experts are all that they share."""
        batch = IdleBatch(dp_num_tokens)
        options = self.options
        nothing = torch.empty(0, self.spec.hidden_size, dtype=options.dtype, device=options.device)
        for layer in self.model.moe_layers():
            layer.forward(nothing, batch)

    def nan_rows(self) -> int:
        """Router rows with a NaN since start; waits for the device."""
        return sum(layer.nan_rows for layer in self.model.moe_layers())

    def padding_rows(self) -> int:
        """Rows of padding since start; every layer sees the same ones."""
        layers = self.model.moe_layers()
        return layers[0].padding_rows if layers else 0


def _attention_backend(
    config: EngineConfig, spec: ModelSpec, options: RunnerOptions
) -> AttentionBackend:
    asked, device = config.attention_backend, options.device.type
    known = ("auto", "flashinfer", "native", "torch", "triton")
    if asked not in known:
        raise UsageError(f"attention backend {asked!r} is unknown; known: {', '.join(known)}")
    name = asked if asked != "auto" else ("native" if device == "cpu" else "triton")
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, options.dtype)
    torch_reason = "asked for by name"
    if name == "native":
        obstacle = native_obstacle(shape, options.page_size)
        if device != "cpu":
            obstacle = f"it is for CPUs, not for device {device!r}"
        if obstacle and asked == name:
            raise Unsupported(f"attention backend 'native': {obstacle}")
        if not obstacle and not config.is_deterministic:
            reason = "asked for by name" if asked == name else "the fastest for CPUs"
            return NativePagedAttention(shape, reason)
        name, torch_reason = "torch", f"native: {obstacle}"
    if name == "torch":
        if device != "cpu":
            raise Unsupported(f"attention backend 'torch' is for CPUs; device {device!r} has none")
        if config.is_deterministic:
            raise Unsupported(
                "deterministic mode: attention backend 'torch' pads a batch to its longest "
                "sequence, so a result depends on its neighbours"
            )
        return TorchPagedAttention(shape, options.page_size or DEFAULT_PAGE_SIZE, torch_reason)
    return _gpu_attention(config, options, shape, name)


def _gpu_attention(
    config: EngineConfig, options: RunnerOptions, shape: AttentionShape, name: str
) -> AttentionBackend:
    """Our own kernels, or FlashInfer's where they are asked for."""
    # Triton is imported only where it is used: a CPU server never needs it.
    from triton import knobs

    from moeserve.layers import attention_flashinfer
    from moeserve.layers.attention_triton import TritonPagedAttention

    device = options.device
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise Unsupported(f"attention backend {name!r} wants a GPU (or Triton's interpreter)")
    found = attention_flashinfer.obstacle(shape, is_deterministic=config.is_deterministic)
    if name == "flashinfer":
        if found:
            raise Unsupported(f"attention backend 'flashinfer': {found}")
        return attention_flashinfer.FlashInferPagedAttention(
            shape, options.page_size, device, reason="asked for by name"
        )
    reason = "asked for by name"
    if config.attention_backend == "auto":
        reason = f"the backend for GPUs; flashinfer: {found or SLOWER_FLASHINFER}"
    return TritonPagedAttention(
        shape,
        options.page_size,
        device,
        is_deterministic=config.is_deterministic,
        reason=reason,
    )


def _projection(config: EngineConfig, options: RunnerOptions) -> Projection | None:
    """The library's products, or those whose bits do not depend on the batch."""
    if config.is_deterministic and options.device.type != "cpu":
        return fixed_projection(options.device)
    return None


def _moe_spec(
    config: EngineConfig, spec: ModelSpec, options: RunnerOptions, parallel: Parallel
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
        is_deterministic=config.is_deterministic,
        needs_graph=options.device.type == "cuda" and not config.enforce_eager,
        max_num_tokens=options.max_num_batched_tokens,
    )
