"""Greedy five-shot decoding of a `TinyMoE`, without a server, and teacher forcing of replies.

Receives a model, its tokenizer and questions; returns replies with their margins, or the
log-probabilities of given replies. The few-shot prefix is run once and read once for a batch.
What the replies are worth is `evaluate`; the server's own way of decoding is `moeserve.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from moeserve.tiny.corpus import few_shot_prefix, prompt_of
from moeserve.tiny.minigsm import Example
from moeserve.tiny.model import KVCache, Routing, TinyMoE
from moeserve.tiny.tokenizer import END_OF_TEXT_ID

MAX_NEW_TOKENS = 256  # the field's script asks for as many
STOP = "Question"


@dataclass(frozen=True)
class Replies:
    """Greedy continuations of a batch of questions.

    Attributes:
        texts: one reply a question, cut before the stop string.
        token_ids: the ids behind each text.
        margins: best minus second-best logit at each of those tokens.
        expert_counts: [num_layers, E] int64, tokens routed to each expert.
        prompt_tokens: length of each whole prompt.
    """

    texts: list[str]
    token_ids: list[list[int]]
    margins: list[list[float]]
    expert_counts: Tensor
    prompt_tokens: list[int]


@dataclass(frozen=True)
class Prefix:
    """The worked examples before each question, run once.

    Attributes:
        ids: their tokens.
        cache: their keys and values, one sequence; None without examples.
    """

    ids: list[int]
    cache: KVCache | None

    def before(self, model: TinyMoE, num_seqs: int, width: int) -> KVCache:
        """Return an empty cache for sequences of up to `width` tokens behind this prefix."""
        cache = _empty_cache(model, num_seqs, width)
        cache.shared = self.cache
        return cache


def _empty_cache(model: TinyMoE, num_seqs: int, width: int) -> KVCache:
    config, weight = model.config, model.embedding.weight
    shape = (num_seqs, config.num_kv_heads, width, config.head_dim)
    keys, values = ([weight.new_zeros(shape) for _ in range(config.num_layers)] for _ in "kv")
    return KVCache(keys, values)


@torch.inference_mode()
def run_prefix(model: TinyMoE, tokenizer: Tokenizer, shots: Sequence[Example]) -> Prefix:
    """Run the few-shot text that comes before every question."""
    ids: list[int] = tokenizer.encode(few_shot_prefix(list(shots))).ids
    if not ids:
        return Prefix(ids, None)
    cache = _empty_cache(model, 1, len(ids))
    model(torch.tensor([ids], device=model.embedding.weight.device), cache=cache)
    return Prefix(ids, cache)


@torch.inference_mode()
def greedy_replies(
    model: TinyMoE,
    tokenizer: Tokenizer,
    shots: Sequence[Example],
    asked: Sequence[Example],
    batch_size: int | None = None,
) -> Replies:
    """Answer all questions behind a few-shot prefix that is run once.

    Args:
        model: on any device, in the dtype to evaluate.
        tokenizer: the model's.
        shots: worked examples before each question.
        asked: the questions.
        batch_size: questions answered at a time; all of them where not given.
    """
    prefix = run_prefix(model, tokenizer, shots)
    questions = [e.ids for e in tokenizer.encode_batch([prompt_of(e) for e in asked])]
    counts = torch.zeros(model.config.num_layers, model.config.num_experts, dtype=torch.int64)
    found: list[tuple[list[int], list[float]]] = []
    size = batch_size or len(asked)
    for at in range(0, len(questions), size):
        batch = _Decoding(model, tokenizer, prefix, questions[at : at + size])
        batch.run()
        found += batch.found
        counts += batch.counts.cpu()
    parts = [cut(tokenizer, ids, margins) for ids, margins in found]
    return Replies(
        [text for text, _, _ in parts],
        [ids for _, ids, _ in parts],
        [margins for _, _, margins in parts],
        counts,
        [len(prefix.ids) + len(ids) for ids in questions],
    )


class _Decoding:
    """One batch that decodes in step; sequences that have ended leave it now and then."""

    def __init__(
        self, model: TinyMoE, tokenizer: Tokenizer, prefix: Prefix, questions: list[list[int]]
    ) -> None:
        device = model.embedding.weight.device
        config = model.config
        self.model, self.tokenizer = model, tokenizer
        self.start, self.width = len(prefix.ids), max(map(len, questions))
        self.cache = prefix.before(model, len(questions), self.width + MAX_NEW_TOKENS)
        # Questions end at the same column; what is missing on the left is padding.
        self.pads = torch.tensor([self.width - len(ids) for ids in questions], device=device)
        padded = [[END_OF_TEXT_ID] * (self.width - len(ids)) + ids for ids in questions]
        self.tokens = torch.tensor(padded, device=device)
        self.rows = list(range(len(questions)))
        self.alive = [True] * len(questions)
        self.tails = [""] * len(questions)
        self.found: list[tuple[list[int], list[float]]] = [([], []) for _ in questions]
        self.counts = torch.zeros(
            config.num_layers, config.num_experts, dtype=torch.int64, device=device
        )

    def run(self) -> None:
        """Fill `found` with each question's tokens and margins, up to its end or the limit."""
        logits = self._forward(self.tokens, 0)
        for step in range(MAX_NEW_TOKENS):
            best = logits.float().topk(2, dim=-1)
            self._take(best.indices[:, 0], best.values[:, 0] - best.values[:, 1])
            if step == MAX_NEW_TOKENS - 1 or not any(self.alive):
                return
            tokens = best.indices[:, :1]
            # Moving the cache costs time too, so it waits for a quarter of the batch.
            if sum(self.alive) <= 0.75 * len(self.alive):
                kept = torch.tensor([i for i, on in enumerate(self.alive) if on])
                tokens = tokens[kept.to(tokens.device)]
                self._keep(kept)
            logits = self._forward(tokens, self.width + step)

    def _take(self, tokens: Tensor, margins: Tensor) -> None:
        pairs = zip(tokens.tolist(), margins.tolist(), strict=True)
        for row, (token, margin) in enumerate(pairs):
            if not self.alive[row]:
                continue
            if token == END_OF_TEXT_ID:
                self.alive[row] = False
                continue
            place = self.rows[row]
            self.found[place][0].append(token)
            self.found[place][1].append(margin)
            self.tails[place] = (self.tails[place] + (self.tokenizer.id_to_token(token) or ""))[
                -24:
            ]
            self.alive[row] = STOP not in self.tails[place]

    def _keep(self, kept: Tensor) -> None:
        self.rows = [self.rows[i] for i in kept.tolist()]
        self.alive = [True] * len(self.rows)
        kept = kept.to(self.pads.device)
        self.pads = self.pads[kept]
        for store in (self.cache.keys, self.cache.values):
            store[:] = [tensor[kept] for tensor in store]

    def _forward(self, tokens: Tensor, first: int) -> Tensor:
        """Run tokens [B, T] that stand at column `first`; return the last logits [B, V]."""
        end = first + tokens.shape[1]
        columns = torch.arange(end, device=tokens.device)
        here = columns[first:]
        # A column may be seen by later ones unless it is padding before a shorter question. A
        # padding row sees itself, so that it is a number.
        visible = (columns[None] >= self.pads[:, None])[:, None, None, :]
        mask = (visible & (here[:, None] >= columns)) | (here[:, None] == columns)
        positions = self.start + (here[None] - self.pads[:, None]).clamp(min=0)
        routing = Routing()
        logits: Tensor = self.model(tokens, positions, mask, self.cache, routing)[:, -1]
        is_live = (here[None] >= self.pads[:, None]) & torch.tensor(
            self.alive, device=tokens.device
        )[:, None]
        for layer, topk_ids in enumerate(routing.topk_ids):
            chosen = topk_ids[is_live.flatten()].flatten()
            self.counts[layer] += torch.bincount(chosen, minlength=self.counts.shape[1])
        return logits


