"""Token embedding and output projection: ids [T] -> [T, H], and [R, H] -> logits [R, V]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeserve.layers.linear import Projection
from moeserve.parallel import Parallel

# Rows up to which `triton_kernels/gemv_dense.py` is the faster form; its own limit.
SMALL_ROWS = 4


class Embedding(nn.Module):
    """One table [V, H]; a model with tied embeddings uses it at both ends."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        projection: Projection | None = None,
        *,
        is_fused: bool = False,
    ) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False
        )
        self.projection = projection

    def forward(self, token_ids: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        """Look up rows.

        Args:
            token_ids: [T]; -1 - r stands for `last_tokens[r]` where those are given.
            last_tokens: [max_num_seqs] int32, tokens that only the device knows.
        """
        if last_tokens is None:
            return self.weight.index_select(0, token_ids)
        # Triton is imported only where it is used: a CPU server never needs it.
        from moeserve.triton_kernels.norm import embed

        return embed(token_ids, last_tokens, self.weight)

    def raw_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Project [R, H] to [R, V] in the model's dtype, into `out` where given."""
        if self.projection is not None:
            return self.projection(hidden, self.weight, None, out)
        if self.is_fused and hidden.shape[0] <= SMALL_ROWS:
            # Triton is imported only where it is used: a CPU server never needs it.
            from moeserve.triton_kernels.gemv_dense import gemv

            return gemv(hidden, self.weight, None, out)
        if out is None:
            return F.linear(hidden, self.weight)
        return torch.mm(hidden, self.weight.t(), out=out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project [R, H] to logits [R, V] float32."""
        return self.raw_logits(hidden).float()


class VocabularyHead(nn.Module):
    """The output projection cut by rows over a TP group.

    Every rank has the logits of its rows gathered with those of the others, so that all of them
    hold the same bits and choose the same tokens.
    """

    def __init__(self, rows: Embedding, vocab_size: int, parallel: Parallel) -> None:
        """Take this rank's rows.

        Args:
            rows: ceil(V / tp) of them, or what is left for this rank.
            vocab_size: V.
            parallel: This rank's.
        """
        super().__init__()
        self.rows = rows
        self.vocab_size = vocab_size
        self.parallel = parallel
        self.num_rows = -(-vocab_size // parallel.tp_size)

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.rows.weight

    def raw_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Embedding.raw_logits`."""
        part = self.rows.raw_logits(hidden)
        if part.shape[1] < self.num_rows:
            part = F.pad(part, (0, self.num_rows - part.shape[1]))
        whole = self.parallel.all_gather_tp(part)
        logits = whole.transpose(0, 1).reshape(hidden.shape[0], -1)[:, : self.vocab_size]
        return logits if out is None else out.copy_(logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Embedding.logits`."""
        return self.raw_logits(hidden).float()
