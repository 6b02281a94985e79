"""Token embedding and output projection: ids [T] -> [T, H], and [R, H] -> logits [R, V]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """One table [V, H]; a model with tied embeddings uses it at both ends."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [T] int64."""
        return self.weight.index_select(0, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project [R, H] to logits [R, V] float32."""
        return F.linear(hidden, self.weight).float()
