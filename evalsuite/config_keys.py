"""Keys that people know from elsewhere, and what they are called or where they belong here.

Data only; read by `config_checks.py` to name the right key. Valid keys are the fields of
`config.EvalConfig`.
"""

from __future__ import annotations

# A different name for the same thing -> the key here.
SYNONYMS = {
    "max_gen_toks": "max_tokens",
    "max_toks": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "model": "model_name",
    "threshold": "accuracy_threshold",
    "metric_threshold": "accuracy_threshold",
    "limit": "num_questions",
    "num_samples": "num_questions",
    "num_examples": "num_questions",
    "num_shots": "num_fewshot",
    "args": "server_args",
    "extra_args": "server_args",
    "env_vars": "env",
    "environment": "env",
    "num_concurrent": "max_concurrency",
    "concurrency": "max_concurrency",
    "timeout": "request_timeout_seconds",
    "startup_timeout": "startup_max_wait_seconds",
    "chat": "use_chat_completions",
    "backend": "expect_backend",
    "tasks": "task",
    "metrics": "metric",
}

# Keys of the field's other evaluation suites, which this one does not run.
_SIBLING = "it belongs to the field's {} suite, which is not run here; remove it"
_ARG = 'pass it to the server: `server_args: "{}"`'
ELSEWHERE = {
    "reasoning_effort": _SIBLING.format("GPQA"),
    "datasets": _SIBLING.format("multi-dataset"),
    "generation_config": _SIBLING.format("multi-dataset"),
    "max_score_trials": _SIBLING.format("multi-dataset"),
    "context_lengths": _SIBLING.format("long-context"),
    "depths": _SIBLING.format("long-context"),
    "num_trials": _SIBLING.format("long-context"),
    "rtol": "the tolerance here is absolute: `tolerance: 0.02`",
    "gen_kwargs": "write its parts as keys: max_tokens, temperature, seed",
    "apply_chat_template": "the chat route is `use_chat_completions: true`",
    "fewshot_as_multiturn": "shots are part of one message here; remove it",
    "tokenized_requests": "prompts are sent as text, on the chat route too; remove it",
    "tokenizer_backend": "prompts are sent as text, so that no tokenizer is needed; remove it",
    "tokenizer": 'prompts are sent as text; for the server: `server_args: "--tokenizer NAME"`',
    "max_model_len": _ARG.format("--max-model-len N"),
    "kv_cache_dtype": _ARG.format("--kv-cache-dtype T"),
    "enforce_eager": _ARG.format("--enforce-eager"),
    "tensor_parallel_size": _ARG.format("--tensor-parallel-size N"),
    "data_parallel_size": _ARG.format("--data-parallel-size N"),
    "enable_expert_parallel": _ARG.format("--enable-expert-parallel"),
    "port": "the suite picks a free port; remove it",
    "host": "the server listens on the loopback address; remove it",
    "pool": "the pool comes from the list's name (config-<pool>.txt); remove it",
}
