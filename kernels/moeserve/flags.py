"""The command line of `moeserve serve` as data: one row a flag.

`args.py` parses with it; `help.py` prints `--help` and the table of `docs/server.md` from it.
Defaults are not here: each row names the dataclass field that holds its default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeserve.engine.config import DTYPES, LOAD_FORMATS

Kind = Literal["int", "float", "text", "switch", "json", "list"]


@dataclass(frozen=True)
class Flag:
    """One option.

    Attributes:
        name: With its dashes; underscores in the user's spelling are taken as dashes.
        target: Owner and field that it sets: "engine.x", "limits.x" or "server.x".
        kind: How the value is read; a switch takes none and has a `--no-` form.
        help: One line.
        short: Short spelling.
        choices: The only values allowed.
        low: Least value of a number.
        high: Largest value of a number.
    """

    name: str
    target: str
    kind: Kind
    help: str
    short: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None


FLAGS: tuple[Flag, ...] = (
    Flag("--host", "server.host", "text", "Address to listen on."),
    Flag("--port", "server.port", "int", "Port; 0 takes a free one.", low=0, high=65535),
    Flag("--port-file", "server.port_file", "text", 'File that receives {"port": N}.'),
    Flag("--served-model-name", "server.served_names", "list", "Names that requests may use."),
    Flag("--api-key", "server.api_keys", "list", "Keys, one of which a request must carry."),
    Flag(
        "--chat-template",
        "server.chat_template",
        "text",
        "Template file or text, in place of the model's.",
    ),
    Flag(
        "--trust-request-chat-template",
        "server.has_request_templates",
        "switch",
        "Render templates that come with a request.",
    ),
    Flag(
        "--generation-config",
        "server.generation_config",
        "text",
        "auto: sampling defaults of the model's generation_config.json; none: OpenAI's.",
        choices=("auto", "none", "vllm"),
    ),
    Flag(
        "--shutdown-grace-s",
        "server.shutdown_grace_s",
        "float",
        "Open requests may finish for this long.",
        low=0,
    ),
    Flag(
        "--keep-alive-s",
        "server.keep_alive_s",
        "int",
        "Idle connections are kept this long; longer than clients keep theirs.",
        low=1,
    ),
    Flag(
        "--log-level",
        "server.log_level",
        "text",
        "Least level that is logged.",
        choices=("debug", "info", "warning", "error"),
    ),
    Flag("--access-log", "server.has_access_log", "switch", "A line for each request."),
    Flag(
        "--max-model-len",
        "engine.max_model_len",
        "int",
        "Prompt plus output tokens; 0, -1 or auto: the model's own.",
        low=-1,
    ),
    Flag(
        "--dtype",
        "engine.dtype",
        "text",
        "Of weights and activations.",
        choices=(*DTYPES, "half", "float"),
    ),
    Flag("--seed", "engine.seed", "int", "Of dummy weights.", low=0),
    Flag(
        "--load-format",
        "engine.load_format",
        "text",
        "dummy: random weights.",
        choices=LOAD_FORMATS,
    ),
    Flag("--hf-overrides", "engine.hf_overrides", "json", "Keys laid over config.json."),
    Flag(
        "--tensor-parallel-size",
        "engine.tensor_parallel_size",
        "int",
        "Ranks the model is cut over.",
        short="-tp",
        low=1,
    ),
    Flag(
        "--data-parallel-size",
        "engine.data_parallel_size",
        "int",
        "Replicas with a batch each.",
        short="-dp",
        low=1,
    ),
    Flag(
        "--enable-expert-parallel",
        "engine.has_expert_parallel",
        "switch",
        "Experts spread over all ranks rather than cut.",
        short="-ep",
    ),
    Flag("--enforce-eager", "engine.enforce_eager", "switch", "No CUDA graphs."),
    Flag(
        "--moe-backend", "engine.moe_backend", "text", "MoE backend by name; auto asks the oracle."
    ),
    Flag("--attention-backend", "engine.attention_backend", "text", "Attention backend by name."),
    Flag(
        "--deterministic",
        "engine.is_deterministic",
        "switch",
        "A result does not depend on the batch around it.",
    ),
    Flag(
        "--gpu-memory-utilization",
        "engine.gpu_memory_utilization",
        "float",
        "Share of the GPU's memory.",
        low=0.01,
        high=1.0,
    ),
    Flag(
        "--kv-cache-memory-bytes",
        "engine.kv_cache_memory_bytes",
        "int",
        "Bytes of KV cache; 0 is computed.",
        low=0,
    ),
    Flag("--num-gpu-blocks-override", "engine.num_pages", "int", "KV pages; 0 is computed.", low=0),
    Flag(
        "--block-size",
        "engine.page_size",
        "int",
        "Tokens a KV page; 0 is the device's default.",
        low=0,
    ),
    Flag("--max-num-seqs", "engine.max_num_seqs", "int", "Sequences in one step.", low=1),
    Flag(
        "--max-num-batched-tokens",
        "engine.max_num_batched_tokens",
        "int",
        "Tokens in one step; 0 is 2048, and 8192 on a GPU.",
        low=0,
    ),
    Flag(
        "--enable-prefix-caching",
        "engine.has_prefix_caching",
        "switch",
        "Full pages are shared by content.",
    ),
    Flag(
        "--enable-chunked-prefill",
        "engine.has_chunked_prefill",
        "switch",
        "A prompt may be cut over several steps.",
    ),
    Flag(
        "--num-threads",
        "engine.num_threads",
        "int",
        "CPU threads of each rank; 0 is chosen.",
        low=0,
    ),
    Flag(
        "--stall-limit-s",
        "engine.stall_limit_s",
        "float",
        "With several ranks: a step that lasts longer ends the server.",
        low=1.0,
    ),
    Flag(
        "--device",
        "engine.device",
        "text",
        "Where the engine runs; auto: a GPU, or the CPU for a MoE backend that serves CPUs alone.",
        choices=("auto", "cpu", "cuda"),
    ),
    Flag("--max-body-bytes", "limits.max_body_bytes", "int", "Bytes of a request body.", low=1024),
    Flag(
        "--max-held-bytes",
        "limits.max_held_bytes",
        "int",
        "Bytes of all bodies that are being read; beyond it 429.",
        low=1024,
    ),
    Flag("--body-timeout-s", "limits.body_timeout_s", "float", "Time for a body.", low=0.1),
    Flag("--header-timeout-s", "limits.header_timeout_s", "float", "Time for headers.", low=0.1),
    Flag(
        "--send-timeout-s",
        "limits.send_timeout_s",
        "float",
        "A client that takes nothing of its answer for so long is cut off.",
        low=0.1,
    ),
    Flag("--max-headers", "limits.max_headers", "int", "Header lines.", low=8),
    Flag("--max-header-bytes", "limits.max_header_bytes", "int", "Bytes of headers.", low=1024),
    Flag(
        "--max-prompts",
        "limits.max_prompts",
        "int",
        "Prompts, or chat messages, in one request.",
        low=1,
    ),
    Flag("--max-n", "limits.max_n", "int", "Choices a prompt.", low=1),
    Flag("--max-best-of", "limits.max_best_of", "int", "Candidates a prompt.", low=1),
    Flag(
        "--max-sequences",
        "limits.max_sequences",
        "int",
        "Prompts times candidates of a request.",
        low=1,
    ),
    Flag("--max-logprobs", "limits.max_logprobs", "int", "Alternatives a position.", low=0),
    Flag(
        "--max-logprob-entries",
        "limits.max_logprob_entries",
        "int",
        "Log-probabilities in one reply.",
        low=1,
    ),
    Flag("--max-stop", "limits.max_stop", "int", "Stop strings of a request.", low=1),
    Flag("--max-stop-chars", "limits.max_stop_chars", "int", "Characters of a stop string.", low=1),
    Flag("--max-logit-bias", "limits.max_logit_bias", "int", "Entries of logit_bias.", low=1),
    Flag(
        "--max-queue",
        "limits.max_queue",
        "int",
        "Unfinished sequences of all requests; beyond it 429.",
        low=1,
    ),
    Flag(
        "--template-timeout-s",
        "limits.template_timeout_s",
        "float",
        "Time for a chat template.",
        low=0.05,
    ),
    Flag(
        "--max-template-chars",
        "limits.max_template_chars",
        "int",
        "Characters that a chat template may make.",
        low=1,
    ),
)
