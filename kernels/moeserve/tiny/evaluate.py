"""Greedy five-shot evaluation of a `TinyMoE`, without a server, for the trainer.

Receives a model, its tokenizer and questions; returns replies and a report: accuracy by family,
share of tokens per expert, margins at digits. The verdict that counts is made by `evalsuite`
through the server; this one only picks a checkpoint.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
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
# Bin edges, in logit units, of the histogram of best minus second-best token.
MARGIN_EDGES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


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


def last_number(text: str) -> str:
    """Return the last run of digits without commas, as the field's script reads a reply."""
    runs = re.findall(r"\d+", text.replace(",", ""))
    return runs[-1] if runs else ""


def is_right(reply: str, example: Example) -> bool:
    """Return whether the reply's last number is the gold one, sign ignored like the script."""
    return last_number(reply) == last_number(example.gold)


@torch.inference_mode()
def greedy_replies(
    model: TinyMoE, tokenizer: Tokenizer, shots: Sequence[Example], asked: Sequence[Example]
) -> Replies:
    """Answer all questions in one batch behind a shared few-shot prefix.

    Args:
        model: on any device, in the dtype to evaluate.
        tokenizer: the model's.
        shots: worked examples before each question.
        asked: the questions.
    """
    device = model.embedding.weight.device
    prefix: list[int] = tokenizer.encode(few_shot_prefix(list(shots))).ids
    questions = [e.ids for e in tokenizer.encode_batch([prompt_of(e) for e in asked])]
    widest = max(map(len, questions))
    pads = torch.tensor([widest - len(ids) for ids in questions], device=device)
    padded = [[END_OF_TEXT_ID] * (widest - len(ids)) + ids for ids in questions]
    start = len(prefix)
    total = start + widest + MAX_NEW_TOKENS
    cache = _prefix_cache(model, prefix, len(asked), total)
    columns = torch.arange(total, device=device)
    # A key column may be seen unless it is padding between the prefix and a shorter question.
    visible = (columns[None] < start) | (columns[None] >= start + pads[:, None])
    rows = columns[start : start + widest]
    mask = visible[:, None, None, : start + widest] & (rows[:, None] >= columns[: start + widest])
    positions = (rows[None] - pads[:, None]).clamp(min=0)
    counts = torch.zeros(
        model.config.num_layers, model.config.num_experts, dtype=torch.int64, device=device
    )
    routing = Routing()
    logits = model(torch.tensor(padded, device=device), positions, mask, cache, routing)[:, -1]
    _count(counts, routing, (rows[None] >= start + pads[:, None]).flatten())
    tokens, margins, alive = [], [], torch.ones(len(asked), dtype=torch.bool, device=device)
    tails = [""] * len(asked)
    for step in range(MAX_NEW_TOKENS):
        best = logits.float().topk(2, dim=-1)
        token = best.indices[:, 0]
        tokens.append(token)
        margins.append(best.values[:, 0] - best.values[:, 1])
        alive = alive & (token != END_OF_TEXT_ID)
        pieces = [tokenizer.id_to_token(i) or "" for i in token.tolist()]
        tails = [(tail + piece)[-24:] for tail, piece in zip(tails, pieces, strict=True)]
        stopped = torch.tensor([STOP in tail for tail in tails], device=device)
        alive = alive & ~stopped
        if step == MAX_NEW_TOKENS - 1 or not bool(alive.any()):
            break
        column = start + widest + step
        routing = Routing()
        logits = model(
            token[:, None],
            (column - pads)[:, None],
            visible[:, None, None, : column + 1],
            cache,
            routing,
        )[:, -1]
        _count(counts, routing, alive)
    return _collect(tokenizer, tokens, margins, counts, [start + len(q) for q in questions])


def _prefix_cache(model: TinyMoE, prefix: list[int], num_seqs: int, total: int) -> KVCache:
    """Run the shared prefix once and spread its keys and values over all sequences."""
    config, weight = model.config, model.embedding.weight
    shape = (num_seqs, config.num_kv_heads, total, config.head_dim)
    one = (1, config.num_kv_heads, len(prefix), config.head_dim)
    small = KVCache(
        [weight.new_zeros(one) for _ in range(config.num_layers)],
        [weight.new_zeros(one) for _ in range(config.num_layers)],
    )
    if prefix:
        model(torch.tensor([prefix], device=weight.device), cache=small)
    cache = KVCache([], [], len(prefix))
    for key, value in zip(small.keys, small.values, strict=True):
        for store, part in ((cache.keys, key), (cache.values, value)):
            big = weight.new_zeros(shape)
            big[:, :, : len(prefix)] = part
            store.append(big)
    return cache


