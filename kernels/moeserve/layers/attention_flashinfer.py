"""Paged attention by FlashInfer's wrappers, on the cache and step of `attention_triton.py`.

Receives what `TritonPagedAttention` does and keeps its layout (FlashInfer's "HND"). Norm, rotation
and cache write are our kernels; decode rows and prompts go to FlashInfer, which plans each step on
the host (`prepare`) and, for captured graphs, keeps its plan in buffers that do not move. A prefix
that a batch has in common is read once by our kernels: FlashInfer would read it once a sequence.
Which backend serves is decided in `runner/model_runner.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moeserve.layers.attention import Array, Attention, AttentionShape, HostBatch
from moeserve.layers.attention_triton import TritonPagedAttention, TritonPlan
from moeserve.layers.step_inputs import StepSizes
from moeserve.moe.backends.optional import library_reason
from moeserve.triton_kernels.rope import RopeTables, rope_and_store

if TYPE_CHECKING:
    from moeserve.engine.batch import ForwardBatch

MIN_VERSION = (0, 6, 12)
HEAD_DIMS = (64, 128, 256)
# FlashInfer's own advice for results that it splits over keys.
FLOAT_WORKSPACE_BYTES = 128 << 20
# What its wrappers allocate for a plan.
INT_WORKSPACE_BYTES = 8 << 20
# Plans whose copy to the device may still be under way; as many as steps in flight.
_NUM_STAGES = 3
# From this many query heads a key head on, tensor cores are the faster form.
_TENSOR_CORE_GROUP = 4


def obstacle(shape: AttentionShape, *, is_deterministic: bool) -> str:
    """Why FlashInfer cannot serve this model on this machine; "" where it can."""
    missing = library_reason("flashinfer", "flashinfer-python", at_least=MIN_VERSION)
    if missing:
        return missing
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"no kernels for {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"no kernels for head_dim={shape.head_dim}, only {', '.join(map(str, HEAD_DIMS))}"
    if is_deterministic:
        return "its split over keys depends on the batch, which deterministic mode excludes"
    return ""


class FlashInferPagedAttention(TritonPagedAttention):
    """See `AttentionBackend`; a step's plans are made by `prepare`."""

    name = "flashinfer"

    def __init__(
        self, shape: AttentionShape, page_size: int, device: torch.device, *, reason: str = ""
    ) -> None:
        super().__init__(shape, page_size, device, is_deterministic=False, reason=reason)
        self._library: Any = importlib.import_module("flashinfer")
        is_cuda = device.type == "cuda"
        self._floats = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ints = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._stages = [
            torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
            for _ in range(_NUM_STAGES)
        ]
        self._count = 0
        self._indices = torch.empty(0, dtype=torch.int32, device=device)
        self._graphs: dict[int, Any] = {}
        self._eager = self._new_decode({})
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(self._floats, "HND")
        self._decode_now: Any = self._eager

    def _new_decode(self, buffers: dict[str, Any]) -> Any:
        group = self.heads.NQ // self.heads.NKV
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._floats,
            "HND",
            use_cuda_graph=bool(buffers),
            use_tensor_cores=group >= _TENSOR_CORE_GROUP,
            **buffers,
        )
        # Decode plans are made one at a time: one buffer for all graphs.
        wrapper._int_workspace_buffer = self._ints
        return wrapper

    def prepare_capture(self, size: int, max_pages: int) -> None:
        """Make the wrapper of a graph of `size` rows and give it a plan, if it has none."""
        if size in self._graphs:
            return
        # Graphs are captured largest first, so this is allocated once.
        if size * max_pages > len(self._indices):
            self._indices = torch.zeros(size * max_pages, dtype=torch.int32, device=self.device)
        count = torch.zeros(2 * size + 1, dtype=torch.int32, device=self.device)
        self._graphs[size] = self._new_decode(
            {
                "paged_kv_indptr_buffer": count[: size + 1],
                "paged_kv_indices_buffer": self._indices,
                "paged_kv_last_page_len_buffer": count[size + 1 :],
            }
        )
        nobody = np.zeros((0, 1), dtype=np.int32)
        self._plan_decode(self._graphs[size], nobody, np.zeros(0, dtype=np.int64), size)
        self._decode_now = self._graphs[size]

    def prepare(
        self, host: HostBatch, sizes: StepSizes, *, has_shared: bool, in_graph: bool
    ) -> None:
        """Plan a step, before it is launched."""
        B = host.num_decodes
        if sizes.num_decodes and not has_shared:
            self._decode_now = self._graphs[sizes.num_decodes] if in_graph else self._eager
            self._plan_decode(
                self._decode_now, host.block_table[:B], host.seq_lens[:B], sizes.num_decodes
            )
        if sizes.num_items and not has_shared:
            indptr, indices, last = self._lists(host.block_table[B:], host.seq_lens[B:], 0)
            rows = (host.cu_seqlens_q[B:] - host.cu_seqlens_q[B]).astype(np.int32)
            heads = self.heads
            self._prefill.plan(
                torch.from_numpy(rows), indptr, indices.to(self.device), last,
                heads.NQ, heads.NKV, heads.D, heads.page_size, causal=True,
                q_data_type=self.shape.dtype, kv_data_type=self.shape.dtype,
            )  # fmt: skip

    def _plan_decode(self, wrapper: Any, table: Array, seq_lens: Array, num_rows: int) -> None:
        indptr, indices, last = self._lists(table, seq_lens, num_rows - len(seq_lens))
        heads = self.heads
        if wrapper is not self._eager:
            # Copied here without a wait; FlashInfer's own copy from the host would be one.
            place = self._indices[: len(indices)]
            place.copy_(indices, non_blocking=True)
            indices = place
        else:
            indices = indices.to(self.device, non_blocking=True)
        wrapper._pin_memory_int_workspace_buffer = self._stages[self._count % _NUM_STAGES]
        self._count += 1
        wrapper.plan(
            indptr, indices, last, heads.NQ, heads.NKV, heads.D, heads.page_size,
            q_data_type=self.shape.dtype, kv_data_type=self.shape.dtype,
        )  # fmt: skip

    def _lists(
        self, table: Array, seq_lens: Array, num_padding: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Page lists as FlashInfer wants them: (indptr, indices, last page's tokens), on the host.

        Rows of padding have one token of page 0, which is nobody's.
        """
        counts = -(-seq_lens // self.page_size)
        is_used = np.arange(table.shape[1]) < counts[:, None]
        nobodys = np.zeros(num_padding, dtype=np.int32)
        indices = np.concatenate([table[is_used], nobodys]).astype(np.int32)
        counts = np.concatenate([counts, nobodys + 1])
        last = np.concatenate([(seq_lens - 1) % self.page_size + 1, nobodys + 1])
        indptr = np.concatenate([[0], np.cumsum(counts)])
        lists = [torch.from_numpy(x.astype(np.int32)) for x in (indptr, indices, last)]
        if self.device.type == "cuda":
            lists = [x.pin_memory() for x in lists]
        return lists[0], lists[1], lists[2]

    def forward_fused(
        self,
        qkv: Tensor,
        layer: Attention,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Norm, rotation and cache write by our kernels, attention by FlashInfer's."""
        plan = batch.attention
        assert isinstance(plan, TritonPlan)
        if plan.has_shared:
            return super().forward_fused(qkv, layer, rope, batch)
        views, heads, B = plan.views, self.heads, plan.num_decodes
        norm = None if layer.norm_eps is None else (layer.qk_norm_weight, layer.norm_eps)
        rope_and_store(
            qkv, norm, RopeTables(*rope), (views.positions, views.slots), layer.cache, heads
        )
        T = qkv.shape[0]
        q = qkv.view(T, -1, heads.D)[:, : heads.NQ]
        out = torch.empty(T, heads.NQ, heads.D, dtype=qkv.dtype, device=qkv.device)
        # Their kernels begin when ours have ended, and the other way round.
        if B:
            self._decode_now.run(q[:B], layer.cache, out=out[:B], enable_pdl=False)
        if T > B:
            self._prefill.run(q[B:], layer.cache, out=out[B:], enable_pdl=False)
        return out.view(T, -1)
