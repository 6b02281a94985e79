"""Chooses the next token of each row: logits [R, V] -> ids, and log-probabilities where wanted.

Receives float32 logits and the sequences they belong to; returns `Sampled`. Randomness is one
uniform number a token, a function of the sequence's seed and of how many tokens it has generated,
so that a stream does not depend on the batch. Greedy rows cost one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from moeserve.engine.request import Logprob
    from moeserve.engine.sequence import Sequence

# Below this temperature a distribution is its maximum to float32.
GREEDY_TEMPERATURE = 1e-5
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of some rows' tokens, as plain lists.

    Attributes:
        logprobs: Of the token itself.
        ranks: 1 is the most probable.
        top_ids: Most probable tokens, best first.
        top_logprobs: Theirs.
    """

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def as_logprob(self, index: int, num_top: int, kind: type[Logprob]) -> Logprob:
        """Row `index` as a `Logprob` with `num_top` entries."""
        top = zip(self.top_ids[index][:num_top], self.top_logprobs[index][:num_top], strict=True)
        return kind(self.logprobs[index], self.ranks[index], tuple(top))


@dataclass(frozen=True)
class Sampled:
    """One token a row.

    Attributes:
        tokens: Ids [R].
        bad_rows: Rows whose logits held a NaN or no finite value; their token means nothing.
        scores: Log-probabilities of the rows in `scored_rows`; None if no row asked.
        scored_rows: Row -> index in `scores`.
    """

    tokens: list[int]
    bad_rows: frozenset[int]
    scores: TokenScores | None
    scored_rows: dict[int, int]


