"""What an engine is started with: one frozen value from the command line to the engine process.

`args.py` builds it from flags and environment; `process.py` carries it to the engine process;
`model_runner.py`, `kv_cache.py` and `scheduler.py` read it. It imports no torch. A value of 0 or
"auto" is resolved once, by `engine.py`, against the model and the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LoadFormat = Literal["auto", "safetensors", "dummy"]
DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS: tuple[str, ...] = ("auto", "safetensors", "dummy")
# Tokens in one step. A GPU's experts take 1.5 ms a layer for 8192 tokens and 0.5 ms for 2048 (H200,
# Qwen3-30B-A3B): larger steps waste less of their weights' reading.
CPU_STEP_TOKENS = 2048
GPU_STEP_TOKENS = 8192
# Tokens that cost as much as a step does before its first one, where clients share steps. The
# embedded model on two busy cores: 0.85 ms for 1 token; one or two of another client with it, drawn
# rather than greedy: 2.0 ms; nine: 3.3 ms. On a GPU a step of few tokens takes nearly as long as
# one of some hundreds.
CPU_FAIR_TOKENS = 4
GPU_FAIR_TOKENS = 1024


@dataclass(frozen=True)
class EngineConfig:
    """Start-up options of the engine.

    Attributes:
        model: Hugging Face folder, or a name that `presets.py` knows (with `load_format` dummy).
        dtype: "auto" is the checkpoint's on a GPU and float32 on a CPU, where it is faster.
        load_format: "auto" reads safetensors; "dummy" draws random weights of the right scale.
        hf_overrides: Keys laid over the model's config.json.
        max_model_len: Prompt plus output tokens of one sequence; 0 is the model's own limit,
            lowered to what the KV cache can hold.
        max_num_seqs: Sequences in one step.
        max_num_batched_tokens: Tokens in one step, decode and prefill chunks together; 0 is
            `CPU_STEP_TOKENS` or `GPU_STEP_TOKENS`, and at least `max_num_seqs`.
        page_size: Tokens a KV page; 0 is the device's default.
        num_pages: KV pages; 0 is computed from the memory options.
        kv_cache_memory_bytes: Bytes of KV cache; 0 is computed.
        gpu_memory_utilization: Share of the GPU's memory for weights, workspace and KV cache.
        enforce_eager: No CUDA graphs.
        has_prefix_caching: Full pages are kept by content and shared.
        has_chunked_prefill: A prompt may be cut over several steps; without it a prompt is run
            whole, and `max_num_batched_tokens` is raised to `max_model_len`.
        seed: Of dummy weights.
        moe_backend: Backend name, or "auto".
        attention_backend: Backend name, or "auto".
        is_deterministic: A sequence's result does not depend on what else is in the batch.
        tensor_parallel_size: Ranks the model is cut over.
        data_parallel_size: Replicas with a batch each.
        has_expert_parallel: Experts are spread over all ranks rather than cut.
        num_threads: CPU threads of each rank; 0 is chosen from the machine.
        stall_limit_s: With several ranks, a step that takes longer ends the server: some rank does
            not take part in it.
        device: "auto", "cpu" or "cuda".
        log_level: Least level that the engine logs.
        env: Environment switches that the oracle honours, read by the entry file.
    """

    model: str
    dtype: str = "auto"
    load_format: LoadFormat = "auto"
    hf_overrides: Mapping[str, object] = field(default_factory=dict)
    max_model_len: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0
    page_size: int = 0
    num_pages: int = 0
    kv_cache_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    has_prefix_caching: bool = True
    has_chunked_prefill: bool = True
    seed: int = 0
    moe_backend: str = "auto"
    attention_backend: str = "auto"
    is_deterministic: bool = False
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    has_expert_parallel: bool = False
    num_threads: int = 0
    stall_limit_s: float = 300.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Processes that the engine consists of."""
        return self.tensor_parallel_size * self.data_parallel_size
