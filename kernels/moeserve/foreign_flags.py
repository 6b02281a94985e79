"""Flags and switches of the field's servers, and what each means to this one.

`args.py` reads these tables after its own rows (`flags.py`): a flag is neutral at some values,
accepted without effect, or refused with the reason; nothing is ignored silently.
"""

from __future__ import annotations

# Flags of the field's that mean here what they can only mean: the values listed.
NEUTRAL_FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "--pipeline-parallel-size": (("1",), "pipeline parallelism is not implemented"),
    "--kv-cache-dtype": (("auto",), "the KV cache has the model's own type"),
    "--quantization": (("none",), "weights are served unquantized"),
    "--linear-backend": (("auto",), "dense layers have one implementation"),
    "--all2all-backend": (
        ("allgather_reducescatter", "naive"),
        "tokens move between ranks by all-gather and reduce-scatter",
    ),
    "--tokenizer-mode": (("auto", "hf"), "the tokenizers library reads tokenizer.json"),
    "--distributed-executor-backend": (("mp",), "ranks are processes of one host"),
    "--data-parallel-backend": (("mp",), "ranks are processes of one host"),
    "--scheduling-policy": (("fcfs",), "requests are served in order of arrival"),
    "--runner": (("auto", "generate"), "this server only generates"),
    "--task": (("auto", "generate"), "this server only generates"),
    "--model-impl": (("auto",), "models are the ones of this package"),
    "--nnodes": (("1",), "ranks are processes of one host"),
}
NEUTRAL_SHORT: dict[str, str] = {"-pp": "--pipeline-parallel-size", "-q": "--quantization"}

# Switches of the field's without a value that change nothing here, and why.
ACCEPTED_SWITCHES: dict[str, str] = {
    "--trust-remote-code": "no code of a model folder is ever run, with or without it",
    "--disable-log-requests": "requests are not logged",
    "--no-enable-log-requests": "requests are not logged",
    "--disable-log-stats": "figures are at /metrics and not in the log",
    "--disable-custom-all-reduce": "there is no custom all-reduce",
    "--disable-frontend-multiprocessing": "the engine always has a process of its own",
    "--enable-prompt-tokens-details": "cached tokens are always reported in usage",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info is always there",
    "--enable-server-load-tracking": "figures are at /metrics",
}

# Flags of the field's that this server does not have, and why.
REFUSED_FLAGS: dict[str, str] = {
    "--speculative-config": "speculative decoding is not implemented",
    "--compilation-config": "models are not compiled; CUDA graphs are on unless --enforce-eager",
    "--attention-config": "use --attention-backend",
    "--eplb-config": "experts are placed linearly and never moved",
    "--enable-eplb": "experts are placed linearly and never moved",
    "--enable-lora": "adapters are not implemented",
    "--lora-modules": "adapters are not implemented",
    "--tokenizer": "the tokenizer is the model folder's tokenizer.json",
    "--revision": "name the snapshot's folder as MODEL",
    "--tokenizer-revision": "name the snapshot's folder as MODEL",
    "--download-dir": "nothing is downloaded; name the model's folder as MODEL",
    "--swap-space": "preempted sequences are computed again, not swapped",
    "--cpu-offload-gb": "weights are not offloaded",
    "--reasoning-parser": "replies are not parsed",
    "--tool-call-parser": "tools are not implemented",
    "--enable-auto-tool-choice": "tools are not implemented",
    "--guided-decoding-backend": "guided decoding is not implemented",
    "--structured-outputs-config": "guided decoding is not implemented",
    "--kv-transfer-config": "KV transfer is not implemented",
    "--jit-monitor-mode": "there is no JIT monitor",
    "--ssl-keyfile": "put a TLS proxy in front",
    "--ssl-certfile": "put a TLS proxy in front",
    "--root-path": "put a proxy in front",
    "--headless": "ranks are processes of one host",
    "--data-parallel-address": "ranks are processes of one host",
    "--data-parallel-rank": "ranks are processes of one host",
    "--enable-dbo": "dual-batch overlap is not implemented",
    "--enable-sleep-mode": "sleep mode is not implemented",
    "--limit-mm-per-prompt": "only text is served",
    "--middleware": "no code is loaded by name",
    "--api-server-count": "one process serves HTTP",
    "--uds": "listen on --host and --port",
}

# Environment switches that the oracle honours; handed on in `EngineConfig.env`.
ENV_SWITCHES: tuple[str, ...] = (
    "VLLM_USE_FLASHINFER_MOE_FP16",
    "VLLM_FLASHINFER_MOE_BACKEND",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_MOE",
)
