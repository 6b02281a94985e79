"""State of the HTTP side that outlives a request: engine, tokenizer, queue length, life cycle.

Made by `launch.py` before the engine is loaded, so that `/health` can answer from the first
second; filled by `ready`. Routes read it and never change it but through `admit`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from moeserve.args import ServeConfig
from moeserve.engine.client import EngineClient, EngineStats
from moeserve.server.chat import ChatTemplate
from moeserve.server.http_guard import HttpError
from moeserve.server.metrics import Metrics
from moeserve.server.params import ModelContext
from moeserve.server.source import source_hash
from moeserve.server.turns import HeldBytes, Turns

logger = logging.getLogger("moeserve.server")
Status = Literal["loading", "ready", "stopping", "failed"]


class Service:
    """One server.

    Attributes:
        config: What it was started with.
        status: Where it stands in its life.
        metrics: Its figures.
        created: Seconds since 1970.
        source: Hash of the code that runs, read as it starts: files may change afterwards.
        turns: Large bodies are read one after another.
        held: Bytes of bodies that are being read.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.status: Status = "loading"
        self.metrics = Metrics(config.served_names[0], self._stats)
        self.created = int(time.time())
        self.source = source_hash()
        self.turns = Turns()
        self.held = HeldBytes(config.limits.max_held_bytes)
        self._engine: EngineClient | None = None
        self._context: ModelContext | None = None
        self._chat: ChatTemplate | None = None
        self._num_open = 0

    def ready(self, engine: EngineClient, context: ModelContext, chat: ChatTemplate) -> None:
        """Begin to serve; without effect if the server is already stopping."""
        self._engine, self._context, self._chat = engine, context, chat
        if self.status == "loading":
            self.status = "ready"

    def is_healthy(self) -> bool:
        """Whether requests are served."""
        return self.status == "ready" and self._engine is not None and self._engine.is_alive()

    def require_ready(self) -> None:
        """Raise HTTP 503 unless requests are served."""
        if self.is_healthy():
            return
        reason = {
            "loading": "the model is being loaded",
            "stopping": "the server is stopping",
        }.get(self.status, "the engine has ended")
        is_closing = self.status == "stopping"
        raise HttpError(503, reason, code=self.status, closes=is_closing, retry_after_s=1)

    @property
    def engine(self) -> EngineClient:
        """The engine, loaded and not yet ended."""
        if self._engine is None:
            raise HttpError(503, "the model is being loaded", code="loading", retry_after_s=1)
        return self._engine

    @property
    def context(self) -> ModelContext:
        """Model, tokenizer and limits that requests are checked against."""
        if self._context is None:
            raise HttpError(503, "the model is being loaded", code="loading", retry_after_s=1)
        return self._context

    @property
    def chat(self) -> ChatTemplate:
        """Renderer of the model's chat template."""
        if self._chat is None:
            raise HttpError(503, "the model is being loaded", code="loading", retry_after_s=1)
        return self._chat

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the reply.

        Raises:
            HttpError: 404, a name that is not served here.
        """
        names = self.config.served_names
        if name is None or name in names:
            return name or names[0]
        raise HttpError(
            404,
            f"The model {name[:200]!r} does not exist; served: {', '.join(names)}",
            "model",
            "model_not_found",
        )

    @property
    def most_in_engine(self) -> int:
        """Sequences of one request that the engine has at once: what it can run, and a few more."""
        engine = self.config.engine
        return engine.max_num_seqs * engine.data_parallel_size + 32

    def admit(self, num_sequences: int) -> None:
        """Count sequences in; `release` counts them out.

        Raises:
            HttpError: 429, too many are unfinished.
        """
        limit = self.config.limits.max_queue
        if self._num_open + num_sequences > limit:
            raise HttpError(
                429,
                f"{self._num_open} sequences are unfinished and at most {limit} may be; try again",
                code="queue_full",
                retry_after_s=1,
            )
        self._num_open += num_sequences

    def release(self, num_sequences: int) -> None:
        """Count sequences out."""
        self._num_open -= num_sequences

    @contextmanager
    def released(self, num_sequences: int) -> Iterator[None]:
        """Count sequences out when the block ends, however it ends."""
        try:
            yield
        finally:
            self.release(num_sequences)

    @property
    def num_open(self) -> int:
        """Sequences that are unfinished."""
        return self._num_open

    async def close(self) -> None:
        """End what belongs to the HTTP side."""
        if self._chat is not None:
            await self._chat.close()

    def _stats(self) -> EngineStats | None:
        return self._engine.stats() if self._engine is not None else None
