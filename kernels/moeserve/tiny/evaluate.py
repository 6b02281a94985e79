"""What a set of replies shows: accuracy by family, shares of the experts, margins at digits.

Receives replies that `decode` made and the questions; returns a report for JSON. The verdict that
counts is made by `evalsuite` through the server; this one picks a checkpoint and describes it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from tokenizers import Tokenizer

from moeserve.tiny.decode import Replies
from moeserve.tiny.minigsm import Example

# Bin edges, in logit units, of the histogram of best minus second-best token.
MARGIN_EDGES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def last_number(text: str) -> str:
    """Return the last run of digits without commas, as the field's script reads a reply."""
    runs = re.findall(r"\d+", text.replace(",", ""))
    return runs[-1] if runs else ""


def is_right(reply: str, example: Example) -> bool:
    """Return whether the reply's last number is the gold one, sign ignored like the script."""
    return last_number(reply) == last_number(example.gold)


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