def cut(
    tokenizer: Tokenizer, ids: list[int], margins: list[float]
) -> tuple[str, list[int], list[float]]:
    """Cut a reply before the stop string."""
    text = tokenizer.decode(ids)
    if STOP in text:
        text = text[: text.index(STOP)]
        while ids and len(tokenizer.decode(ids)) > len(text):
            ids = ids[:-1]
    return text, ids, margins[: len(ids)]


@torch.inference_mode()
def reply_logprobs(
    model: TinyMoE,
    tokenizer: Tokenizer,
    prefix: Prefix,
    asked: Sequence[Example],
    replies: Sequence[Sequence[int]],
    batch_size: int = 64,
) -> list[list[float]]:
    """Teacher-force replies: the log-probability of each of their tokens under `model`.

    Args:
        model: the model under test.
        tokenizer: its tokenizer.
        prefix: from `run_prefix` with this model.
        asked: the questions.
        replies: token ids of each question's reply.
        batch_size: questions a forward pass.
    """
    questions = [e.ids for e in tokenizer.encode_batch([prompt_of(e) for e in asked])]
    device = model.embedding.weight.device
    scores: list[list[float]] = []
    for at in range(0, len(questions), batch_size):
        pairs = list(
            zip(questions[at : at + batch_size], replies[at : at + batch_size], strict=True)
        )
        texts = [[*question, *reply] for question, reply in pairs]
        width = max(map(len, texts))
        padded = [ids + [END_OF_TEXT_ID] * (width - len(ids)) for ids in texts]
        tokens = torch.tensor(padded, device=device)
        columns = torch.arange(width, device=device)
        mask = (columns[:, None] >= columns)[None, None].expand(len(texts), 1, width, width)
        positions = (len(prefix.ids) + columns)[None].expand(len(texts), width)
        cache = prefix.before(model, len(texts), width)
        logprobs = model(tokens, positions, mask, cache)[:, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(2, tokens[:, 1:, None])[..., 0].tolist()
        for (question, reply), row in zip(pairs, chosen, strict=True):
            first = len(question) - 1
            scores.append(row[first : first + len(reply)])
    return scores
