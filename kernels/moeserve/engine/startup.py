"""Resolves an `EngineConfig` against the model and the machine, and builds the runner.

Receives the frozen options; returns the loaded `ModelRunner` with its KV cache and the limits of
the scheduler. Every "auto" and every 0 is decided here, once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moeserve import presets, tiny
from moeserve.engine.config import (
    CPU_FAIR_TOKENS,
    CPU_STEP_TOKENS,
    GPU_FAIR_TOKENS,
    GPU_STEP_TOKENS,
    EngineConfig,
)
from moeserve.engine.device import choose_device, choose_dtype
from moeserve.engine.host_steps import HostSteps, Steps
from moeserve.engine.scheduler import SchedulerLimits
from moeserve.errors import Unsupported, UsageError
from moeserve.models.config import ModelSpec, load_model_spec
from moeserve.models.shards import check_divides
from moeserve.parallel import Place, connect
from moeserve.runner.model_runner import ModelRunner, RunnerOptions

if TYPE_CHECKING:
    from moeserve.runner.compile_process import CompileProcess

logger = logging.getLogger(__name__)
# KV cache of a CPU server that was given no size: some 260,000 tokens of the embedded model.
CPU_CACHE_BYTES = 1 << 30
# For the driver's own objects, captured graphs and sampling of rows that are not greedy.
GPU_RESERVE_BYTES = 3 << 30
# Below this many hidden values in a step, one CPU thread is faster: the step is many products of
# microseconds each, and a second thread costs more to wake than it saves (measured at H = 128).
MIN_WORK_FOR_THREADS = 512 * 128

# torch's own default: the cores of this machine, or what OMP_NUM_THREADS says.
_ALL_THREADS = torch.get_num_threads()


@dataclass
class CpuThreads:
    """How many CPU threads a step uses, by its size.

    Attributes:
        hidden_size: H.
        most: Threads of a large step; 1 for a fixed single thread.
        least: Threads of a small one.
    """

    hidden_size: int
    most: int
    least: int

    def use_for(self, num_tokens: int) -> None:
        """Set torch's thread count for a step of that many tokens."""
        is_large = num_tokens * self.hidden_size >= MIN_WORK_FOR_THREADS
        wanted = self.most if is_large else self.least
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)


@dataclass(frozen=True)
class Started:
    """A runner ready to step.

    Attributes:
        config: As given, with the model folder resolved.
        runner: Model with weights and cache.
        limits: Of the scheduler.
        steps: Launches its steps.
        threads: Chosen in each step.
    """

    config: EngineConfig
    runner: ModelRunner
    steps: Steps
    limits: SchedulerLimits
    threads: CpuThreads


def start(config: EngineConfig, place: Place, compiling: CompileProcess | None = None) -> Started:
    """Load the model and size everything.

    Args:
        config: Options.
        place: This rank's; with others, they do the same.
        compiling: Compiles this rank's kernels, where it was worth starting.

    Raises:
        UsageError: An option cannot be meant; names it and its value.
        Unsupported: This build or machine cannot serve it.
    """
    config = replace(config, model=_model_source(config))
    spec = load_model_spec(config.model, config.hf_overrides)
    device = choose_device(config)
    _check_ranks(config, spec, place, device)
    threads = _threads(config, spec, device)
    threads.use_for(1)
    max_model_len = _max_model_len(config, spec)
    limits = _limits(config, max_model_len, device)
    options = RunnerOptions(
        device=device,
        dtype=choose_dtype(config, spec, device),
        max_model_len=max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        page_size=config.page_size,
    )
    parallel = connect(place, device)
    runner = ModelRunner(config, spec, options, parallel)
    # Ranks that schedule the same steps need the same pages.
    num_pages = parallel.least(_num_pages(config, runner, limits), device)
    fitting = (num_pages - 1) * runner.attention.page_size
    if fitting < max_model_len:
        if config.max_model_len:
            raise UsageError(
                f"max_model_len={config.max_model_len} does not fit: the KV cache holds "
                f"{fitting} tokens; raise kv_cache_memory_bytes or lower max_model_len"
            )
        limits = replace(limits, max_model_len=fitting)
    runner.allocate_cache(num_pages)
    logger.info(
        "KV cache: %d pages of %d tokens, %.2f GiB",
        num_pages,
        runner.attention.page_size,
        num_pages * runner.page_bytes() / 2**30,
    )
    return Started(config, runner, _steps(config, runner, limits, compiling), limits, threads)


