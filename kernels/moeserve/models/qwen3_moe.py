"""Qwen3-MoE: pre-norm decoder, attention with a norm on each head, experts in most layers.

Receives a `ForwardBatch`, returns hidden states [T, H]. Layers are `moeserve.layers`; names of
checkpoint tensors are here, reading them is `runner/weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moeserve.layers.attention import Attention, AttentionShape
from moeserve.layers.embedding import SMALL_ROWS, Embedding
from moeserve.layers.linear import GatedMLP
from moeserve.layers.moe import MoELayer
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rope import RotaryTable
from moeserve.models.base import BuildContext

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch


class DecoderLayer(nn.Module):
    """Attention and experts (or a dense MLP), each behind a norm and added to its input."""

    def __init__(self, context: BuildContext, index: int) -> None:
        super().__init__()
        spec, dtype, is_fused = context.spec, context.dtype, context.attention.is_fused
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, is_fused=is_fused)
        self.attention = Attention(
            spec.hidden_size,
            AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype),
            context.attention,
            norm_eps=spec.rms_norm_eps,
            has_bias=spec.has_attention_bias,
            projection=context.projection,
        )
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
        # Deterministic mode keeps one form for every number of rows.
        self.is_small_fused = (
            is_fused and context.projection is None and isinstance(self.mlp, MoELayer)
        )

    def forward(
        self, x: Tensor | None, residual: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            x: [T, H], what the layer before adds to the stream; None in the first layer.
            residual: [T, H], the stream; may be written to.
            rope: See `Attention.forward`.
            batch: The step.

        Returns:
            What this layer adds to the stream, and the stream before that.
        """
        if self.is_small_fused and residual.shape[0] <= SMALL_ROWS:
            return self._forward_small(x, residual, rope, batch)
        normed, residual = self.input_norm.add(x, residual)
        attended = self.attention.forward(normed, rope, batch)
        normed, residual = self.post_norm.add(attended, residual)
        if isinstance(self.mlp, MoELayer):
            return self.mlp.forward(normed, batch), residual
        return self.mlp.forward(normed), residual

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
        attended = gemv(attended, attention.o_weight, attention.o_bias)
        norm = Norm(self.post_norm.weight, self.post_norm.eps)
        second = norm_gemv(attended, first.stream, norm, mlp.gate_weight)
        return mlp.forward(second.normed, batch, second.out), second.stream


class Qwen3MoeForCausalLM(nn.Module):
    """See `models/base.py` for the contract."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        spec, dtype, is_fused = context.spec, context.dtype, context.attention.is_fused
        self.spec = spec
        self.is_fused = is_fused

        def table() -> Embedding:
            return Embedding(
                spec.vocab_size, spec.hidden_size, dtype, context.projection, is_fused=is_fused
            )

        self.embedding = table()
        self._decoder_layers = [DecoderLayer(context, i) for i in range(spec.num_layers)]
        self.layers = nn.ModuleList(self._decoder_layers)
        self.final_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, is_fused=is_fused)
        self.head = self.embedding if spec.has_tied_embeddings else table()
        # A fused kernel rotates in float32 and reads one row of the tables for each token.
        rope_dtype = torch.float32 if is_fused else dtype
        self.rope = RotaryTable(
            spec.head_dim, context.max_positions, spec.rope_theta, rope_dtype
        ).to(context.device)

    def forward(self, batch: ForwardBatch, num_layers: int | None = None) -> Tensor:
        """Hidden states [T, H] after the last norm; of the leading layers where given."""
        residual = self.embedding.forward(batch.token_ids, batch.last_tokens)
        rope = (self.rope.cos, self.rope.sin) if self.is_fused else self.rope(batch.positions)
        x: Tensor | None = None
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
                out.update(_moe_destinations(prefix + "mlp.", layer.mlp))
            else:
                out.update(_mlp_destinations(prefix + "mlp.", layer.mlp))
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
            out[prefix + "o_proj.bias"] = attention.o_bias.data
        # Every head has the same norm, so the checkpoint's [head_dim] is spread over the rows.
        norms = torch.split(attention.qk_norm_weight.data, [spec.num_heads, spec.num_kv_heads])
        out[prefix + "q_norm.weight"], out[prefix + "k_norm.weight"] = norms
        return out


def _moe_destinations(prefix: str, layer: MoELayer) -> dict[str, Tensor]:
    out = {prefix + "gate.weight": layer.gate_weight.data}
    width, first = layer.spec.intermediate_size, layer.spec.first_local_expert
    for index in range(layer.spec.num_local_experts):
        name = f"{prefix}experts.{first + index}."
        out[name + "gate_proj.weight"] = layer.w13_weight.data[index, :width]
        out[name + "up_proj.weight"] = layer.w13_weight.data[index, width:]
        out[name + "down_proj.weight"] = layer.w2_weight.data[index]
    return out


def _mlp_destinations(prefix: str, layer: GatedMLP) -> dict[str, Tensor]:
    return {
        prefix + "gate_proj.weight": layer.gate_up_weight.data[: layer.width],
        prefix + "up_proj.weight": layer.gate_up_weight.data[layer.width :],
        prefix + "down_proj.weight": layer.down_weight.data,
    }


ARCHITECTURES = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
