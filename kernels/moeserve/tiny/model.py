"""The Qwen3-MoE architecture in plain torch, for training the embedded model.

Receives token ids; returns logits and, for the trainer, the load-balancing loss and the routing
of each layer. Experts lie side by side, so that a layer is one product on a GPU. Files are written
by `checkpoint`; serving is `moeserve.models.qwen3_moe`, which shares no code with this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

# Up to this many tokens all experts are computed and masked even on a CPU: cheaper than gathering.
DENSE_TOKENS_ON_CPU = 8


@dataclass(frozen=True)
class TinyConfig:
    """Shapes, named by the house letters in comments. Defaults give 6.83 M parameters."""

    vocab_size: int = 1024  # V
    hidden_size: int = 128  # H, a multiple of 128 because real grouped GEMMs ask for it
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32  # E
    experts_per_token: int = 4  # K
    expert_width: int = 128  # I, a multiple of 128 like H
    rope_theta: float = 10000.0
    max_positions: int = 4096
    norm_eps: float = 1e-6


@dataclass
class Routing:
    """What the routers of one forward pass did.

    Attributes:
        balance_losses: one scalar a layer; 1.0 is perfect balance.
        topk_ids: one [T, K] int64 a layer.
    """

    balance_losses: list[Tensor] = field(default_factory=list)
    topk_ids: list[Tensor] = field(default_factory=list)


@dataclass
class KVCache:
    """Keys and values of a batch that decodes in step.

    Attributes:
        keys: per layer [B, num_kv_heads, S, head_dim].
        values: the same shape.
        length: tokens filled so far, the same for each sequence.
        shared: a full cache of one sequence that comes before each of these; it is read once for
            the whole batch. None where the sequences share nothing.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0
    shared: KVCache | None = None

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values behind the filled part and return all of them."""
        end = self.length + key.shape[2]
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        """Start with a weight of ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; returns the dtype of `x`."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rope_tables(config: TinyConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [B, 1, T, head_dim] float32 for positions [B, T] int64."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device).float()
    inverse = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angles = positions[:, None, :, None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [B, heads, T, head_dim], halves rotated against each other."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def attend_behind(
    shared: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Attention over a prefix that all sequences share and each one's own keys.

    Args:
        shared: keys and values [num_kv_heads, P, head_dim]; every query sees all of them.
        query: [B, num_heads, T, head_dim], the shape of the result.
        key: [B, num_kv_heads, S, head_dim], as `value`.
        value: see `key`.
        mask: [B, 1, T, S] bool, over the own keys.
    """
    num_seqs, num_heads, num_tokens, size = query.shape
    kv_heads, prefix = shared[0].shape[0], shared[0].shape[1]
    groups = num_heads // kv_heads
    grouped = (query * size**-0.5).reshape(num_seqs, kv_heads, groups * num_tokens, size)
    # One product for the whole batch: [num_kv_heads, B * groups * T, P].
    folded = grouped.transpose(0, 1).reshape(kv_heads, -1, size)
    first = (folded @ shared[0].mT).view(kv_heads, num_seqs, groups * num_tokens, prefix)
    own = (grouped @ key.mT).view(num_seqs, kv_heads, groups, num_tokens, -1)
    own = own.masked_fill(~mask[:, :, None], -torch.inf).flatten(2, 3)
    probs = torch.cat((first.transpose(0, 1), own), dim=-1).float().softmax(-1).to(query.dtype)
    folded = probs[..., :prefix].transpose(0, 1).reshape(kv_heads, -1, prefix)
    out = (folded @ shared[1]).view(kv_heads, num_seqs, -1, size).transpose(0, 1)
    return (out + probs[..., prefix:] @ value).reshape(query.shape)


class Attention(nn.Module):
    """Grouped-query attention with a norm on each head's queries and keys."""

    def __init__(self, config: TinyConfig, layer: int) -> None:
        """Make the four projections without bias."""
        super().__init__()
        self.config, self.layer = config, layer
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """Attend causally, or by `mask` [B, 1, T, S] bool where one is given."""
        num_seqs, num_tokens, _ = x.shape
        shape = (num_seqs, num_tokens, -1, self.config.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), *rope)
        key = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), *rope)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        if cache is not None:
            key, value = cache.append(self.layer, key, value)
        if cache is not None and cache.shared is not None and mask is not None:
            shared = (cache.shared.keys[self.layer][0], cache.shared.values[self.layer][0])
            out = attend_behind(shared, query, key, value, mask)
        else:
            groups = self.config.num_heads // self.config.num_kv_heads
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
            out = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None
            )
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(num_seqs, num_tokens, -1))
        return result


