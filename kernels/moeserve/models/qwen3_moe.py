"""Qwen3-MoE: pre-norm decoder, attention with a norm on each head, experts in most layers.

Receives a `ForwardBatch`, returns hidden states [T, H]. Layers are `moeserve.layers`; names of
checkpoint tensors are here and in `qwen3_names.py`, reading them is `runner/weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moeserve.layers.attention import Attention, AttentionShape
from moeserve.layers.embedding import SMALL_ROWS, Embedding, VocabularyHead
from moeserve.layers.linear import GatedMLP
from moeserve.layers.moe import MoELayer
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rope import RotaryTable
from moeserve.models.base import BuildContext
from moeserve.models.qwen3_names import (
    MLP_PARTS,
    attention_cuts,
    mlp_cuts,
    mlp_destinations,
    moe_destinations,
)
from moeserve.models.shards import NOT_CUT, Cut, Shards, local_spec, vocabulary_rows

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch
    from moeserve.triton_kernels.combine import SlotSum


class DecoderLayer(nn.Module):
    """Attention and experts (or a dense MLP), each behind a norm and added to its input."""

    def __init__(self, context: BuildContext, index: int) -> None:
        super().__init__()
        spec, dtype, is_fused = context.spec, context.dtype, context.attention.is_fused
        self.parallel = context.parallel
        spec = local_spec(spec, self.parallel)
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, is_fused=is_fused)
        self.attention = Attention(
            spec.hidden_size,
            AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype),
            context.attention,
            norm_eps=spec.rms_norm_eps,
            has_bias=spec.has_attention_bias,
            projection=context.projection,
        )
        if self.parallel.tp_rank > 0 and self.attention.o_bias is not None:
            # The sum over the ranks is to have it once.
            self.attention.o_bias.zero_()
        self.post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, is_fused=is_fused)
        self.mlp: MoELayer | GatedMLP
        if spec.is_moe_layer[index]:
            assert context.moe_spec is not None
            assert context.moe_plan is not None
            self.mlp = MoELayer(
                context.moe_spec,
                context.moe_plan,
                context.device,
                parallel=context.parallel,
                workspace=context.workspace,
            )
        else:
            self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, dtype, context.projection)
        # Sums over ranks come before the norm, so nothing is left to it then.
        self.leaves_sums = is_fused and self.parallel.tp_size == 1
        # Deterministic mode keeps one form for every number of rows.
        self.is_small_fused = (
            is_fused and context.projection is None and isinstance(self.mlp, MoELayer)
        )

    def forward(
        self,
        x: Tensor | SlotSum | None,
        residual: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> tuple[Tensor | SlotSum, Tensor]:
        """Run the layer.

        Args:
            x: [T, H], what the layer before adds to the stream, perhaps a sum still to be taken;
                None in the first layer.
            residual: [T, H], the stream; may be written to.
            rope: See `Attention.forward`.
            batch: The step.

        Returns:
            What this layer adds to the stream, and the stream before that.
        """
        if self.is_small_fused and residual.shape[0] <= SMALL_ROWS:
            assert x is None or isinstance(x, Tensor)
            return self._forward_small(x, residual, rope, batch)
        follows_sum = x is not None and not isinstance(x, Tensor)
        normed, residual = self.input_norm.add(x, residual)
        attended = self.parallel.all_reduce_tp(self.attention.forward(normed, rope, batch))
        normed, residual = self.post_norm.add(attended, residual)
        if isinstance(self.mlp, MoELayer):
            added = self.mlp.forward(
                normed, batch, leaves_sum=self.leaves_sums, follows_sum=follows_sum
            )
            return added, residual
        return self.parallel.all_reduce_tp(self.mlp.forward(normed)), residual

    def _forward_small(
        self, x: Tensor | None, residual: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """The same for a handful of rows: norms and additions ride along with the projections."""
        # Triton is imported only where it is used: a CPU server never needs it.
        from moeserve.triton_kernels.gemv_dense import Norm, gemv, norm_gemv

        attention, mlp = self.attention, self.mlp
        assert isinstance(mlp, MoELayer)
        norm = Norm(self.input_norm.weight, self.input_norm.eps)
        first = norm_gemv(x, residual, norm, attention.qkv_weight, attention.qkv_bias)
        attended = attention.attend(first.out, rope, batch)
        attended = self.parallel.all_reduce_tp(gemv(attended, attention.o_weight, attention.o_bias))
        norm = Norm(self.post_norm.weight, self.post_norm.eps)
        second = norm_gemv(attended, first.stream, norm, mlp.gate_weight)
        added = mlp.forward(second.normed, batch, second.out)
        assert isinstance(added, Tensor)
        return added, second.stream


class Qwen3MoeForCausalLM(nn.Module):
    """See `models/base.py` for the contract."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        spec, dtype, is_fused = context.spec, context.dtype, context.attention.is_fused
        self.parallel = context.parallel
        self.whole_spec = spec
        self.spec = local_spec(spec, self.parallel)
        self.is_fused = is_fused

        def table(num_rows: int) -> Embedding:
            return Embedding(
                num_rows, spec.hidden_size, dtype, context.projection, is_fused=is_fused
            )

        self.embedding = table(spec.vocab_size)
        self._decoder_layers = [DecoderLayer(context, i) for i in range(spec.num_layers)]
        self.layers = nn.ModuleList(self._decoder_layers)
        self.final_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, is_fused=is_fused)
        self.head: Embedding | VocabularyHead
        if self.parallel.tp_size > 1:
            start, count = vocabulary_rows(spec.vocab_size, self.parallel)
            rows = table(0 if spec.has_tied_embeddings else count)
            if spec.has_tied_embeddings:
                tied = self.embedding.weight.data[start : start + count]
                rows.weight = nn.Parameter(tied, requires_grad=False)
            self.head = VocabularyHead(rows, spec.vocab_size, self.parallel)
        else:
            self.head = self.embedding if spec.has_tied_embeddings else table(spec.vocab_size)
        # A fused kernel rotates in float32 and reads one row of the tables for each token.
        rope_dtype = torch.float32 if is_fused else dtype
        self.rope = RotaryTable(
            spec.head_dim, context.max_positions, spec.rope_theta, rope_dtype
        ).to(context.device)

    def forward(self, batch: ForwardBatch, num_layers: int | None = None) -> Tensor:
        """Hidden states [T, H] after the last norm; of the leading layers where given."""
        residual = self.embedding.forward(batch.token_ids, batch.last_tokens)
        rope = (self.rope.cos, self.rope.sin) if self.is_fused else self.rope(batch.positions)
        x: Tensor | SlotSum | None = None
        for layer in self._decoder_layers[:num_layers]:
            x, residual = layer.forward(x, residual, rope, batch)
        return self.final_norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32."""
        return self.head.logits(hidden)

    def raw_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, V] in the model's dtype, into `out` where given."""
        return self.head.raw_logits(hidden, out)

    def attention_layers(self) -> list[Attention]:
        """In order."""
        return [layer.attention for layer in self._decoder_layers]

    def moe_layers(self) -> list[MoELayer]:
        """In order."""
        return [x.mlp for x in self._decoder_layers if isinstance(x.mlp, MoELayer)]

    def destinations(self) -> Mapping[str, Tensor]:
        """Checkpoint names -> views of the parameters that they fill."""
        out: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding.weight.data,
            "model.norm.weight": self.final_norm.weight.data,
        }
        if not self.spec.has_tied_embeddings:
            out["lm_head.weight"] = self.head.weight.data
        for index, layer in enumerate(self._decoder_layers):
            prefix = f"model.layers.{index}."
            out[prefix + "input_layernorm.weight"] = layer.input_norm.weight.data
            out[prefix + "post_attention_layernorm.weight"] = layer.post_norm.weight.data
            out.update(self._attention_destinations(prefix + "self_attn.", layer.attention))
            if isinstance(layer.mlp, MoELayer):
                out.update(moe_destinations(prefix + "mlp.", layer.mlp))
            else:
                out.update(mlp_destinations(prefix + "mlp.", layer.mlp))
        return out

    def _attention_destinations(self, prefix: str, attention: Attention) -> dict[str, Tensor]:
        spec = self.spec
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        out = {prefix + "o_proj.weight": attention.o_weight.data}
        parts = zip(
            "qkv", torch.split(attention.qkv_weight.data, [q_rows, kv_rows, kv_rows]), strict=True
        )
        out.update({f"{prefix}{name}_proj.weight": part for name, part in parts})
        if attention.qkv_bias is not None and attention.o_bias is not None:
            biases = torch.split(attention.qkv_bias.data, [q_rows, kv_rows, kv_rows])
            out.update({f"{prefix}{n}_proj.bias": b for n, b in zip("qkv", biases, strict=True)})
            if self.parallel.tp_rank == 0:
                out[prefix + "o_proj.bias"] = attention.o_bias.data
        # Every head has the same norm, so the checkpoint's [head_dim] is spread over the rows.
        norms = torch.split(attention.qk_norm_weight.data, [spec.num_heads, spec.num_kv_heads])
        out[prefix + "q_norm.weight"], out[prefix + "k_norm.weight"] = norms
        return out

    def shards(self) -> Shards:
        """Which part of each checkpoint tensor the destinations are."""
        whole, parallel = self.whole_spec, self.parallel
        if parallel.tp_size * parallel.ep_size == 1:
            return NOT_CUT
        cuts: dict[str, Cut] = {}
        elsewhere: set[str] = set()
        if parallel.tp_size > 1 and not whole.has_tied_embeddings:
            start, _ = vocabulary_rows(whole.vocab_size, parallel)
            cuts["lm_head.weight"] = Cut(0, start, whole.vocab_size)
        for index, layer in enumerate(self._decoder_layers):
            prefix = f"model.layers.{index}."
            cuts.update(attention_cuts(prefix + "self_attn.", whole, parallel))
            if parallel.tp_rank:
                elsewhere.add(prefix + "self_attn.o_proj.bias")
            if not isinstance(layer.mlp, MoELayer):
                cuts.update(mlp_cuts(prefix + "mlp.", whole.intermediate_size, parallel))
                continue
            first, count = layer.mlp.spec.first_local_expert, layer.mlp.spec.num_local_experts
            for expert in range(whole.num_experts):
                name = f"{prefix}mlp.experts.{expert}."
                if not first <= expert < first + count:
                    elsewhere.update(name + part for part in MLP_PARTS)
                elif not parallel.is_expert_parallel:
                    cuts.update(mlp_cuts(name, whole.moe_intermediate_size, parallel))
        return Shards(cuts, frozenset(elsewhere))


ARCHITECTURES = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