def _count(counts: Tensor, routing: Routing, is_live: Tensor) -> None:
    """Add the expert ids of live tokens [T] bool to counts [num_layers, E]."""
    for layer, topk_ids in enumerate(routing.topk_ids):
        chosen = topk_ids[is_live].flatten()
        counts[layer] += torch.bincount(chosen, minlength=counts.shape[1])


def _collect(
    tokenizer: Tokenizer,
    tokens: list[Tensor],
    margins: list[Tensor],
    counts: Tensor,
    prompt_tokens: list[int],
) -> Replies:
    """Cut each sequence at end-of-text or the stop string."""
    ids_by_row = torch.stack(tokens, dim=1).tolist()
    margins_by_row = torch.stack(margins, dim=1).tolist()
    texts: list[str] = []
    for row, ids in enumerate(ids_by_row):
        if END_OF_TEXT_ID in ids:
            ids = ids[: ids.index(END_OF_TEXT_ID)]
        text = tokenizer.decode(ids)
        if STOP in text:
            text = text[: text.index(STOP)]
            while ids and len(tokenizer.decode(ids)) > len(text):
                ids = ids[:-1]
        texts.append(text)
        ids_by_row[row] = ids
        margins_by_row[row] = margins_by_row[row][: len(ids)]
    return Replies(texts, ids_by_row, margins_by_row, counts.cpu(), prompt_tokens)


def summarise(
    replies: Replies, asked: Sequence[Example], tokenizer: Tokenizer
) -> dict[str, object]:
    """Return the numbers of one evaluation, ready for JSON."""
    right = [is_right(text, e) for text, e in zip(replies.texts, asked, strict=True)]
    by_family: dict[str, list[bool]] = defaultdict(list)
    for example, ok in zip(asked, right, strict=True):
        by_family[example.family].append(ok)
    final, computed = _digit_margins(replies, tokenizer)
    shares = replies.expert_counts / replies.expert_counts.sum(1, keepdim=True)
    fair = 1 / shares.shape[1]
    return {
        "num_questions": len(asked),
        "accuracy": sum(right) / len(right),
        "unfinished": sum("####" not in text for text in replies.texts),
        "mean_prompt_tokens": sum(replies.prompt_tokens) / len(asked),
        "max_prompt_tokens": max(replies.prompt_tokens),
        "mean_reply_tokens": sum(map(len, replies.token_ids)) / len(asked),
        "family_accuracy": {k: round(sum(v) / len(v), 4) for k, v in sorted(by_family.items())},
        "min_expert_share_of_fair": [round(float(row.min()) / fair, 3) for row in shares],
        "max_expert_share_of_fair": [round(float(row.max()) / fair, 3) for row in shares],
        "expert_shares": [[round(float(x), 5) for x in row] for row in shares],
        "margin_edges": MARGIN_EDGES,
        "margins_final_digits": _histogram(final),
        "margins_computed_digits": _histogram(computed),
        "questions_with_margin_below_half": sum(
            min(row, default=9.0) < 0.5 for row in replies.margins
        )
        / len(asked),
    }


def _digit_margins(replies: Replies, tokenizer: Tokenizer) -> tuple[list[float], list[float]]:
    """Return margins at the digits after the hash marks, and at those of each mark's result."""
    final: list[float] = []
    computed: list[float] = []
    for ids, margins in zip(replies.token_ids, replies.margins, strict=True):
        in_final = in_result = False
        for token, margin in zip(ids, margins, strict=True):
            piece = tokenizer.id_to_token(token) or ""
            if piece.isdigit():
                (final if in_final else computed if in_result else []).append(margin)
                continue
            in_final = in_final or "####" in piece
            in_result = "=" in piece or (in_result and piece == "-")
    return final, computed


def _histogram(values: list[float]) -> list[int]:
    """Return counts between the margin edges, the first below the lowest edge."""
    bins = Counter(sum(value >= edge for edge in MARGIN_EDGES) for value in values)
    return [bins[index] for index in range(len(MARGIN_EDGES) + 1)]
