"""What one client may ask for: every bound of the HTTP side, with its default, in one place.

Received by `protocol.py`, `http_guard.py` and `app.py`; set by `args.py`. How many sequences run
at once is the engine's option (`engine/config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

# pydantic-core's JSON parser refuses deeper nesting itself; named here for the documentation.
MAX_JSON_DEPTH = 201


@dataclass(frozen=True)
class Limits:
    """Bounds on one request and on all of them together.

    Attributes:
        max_body_bytes: Larger bodies get 413, before they are read where a length is announced.
        max_held_bytes: Of all bodies that are being read; beyond it 429 with Retry-After.
        body_timeout_s: A body must be complete after this long, else 408.
        header_timeout_s: A request line with its headers must be complete after this long.
        send_timeout_s: A client that takes nothing of its answer for this long is cut off.
        max_headers: More header lines get 431.
        max_header_bytes: More bytes of headers get 431.
        max_prompts: Prompts, or chat messages, in one request.
        max_n: Choices a prompt.
        max_best_of: Candidates a prompt.
        max_sequences: Prompts times candidates of one request.
        max_logprobs: Alternatives a position, for `logprobs`, `top_logprobs`, `prompt_logprobs`.
        max_logprob_entries: Log-probabilities in one reply: positions times alternatives and one.
        max_stop: Stop strings, and stop token ids, of one request.
        max_stop_chars: Characters of one stop string.
        max_logit_bias: Entries of `logit_bias`.
        max_queue: Unfinished sequences of all requests together; beyond it 429 with Retry-After.
        template_timeout_s: Rendering of a chat template is ended after this long.
        max_template_chars: Characters that a chat template may produce.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    max_held_bytes: int = 128 * 1024 * 1024
    body_timeout_s: float = 30.0
    header_timeout_s: float = 20.0
    send_timeout_s: float = 120.0
    max_headers: int = 200
    max_header_bytes: int = 64 * 1024
    max_prompts: int = 1024
    max_n: int = 128
    max_best_of: int = 128
    max_sequences: int = 4096
    max_logprobs: int = 20
    max_logprob_entries: int = 2_000_000
    max_stop: int = 64
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    max_queue: int = 16384
    template_timeout_s: float = 2.0
    max_template_chars: int = 4 * 1024 * 1024