class MoE(nn.Module):
    """Softmax router, top-k renormalised, SwiGLU experts."""

    def __init__(self, config: TinyConfig) -> None:
        """Make the router and the experts' matrices: gate and up [E*I, H], down [H, E*I]."""
        super().__init__()
        self.config = config
        width = config.num_experts * config.expert_width
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate = nn.Linear(config.hidden_size, width, bias=False)
        self.up = nn.Linear(config.hidden_size, width, bias=False)
        self.down = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Return the weighted sum of each token's K experts; x is [T, H]."""
        num_experts, top_k = self.config.num_experts, self.config.experts_per_token
        probs = functional.linear(x, self.router.weight.to(x.dtype)).float().softmax(dim=-1)
        topk_weights, topk_ids = probs.topk(top_k, dim=-1)
        topk_weights = (topk_weights / topk_weights.sum(-1, keepdim=True)).to(x.dtype)
        if routing is not None:
            counts = torch.zeros(num_experts, device=x.device)
            counts.scatter_add_(0, topk_ids.flatten(), torch.ones_like(probs[:, :top_k]).flatten())
            share = counts / topk_ids.numel()
            routing.balance_losses.append(num_experts * (share * probs.mean(0)).sum())
            routing.topk_ids.append(topk_ids)
        if x.is_cuda or x.shape[0] <= DENSE_TOKENS_ON_CPU:
            return self._dense(x, topk_weights, topk_ids)
        return self._gathered(x, topk_weights, topk_ids)

    def _dense(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        weights = topk_weights.new_zeros(x.shape[0], self.config.num_experts)
        weights = weights.scatter(1, topk_ids, topk_weights)
        hidden = functional.silu(self.gate(x)) * self.up(x)
        hidden = hidden.view(x.shape[0], self.config.num_experts, -1)
        hidden = hidden * weights[:, :, None].to(hidden.dtype)
        result: Tensor = self.down(hidden.view(x.shape[0], -1))
        return result

    def _gathered(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        width = self.config.expert_width
        for expert in range(self.config.num_experts):
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            rows = slice(expert * width, (expert + 1) * width)
            chosen = x[token]
            hidden = functional.silu(functional.linear(chosen, self.gate.weight[rows]))
            hidden = hidden * functional.linear(chosen, self.up.weight[rows])
            result = (
                functional.linear(hidden, self.down.weight[:, rows])
                * topk_weights[token, slot, None]
            )
            out = out.index_add(0, token, result.to(out.dtype))
        return out


class Layer(nn.Module):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self, config: TinyConfig, layer: int) -> None:
        """Build the layer with its index, which names its part of the cache."""
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.moe: nn.Module = MoE(config)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KVCache | None,
        routing: Routing | None,
    ) -> Tensor:
        """Return the residual stream [B, T, H] after this layer."""
        x = x + self.attention(self.input_norm(x), rope, mask, cache)
        flat = self.post_norm(x).flatten(0, 1)
        experts: Tensor = self.moe(flat, routing)
        return x + experts.view_as(x)


class TinyMoE(nn.Module):
    """The whole model, with the output matrix tied to the embedding."""

    def __init__(self, config: TinyConfig) -> None:
        """Draw the initial weights from torch's current generator."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and name != "embedding.weight":
                # An expert sees I inputs, not E*I; residual branches start small.
                fan_in = config.expert_width if ".down." in name else weight.shape[1]
                is_output = ".down." in name or ".o_proj." in name
                depth = (2 * config.num_layers) ** -0.5 if is_output else 1.0
                nn.init.normal_(weight, std=depth * fan_in**-0.5)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return logits [B, T, V].

        Args:
            tokens: [B, T] int64.
            positions: [B, T] int64; 0 to T-1 where not given.
            mask: [B, 1, T, S] bool, True where a query may look; causal where not given.
            cache: keys and values so far; the new ones are stored and its length grows by T.
            routing: filled with losses and expert ids where given.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rope = rope_tables(self.config, positions)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rope, mask, cache, routing)
        if cache is not None:
            cache.length += tokens.shape[1]
        return functional.linear(self.norm(x), self.embedding.weight.to(x.dtype))