def _check_ranks(config: EngineConfig, spec: ModelSpec, place: Place, device: torch.device) -> None:
    """Refuse what this many ranks cannot do, before they meet; takes this rank's GPU."""
    if config.num_ranks != place.num_ranks:
        raise Unsupported(
            f"tensor_parallel_size={config.tensor_parallel_size}, data_parallel_size="
            f"{config.data_parallel_size}: one engine runs one rank; start_engine() starts all"
        )
    check_divides(spec, place.tp_size, is_expert_parallel=place.is_expert_parallel)
    if config.is_deterministic and place.world_size > 2:
        raise Unsupported(
            f"deterministic mode with {place.world_size} ranks: a sum over more than two ranks has "
            "an order that depends on the batch"
        )
    if device.type == "cuda":
        if place.num_ranks > torch.cuda.device_count():
            raise Unsupported(
                f"{place.num_ranks} ranks need as many GPUs; torch sees {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(place.rank)


def _steps(
    config: EngineConfig,
    runner: ModelRunner,
    limits: SchedulerLimits,
    compiling: CompileProcess | None,
) -> Steps:
    """How steps run here; on a GPU with every kernel compiled and every graph captured."""
    if not runner.attention.is_fused:
        return HostSteps(runner)
    # Triton is imported only where it is used: a CPU server never needs it.
    from moeserve.engine.device_steps import DeviceSteps, StepLimits

    page_size = runner.attention.page_size
    sizes = StepLimits(
        limits.max_num_seqs, limits.max_num_batched_tokens, -(-limits.max_model_len // page_size)
    )
    steps = DeviceSteps(runner, sizes, has_graphs=not config.enforce_eager)
    steps.warm_up(compiling)
    return steps


def _model_source(config: EngineConfig) -> str:
    """The folder or preset to read, the embedded model's folder for its name."""
    if Path(config.model).is_dir() or config.load_format == "dummy":
        return config.model
    if config.model.lower() in (tiny.MODEL_NAME.lower(), tiny.MODEL_NAME.split("/")[-1]):
        try:
            return str(tiny.model_dir())
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
    if presets.is_preset(config.model):
        raise UsageError(
            f"model {config.model!r}: only its shape is known here; give its folder, or "
            "--load-format dummy for random weights"
        )
    return config.model


def _threads(config: EngineConfig, spec: ModelSpec, device: torch.device) -> CpuThreads:
    if config.num_threads:
        return CpuThreads(spec.hidden_size, config.num_threads, config.num_threads)
    # With a GPU the CPU only prepares steps.
    most = 1 if device.type != "cpu" else max(1, _ALL_THREADS // config.num_ranks)
    return CpuThreads(spec.hidden_size, most, 1)


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len > spec.max_position_embeddings:
        raise UsageError(
            f"max_model_len={config.max_model_len} exceeds the model's "
            f"max_position_embeddings={spec.max_position_embeddings}"
        )
    return config.max_model_len or spec.max_position_embeddings


def _limits(config: EngineConfig, max_model_len: int, device: torch.device) -> SchedulerLimits:
    max_tokens = config.max_num_batched_tokens
    if not max_tokens:
        default = CPU_STEP_TOKENS if device.type == "cpu" else GPU_STEP_TOKENS
        max_tokens = max(default, config.max_num_seqs)
    if not config.has_chunked_prefill:
        max_tokens = max(max_tokens, max_model_len)
    if config.max_num_seqs < 1:
        raise UsageError(f"max_num_seqs={config.max_num_seqs}: at least 1")
    if max_tokens < config.max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens={max_tokens} is less than max_num_seqs="
            f"{config.max_num_seqs}: a step could not even decode; raise the one or lower the other"
        )
    return SchedulerLimits(
        config.max_num_seqs,
        max_tokens,
        max_model_len,
        config.has_chunked_prefill,
        CPU_FAIR_TOKENS if device.type == "cpu" else GPU_FAIR_TOKENS,
    )


def _num_pages(config: EngineConfig, runner: ModelRunner, limits: SchedulerLimits) -> int:
    num_pages = config.num_pages
    if not num_pages:
        num_bytes = config.kv_cache_memory_bytes or CPU_CACHE_BYTES
        if not config.kv_cache_memory_bytes and runner.options.device.type == "cuda":
            num_bytes = _gpu_cache_bytes(config, runner, limits)
        num_pages = num_bytes // runner.page_bytes()
    if num_pages < 2:  # the first is never a sequence's
        raise UsageError(
            f"num_gpu_blocks_override={config.num_pages}, kv_cache_memory_bytes="
            f"{config.kv_cache_memory_bytes}: {num_pages} KV pages hold no token; at least 2 of "
            f"{runner.page_bytes()} bytes"
        )
    return num_pages


def _gpu_cache_bytes(config: EngineConfig, runner: ModelRunner, limits: SchedulerLimits) -> int:
    """What is left of the GPU's share; logs the whole account."""
    free, total = torch.cuda.mem_get_info()
    share = int(config.gpu_memory_utilization * total)
    logits = limits.max_num_seqs * runner.spec.vocab_size * runner.options.dtype.itemsize
    step = runner.step_bytes() + logits + GPU_RESERVE_BYTES
    cache = share - (total - free) - step
    gib = 2**30
    logger.info(
        "GPU memory: %.1f GiB of %.1f GiB may be used; %.1f GiB hold weights and scratch (and "
        "other programs' memory), %.1f GiB are kept for steps, %.1f GiB go to the KV cache",
        share / gib,
        total / gib,
        (total - free) / gib,
        step / gib,
        cache / gib,
    )
    if cache < runner.page_bytes() * 2:
        raise UsageError(
            f"gpu_memory_utilization={config.gpu_memory_utilization}: {share / gib:.1f} GiB hold "
            f"no KV cache beside {(total - free) / gib:.1f} GiB in use and {step / gib:.1f} GiB "
            "for steps; raise it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return cache
