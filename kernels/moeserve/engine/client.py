"""The seam between the API process and the engine process.

`server/` talks to `EngineClient` only; `engine.py` answers on the other side of one process
boundary. Neither this file nor anything it imports needs torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from moeserve.engine.request import Request, TokenEvent


@dataclass(frozen=True)
class EngineInfo:
    """What the engine says of itself once it is loaded.

    Attributes:
        max_model_len: Prompt plus output tokens of one sequence.
        vocab_size: V.
        eos_token_ids: End-of-text ids of the model.
        num_pages: KV pages.
        page_size: Tokens a page.
        backends: Body of `/v1/backends`: platform, MoE plan with reasons and rejections per layer
            group, attention backend, parallel layout.
        load_s: Seconds from process start to ready.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    backends: dict[str, object] = field(default_factory=dict)
    load_s: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """Counters for `/metrics`, sampled after a step.

    Attributes:
        num_running: Sequences in the batch.
        num_waiting: Queued sequences.
        cache_usage: Share of KV pages in use, 0 to 1.
        num_preemptions: Since start.
        prefix_hit_tokens: Prompt tokens served from the prefix cache, since start.
        prefix_query_tokens: Prompt tokens looked up, since start.
        padding_rows: Rows of padding run through the model, since start.
        nan_rows: Router rows with a NaN, since start.
        num_steps: Engine steps since start.
    """

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    padding_rows: int = 0
    nan_rows: int = 0
    num_steps: int = 0


class EngineClient(Protocol):
    """What the HTTP side may ask of an engine."""

    info: EngineInfo

    def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Stream the events of one request; closing the iterator aborts it.

        Every request ends with exactly one event that has a `finish_reason`, whatever happens.
        """
        ...

    def stats(self) -> EngineStats:
        """Latest counters; cheap."""
        ...

    def is_alive(self) -> bool:
        """Whether the engine process lives and steps."""
        ...

    async def profile(self) -> dict[str, object]:
        """Run a prefill and a decode step under the profiler on every rank.

        Returns:
            Kernel names with launch counts per rank, and the MoE layer count, for `/v1/evidence`.
        """
        ...

    async def shutdown(self, grace_s: float) -> None:
        """Let open requests finish for `grace_s`, then end them with an event, then exit."""
        ...