def uniform(seeds: Rows[int], counters: Rows[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One number in [0, 1) for each (seed, counter): SplitMix64's finaliser, applied twice."""
    with np.errstate(over="ignore"):
        mixed = _mix(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
        mixed = _mix(mixed ^ np.array(counters, dtype=np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    # Constants of SplitMix64 (Steele, Lea, Flood 2014).
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, rows: Rows[Sequence]) -> Sampled:
    """Choose a token for each row.

    Args:
        logits: [R, V] float32; overwritten where a row asks for penalties or masks.
        rows: The R sequences.
    """
    if all(row.is_greedy for row in rows):
        tokens, bad_rows = _argmax(logits)
        return Sampled(tokens, bad_rows, None, {})
    num_top, scored = _scored_rows(rows)
    raw = logits[list(scored)] if scored else None
    for index, row in enumerate(rows):
        if not row.is_greedy:
            _adjust(logits[index], row)
    tokens, bad_rows = _argmax(logits)
    is_drawn = [r.request.sampling.temperature >= GREEDY_TEMPERATURE for r in rows]
    drawn = [i for i, flag in enumerate(is_drawn) if flag and i not in bad_rows]
    # Two groups, so that how a row is drawn depends on its own parameters alone.
    for has_limits in (False, True):
        group = [i for i in drawn if _has_limits(rows[i]) is has_limits]
        if group:
            chosen = _draw(logits[group], [rows[i] for i in group], has_limits)
            for index, token in zip(group, chosen, strict=True):
                tokens[index] = token
    scores = None
    if raw is not None:
        scores = score_tokens(raw, [tokens[i] for i in scored], num_top)
    return Sampled(tokens, bad_rows, scores, scored)


def _scored_rows(rows: Rows[Sequence]) -> tuple[int, dict[int, int]]:
    wanted = [row.request.sampling.num_logprobs for row in rows]
    indices = [i for i, count in enumerate(wanted) if count is not None]
    most = max((count for count in wanted if count is not None), default=0)
    return most, {row: i for i, row in enumerate(indices)}


def _argmax(logits: Tensor) -> tuple[list[int], frozenset[int]]:
    if logits.device.type == "cpu":
        # numpy's vectorised argmax is several times faster than torch's on a CPU.
        array = logits.numpy()
        ids = array.argmax(axis=1)
        best = array[np.arange(len(ids)), ids]
        is_bad = ~np.isfinite(best)
        bad = frozenset(np.flatnonzero(is_bad).tolist()) if is_bad.any() else frozenset()
        return ids.tolist(), bad
    values, indices = logits.max(dim=1)
    is_bad_list = (~values.isfinite()).tolist()
    return indices.tolist(), frozenset(i for i, flag in enumerate(is_bad_list) if flag)


def _adjust(row_logits: Tensor, row: Sequence) -> None:
    """Penalties, biases and the ban on early ends, in place on [V]."""
    sampling = row.request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = _prompt_mask(row, len(row_logits)) | (_counts(row, len(row_logits)) > 0)
        where = torch.from_numpy(seen).to(row_logits.device)
        penalty = sampling.repetition_penalty
        punished = torch.where(row_logits > 0, row_logits / penalty, row_logits * penalty)
        # A penalty next to zero overflows; that is the request's doing and not the model's fault.
        largest = torch.finfo(row_logits.dtype).max
        punished.clamp_(-largest, largest)
        row_logits.copy_(torch.where(where & row_logits.isfinite(), punished, row_logits))
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = torch.from_numpy(_counts(row, len(row_logits))).to(row_logits.device)
        row_logits.sub_(counts * sampling.frequency_penalty)
        row_logits.sub_((counts > 0) * sampling.presence_penalty)
    if sampling.logit_bias:
        ids, values = _bias(row)
        row_logits[ids.to(row_logits.device)] += values.to(row_logits)
    if row.num_output < sampling.min_tokens and row.stop_ids:
        row_logits[list(row.stop_ids)] = float("-inf")


def _bias(row: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """The request's biases as ids and values, made once: a request may have a thousand."""
    if row.bias is None:
        biases = row.request.sampling.logit_bias
        row.bias = (torch.tensor(list(biases)), torch.tensor(list(biases.values())))
    return row.bias


def _counts(row: Sequence, vocab_size: int) -> np.ndarray[Any, Any]:
    if row.counts is None:
        generated = np.array(row.tokens[row.num_prompt :], dtype=np.int64)
        row.counts = np.bincount(generated, minlength=vocab_size)
    return row.counts


def _prompt_mask(row: Sequence, vocab_size: int) -> np.ndarray[Any, Any]:
    if row.prompt_mask is None:
        row.prompt_mask = np.zeros(vocab_size, dtype=np.bool_)
        row.prompt_mask[row.tokens[: row.num_prompt]] = True
    return row.prompt_mask


def _has_limits(row: Sequence) -> bool:
    sampling = row.request.sampling
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw(logits: Tensor, rows: Rows[Sequence], has_limits: bool) -> list[int]:
    """Inverse-CDF draws of [R, V] rows at their temperatures."""
    params = [row.request.sampling for row in rows]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    # Float64, because a cumulative sum over V float32 numbers loses the tail.
    wide = logits.double()
    wide = (wide - wide.amax(dim=1, keepdim=True)) / column([p.temperature for p in params])
    probs = wide.softmax(dim=1)
    order = None
    if has_limits:
        probs, order = probs.sort(dim=1, descending=True, stable=True)
        vocab_size = logits.shape[1]
        top_k = column([float(p.top_k or vocab_size) for p in params])
        ranks = torch.arange(vocab_size, device=logits.device).unsqueeze(0)
        is_kept = (ranks < top_k) & (probs >= probs[:, :1] * column([p.min_p for p in params]))
        probs = torch.where(is_kept, probs, 0.0)
        probs = probs / probs.sum(dim=1, keepdim=True)
        is_nucleus = probs.cumsum(dim=1) - probs < column([p.top_p for p in params])
        is_nucleus[:, 0] = True
        probs = torch.where(is_nucleus, probs, 0.0)
    cumulative = probs.cumsum(dim=1)
    noise = uniform([row.seed for row in rows], [row.num_output for row in rows])
    target = column(noise.tolist()) * cumulative[:, -1:]
    index = (cumulative <= target).sum(dim=1, keepdim=True)
    # A target that rounds up to the whole mass would point behind the last candidate.
    last = (probs > 0).sum(dim=1, keepdim=True) - 1 if has_limits else logits.shape[1] - 1
    index = torch.minimum(index, torch.as_tensor(last, device=logits.device))
    chosen = index if order is None else order.gather(1, index)
    out: list[int] = chosen.squeeze(1).tolist()
    return out


def score_tokens(logits: Tensor, tokens: Rows[int], num_top: int) -> TokenScores:
    """Log-probabilities from raw logits.

    Args:
        logits: [R, V] float32.
        tokens: One id a row.
        num_top: Most probable tokens to report beside it.
    """
    index = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    log_probs = torch.log_softmax(logits, dim=1)
    own = log_probs.gather(1, index)
    ranks = (log_probs > own).sum(dim=1) + 1
    top = log_probs.topk(min(num_top, logits.shape[1]), dim=1)
    return TokenScores(
        own.squeeze(1).tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist()
    )
