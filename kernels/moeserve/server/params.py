"""Request bodies → a `Job`: prompts as ids, and how each is to be continued.

Receives a typed body (`protocol.py`) and what is known of the model; returns a `Job` whose every
value is within its bounds, or raises `BadRequest` naming the field. Running it is `sequences.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from moeserve.engine.client import EngineInfo
from moeserve.engine.request import SamplingParams
from moeserve.errors import BadRequest
from moeserve.server.fields import (
    bounded,
    read_logit_bias,
    read_stop_token_ids,
    read_stops,
    read_stream_options,
)
from moeserve.server.limits import Limits
from moeserve.server.protocol import ChatBody, CompletionBody, SamplingBody, shorten
from moeserve.server.text import TextOptions
from moeserve.server.tokenizer import Tokenizer

# OpenAI's default for `max_tokens` of a completion.
DEFAULT_MAX_TOKENS = 16
# Below this a temperature is greedy: logits divided by it leave float32's range.
GREEDY_BELOW = 1e-5
_SEED_RANGE = 2**63


@dataclass(frozen=True)
class ModelContext:
    """What a request is checked against.

    Attributes:
        info: Of the engine.
        tokenizer: Of the model.
        limits: Of the server.
        sampling_defaults: Values for fields that a request leaves out, from the model's folder.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    limits: Limits
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """One prompt: its ids, and its text where it came as text."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class Job:
    """A checked request.

    Attributes:
        sampling: Shared by all sequences; `sampling_of` sets `max_tokens` and `seed` of each.
        max_tokens: None takes what the context leaves.
        is_limit_soft: `max_tokens` is a default and is cut to what the context leaves.
        n: Choices a prompt in the reply.
        best_of: Candidates a prompt.
        text: How tokens become text.
        has_echo: The reply begins with the prompt.
        num_logprobs: Alternatives shown beside each token, None shows no log-probabilities.
        num_prompt_logprobs: Alternatives shown beside each prompt token, None shows none.
        returns_token_ids: Ids come with the reply.
        has_id_spelling: Tokens beside log-probabilities are written `token_id:N`.
        is_streamed: The reply is sent as it is made.
        has_usage_chunk: A stream ends with the usage.
        has_running_usage: Each chunk carries the usage so far.
        priority: Order in the queue.
        name: Id that the client gave the request, "" if none.
    """

    sampling: SamplingParams
    max_tokens: int | None
    is_limit_soft: bool
    n: int
    best_of: int
    text: TextOptions
    has_echo: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    has_id_spelling: bool = False
    is_streamed: bool = False
    has_usage_chunk: bool = False
    has_running_usage: bool = False
    priority: int = 0
    name: str = ""

    def sampling_of(self, prompt: Prompt, candidate: int, max_model_len: int) -> SamplingParams:
        """Return the parameters of one candidate of one prompt.

        Raises:
            BadRequest: Prompt and `max_tokens` do not fit into the context.
        """
        length = len(prompt.ids)
        room = max_model_len - length
        limit = room if self.max_tokens is None else self.max_tokens
        if self.is_limit_soft:
            limit = min(limit, room)
        is_too_long = limit > room or (limit < 1 and self.max_tokens != 0)
        if is_too_long:
            wanted = max(limit, 1)
            raise BadRequest(
                f"This model's maximum context length is {max_model_len} tokens, but "
                f"{length + wanted} were asked for ({length} in the prompt, {wanted} as "
                "max_tokens)",
                "max_tokens" if length < max_model_len else "prompt",
            )
        if self.sampling.min_tokens > limit:
            raise BadRequest(
                f"min_tokens: {self.sampling.min_tokens} is more than max_tokens {limit}",
                "min_tokens",
            )
        seed = self.sampling.seed
        if seed is not None and candidate:
            seed = derived_seed(seed, candidate)
        return replace(self.sampling, max_tokens=limit, seed=seed)


def derived_seed(seed: int, candidate: int) -> int:
    """Return the seed of candidate 1, 2, ... of a request with a seed; candidate 0 has its own."""
    digest = blake2b(f"{seed}:{candidate}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _SEED_RANGE


def completion_job(body: CompletionBody, context: ModelContext) -> Job:
    """Return the job of a `/v1/completions` body."""
    job = _shared_job(body, context)
    limits = context.limits
    best_of = bounded(body.best_of, "best_of", 1, limits.max_best_of, job.n)
    if best_of < job.n:
        raise BadRequest(f"best_of: {best_of} is less than n {job.n}", "best_of")
    if best_of > job.n and job.is_streamed:
        raise BadRequest("best_of: cannot be streamed unless it equals n", "best_of")
    num_logprobs = None
    if body.logprobs is not None:
        num_logprobs = bounded(body.logprobs, "logprobs", 0, limits.max_logprobs, 0)
    has_echo = bool(body.echo)
    max_tokens = body.max_tokens
    # null is the default, as OpenAI documents it and vLLM reads it.
    is_soft = max_tokens is None
    if is_soft:
        max_tokens = int(context.sampling_defaults.get("max_tokens", DEFAULT_MAX_TOKENS))
    num_prompt = job.sampling.num_prompt_logprobs
    if has_echo and num_logprobs is not None:
        num_prompt = max(num_logprobs, num_prompt or 0)
    _check_max_tokens(max_tokens, "max_tokens", has_echo or num_prompt is not None)
    return replace(
        job,
        best_of=best_of,
        has_echo=has_echo,
        num_logprobs=num_logprobs,
        max_tokens=max_tokens,
        is_limit_soft=is_soft,
        sampling=replace(
            job.sampling,
            # Candidates are ranked by log-probability.
            num_logprobs=(num_logprobs or 0) if best_of > job.n else num_logprobs,
            num_prompt_logprobs=num_prompt,
        ),
    )


def chat_job(body: ChatBody, context: ModelContext) -> Job:
    """Return the job of a `/v1/chat/completions` body."""
    job = _shared_job(body, context)
    num_logprobs = None
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs: wants logprobs to be true", "top_logprobs")
    if body.logprobs:
        top = context.limits.max_logprobs
        num_logprobs = bounded(body.top_logprobs, "top_logprobs", 0, top, 0)
    max_tokens, name = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise BadRequest(
                f"max_completion_tokens: {body.max_completion_tokens} contradicts max_tokens "
                f"{max_tokens}",
                "max_completion_tokens",
            )
        max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    is_soft = max_tokens is None and "max_tokens" in context.sampling_defaults
    if is_soft:
        max_tokens = int(context.sampling_defaults["max_tokens"])
    _check_max_tokens(max_tokens, name, job.sampling.num_prompt_logprobs is not None)
    return replace(
        job,
        num_logprobs=num_logprobs,
        max_tokens=max_tokens,
        is_limit_soft=is_soft,
        sampling=replace(job.sampling, num_logprobs=num_logprobs),
    )


def _check_max_tokens(max_tokens: int | None, name: str, has_prompt_output: bool) -> None:
    least = 0 if has_prompt_output else 1
    if max_tokens is not None and max_tokens < least:
        also = "" if least == 0 else " (0 only with echo or prompt_logprobs)"
        raise BadRequest(f"{name}: want at least {least}{also}, got {shorten(max_tokens)}", name)


def _shared_job(body: SamplingBody, context: ModelContext) -> Job:
    limits = context.limits
    options = read_stream_options(body)
    is_streamed = bool(body.stream)
    if body.prompt_logprobs is not None and is_streamed:
        raise BadRequest("prompt_logprobs: cannot be streamed", "prompt_logprobs")
    stops = read_stops(body.stop, limits)
    n = bounded(body.n, "n", 1, limits.max_n, 1)
    return Job(
        sampling=_sampling(body, context),
        max_tokens=None,
        is_limit_soft=False,
        n=n,
        best_of=n,
        text=TextOptions(
            stops=stops,
            min_tokens=body.min_tokens or 0,
            has_stop_in_output=bool(body.include_stop_str_in_output),
            skips_special=body.skip_special_tokens is not False,
        ),
        num_prompt_logprobs=body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        has_id_spelling=bool(body.return_tokens_as_token_ids),
        is_streamed=is_streamed,
        has_usage_chunk=options.get("include_usage", False),
        has_running_usage=options.get("continuous_usage_stats", False),
        priority=body.priority or 0,
        name=body.request_id or "",
    )


def _sampling(body: SamplingBody, context: ModelContext) -> SamplingParams:
    defaults = context.sampling_defaults
    vocab = context.info.vocab_size

    def value(name: str, otherwise: float) -> float:
        given = getattr(body, name)
        return float(defaults.get(name, otherwise) if given is None else given)

    temperature = value("temperature", 1.0)
    top_p, top_k = value("top_p", 1.0), int(value("top_k", 0))
    if top_p == 0:  # no mass at all: the best token alone
        top_p, top_k = 1.0, 1
    num_prompt = None
    if body.prompt_logprobs is not None:
        top = context.limits.max_logprobs
        num_prompt = bounded(body.prompt_logprobs, "prompt_logprobs", 0, top, 0)
    return SamplingParams(
        min_tokens=body.min_tokens or 0,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=0 if top_k < 1 or top_k >= vocab else top_k,
        min_p=value("min_p", 0.0),
        seed=_seed(body.seed),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        logit_bias=read_logit_bias(body.logit_bias, vocab, context.limits),
        stop_token_ids=read_stop_token_ids(body.stop_token_ids, vocab, context.limits),
        ignore_eos=bool(body.ignore_eos),
        num_prompt_logprobs=num_prompt,
    )


def _seed(seed: int | None) -> int | None:
    """Any 64-bit integer; a negative one counts from the top, as in arithmetic modulo 2^63."""
    if seed is None:
        return None
    if not -_SEED_RANGE <= seed < _SEED_RANGE:
        raise BadRequest(f"seed: want a 64-bit integer, got {shorten(seed)}", "seed")
    return seed % _SEED_RANGE
