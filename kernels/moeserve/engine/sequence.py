"""The mutable state of one request inside the engine.

`scheduler.py` moves it between queues and owns its pages; `engine.py` appends tokens;
`runner/sampler.py` reads what it asked for. The frozen `Request` stays as it came.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from moeserve.engine.request import Logprob, Request
from moeserve.engine.scheduler_flows import Flow

if TYPE_CHECKING:
    import torch


class Sequence:
    """One request's tokens, pages and progress.

    Attributes:
        request: As it came.
        tokens: Prompt, then what was generated; one that only the device knows is -1 - row.
        num_pending: Trailing tokens of that kind.
        num_prompt: Tokens of the prompt.
        num_computed: Tokens whose keys and values are in the cache.
        pages: KV pages in order of position.
        keys: Content keys of the leading full pages.
        num_published: Leading pages already offered to the cache.
        row: Row of the block table while running, -1 otherwise.
        admission: Number of its last admission, unique over all sequences.
        arrival: Order of arrival, the tie-break of priority.
        num_cached: Prompt tokens that came from the prefix cache at first admission.
        seed: Of the random stream.
        stop_ids: Tokens that end the sequence.
        max_total: Prompt plus output tokens at which it ends.
        prompt_logprobs: Filled position by position where asked for; entry 0 is None.
        counts: Occurrences [V] of generated tokens; made on first use by the sampler.
        bias: `logit_bias` as tensors; made on first use by the sampler.
        is_started: Whether an event has been sent.
        flow: The connection it came from, and what that holds; set by the scheduler.
        turn: Place in the queue: one sequence of each connection, then the next of each.
        last_step: Last step that it decoded in.
    """

    flow: Flow

    __slots__ = (
        "admission",
        "arrival",
        "bias",
        "counts",
        "flow",
        "is_greedy",
        "is_started",
        "keys",
        "last_step",
        "max_total",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_prompt",
        "num_published",
        "pages",
        "prompt_logprobs",
        "prompt_mask",
        "request",
        "row",
        "seed",
        "stop_ids",
        "tokens",
        "turn",
    )

    def __init__(
        self, request: Request, arrival: int, eos_token_ids: tuple[int, ...], max_model_len: int
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_pending = 0
        self.pages: list[int] = []
        self.keys: list[bytes] = []
        self.num_published = 0
        self.row = -1
        self.admission = -1
        self.arrival = arrival
        self.num_cached = -1
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        eos = () if sampling.ignore_eos else eos_token_ids
        self.stop_ids = frozenset((*eos, *sampling.stop_token_ids))
        self.max_total = min(self.num_prompt + sampling.max_tokens, max_model_len)
        self.prompt_logprobs: list[Logprob | None] = [None]
        self.counts: np.ndarray | None = None
        self.bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self.prompt_mask: np.ndarray | None = None
        self.is_started = False
        self.turn = 0
        self.last_step = 0
        self.is_greedy = (
            sampling.temperature == 0.0
            and sampling.num_logprobs is None
            and not sampling.min_tokens
            and not sampling.presence_penalty
            and not sampling.frequency_penalty
            and sampling.repetition_penalty == 1.0
            and not sampling.logit_bias
        )

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that are known and not yet in the cache; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_ending(self) -> bool:
        """Whether its last token is on its way, and no step must be made for another."""
        return self.num_pending > 0 and len(self.tokens) >= self.max_total

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be scored."""
        return (
            self.request.sampling.num_prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.num_prompt
        )

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: lower goes first and is preempted last."""
        return (self.request.priority, self.turn, self.arrival)
