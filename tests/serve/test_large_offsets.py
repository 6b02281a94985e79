"""Element numbers beyond 2^31 in the Triton kernels, in the interpreter.

The buffers are lazily zeroed, so only the pages that a kernel touches take memory. An offset in 32
bits would be a negative one, and end the process. Activations beyond 2^31 need a GPU's memory:
`tests/gpu/test_moe_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch

from moeserve.layers.decode_rows import lazy_zeros
from moeserve.moe import triton_experts
from moeserve.moe.backends.base import Routed
from moeserve.moe.backends.triton import BACKEND
from moeserve.moe.reference import reference_experts
from moeserve.moe.spec import MoESpec, MoEWeights, RoutingSpec
from moeserve.moe.tuning import LayerTiles
from moeserve.triton_kernels import moe_buckets
from moeserve.triton_kernels.gemv import GemvTile
from moeserve.triton_kernels.grouped_gemm import Tile
from moeserve.triton_kernels.router import route

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="lazily zeroed memory is the host's"
)
# ||out - ref|| / ||ref|| of float16 with float32 sums.
LIMIT = 1e-3
POINTED = Tile(16, 32, 64, 4, 2)
SWAPPED = Tile(16, 64, 64, 4, 2, is_swapped=True)
DESCRIBED = Tile(32, 32, 64, 4, 2, uses_tma=True)
PATHS = {
    "pointed": LayerTiles(POINTED, POINTED),
    "swapped": LayerTiles(SWAPPED, SWAPPED),
    "described": LayerTiles(DESCRIBED, DESCRIBED),
    "gemv": LayerTiles(GemvTile(32, 64, 4, 1), GemvTile(16, 32, 4, 1)),
}


def test_router_rows_beyond_31_bits() -> None:
    """The third row begins at element 2^31 exactly."""
    routing = RoutingSpec(4)
    compact = torch.randn(3, 32)
    stride = 2**30
    far = lazy_zeros((2 * stride + 32,), torch.float32).as_strided((3, 32), (stride, 1))
    far.copy_(compact)
    weights, ids = route(far, routing)
    near_weights, near_ids = route(compact, routing)
    assert torch.equal(ids, near_ids)
    assert torch.equal(weights, near_weights)


@pytest.mark.parametrize("path", PATHS)
def test_the_weights_of_the_last_expert_begin_beyond_31_bits(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """65,537 experts: the last one's w2 begins at element 2^31, its w13 at 2^32."""
    monkeypatch.setattr(triton_experts, "tiles_for", lambda call: PATHS[path])
    # One program for each piece of the ids, not one for each of the 65,537 experts.
    monkeypatch.setattr(moe_buckets, "SCAN_SLOTS", 0)
    E, H, I = 65_537, 512, 64
    torch.manual_seed(0)
    weights = MoEWeights(
        lazy_zeros((E, 2 * I, H), torch.float16), lazy_zeros((E, H, I), torch.float16)
    )
    used = [0, E - 1]
    assert weights.w2[-1].storage_offset() == 2**31
    for expert in used:
        weights.w13[expert] = torch.randn(2 * I, H) * H**-0.5
        weights.w2[expert] = torch.randn(H, I) * I**-0.5
    spec = MoESpec(E, H, I, RoutingSpec(1), dtype=torch.float16, platform="cuda-sm90")
    x = torch.randn(2, H).half()
    topk_weights = torch.tensor([[0.5], [0.75]])
    ids = torch.tensor([[E - 1], [0]], dtype=torch.int32)
    out = BACKEND.apply(spec, x, Routed(ids, topk_weights), weights)
    small = MoESpec(2, H, I, RoutingSpec(1), dtype=torch.float16)
    w13, w2 = weights.w13[used].clone(), weights.w2[used].clone()
    near = torch.tensor([[1], [0]], dtype=torch.int32)
    ref = reference_experts(small, x, topk_weights, near, w13, w2)
    assert float((out.double() - ref).norm() / ref.norm()) < LIMIT
