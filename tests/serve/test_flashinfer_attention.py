"""Attention through FlashInfer's wrappers: its contract by a stand-in here, its values on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from attention_helpers import attention_truth
from small_engine import CONFIG, engine_of, prompts, request, run, tokens

from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.errors import Unsupported
from moeserve.layers import attention_flashinfer
from moeserve.layers.attention import AttentionShape
from moeserve.layers.attention_flashinfer import FlashInferPagedAttention, obstacle
from moeserve.moe.backends.optional import library_reason

SHAPE = AttentionShape(32, 4, 128, torch.bfloat16)


class Wrapper:
    """FlashInfer's plan and run, as its documentation says, in torch and float64."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "HND"
        self.options = options
        self.is_graph = options.get("use_cuda_graph", False)
        self.num_plans = 0
        self.made.append(self)

    def _take(
        self, rows: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor,
        last: torch.Tensor, shape: tuple[Any, ...],
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert (last >= 1).all()
        assert (last <= shape[3]).all()
        self.num_plans += 1
        self.shape, self.rows = shape, rows
        if self.is_graph:
            # A captured graph reads the buffers that the wrapper was made with.
            assert len(last) == len(self.options["paged_kv_last_page_len_buffer"])
            self.options["paged_kv_indptr_buffer"].copy_(indptr)
            self.options["paged_kv_last_page_len_buffer"].copy_(last)
            self.options["paged_kv_indices_buffer"][: len(indices)].copy_(indices)
            self.lists = tuple(
                self.options[f"paged_kv_{name}_buffer"]
                for name in ("indptr", "indices", "last_page_len")
            )
        else:
            self.lists = (indptr, indices, last)

    def run(
        self, q: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor, enable_pdl: bool
    ) -> None:
        assert not enable_pdl
        NQ, NKV, D, page = self.shape
        assert q.shape[1:] == out.shape[1:] == (NQ, D)
        indptr, indices, last = self.lists
        for i in range(len(last)):
            pages = cache[indices[indptr[i] : indptr[i + 1]].long()]
            tokens = pages.permute(1, 0, 3, 2, 4).reshape(2, -1, NKV, D)
            length = (len(pages) - 1) * page + int(last[i])
            count = int(self.rows[i + 1] - self.rows[i])
            for j in range(count):
                at = int(self.rows[i]) + j
                position = length - count + j
                out[at] = attention_truth(
                    q[at], tokens[0].double(), tokens[1].double(), position
                ).to(out.dtype)


class Decode(Wrapper):
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *shape: int,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        self._take(torch.arange(len(last) + 1), indptr, indices, last, shape)


class Prefill(Wrapper):
    def plan(
        self, rows: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor,
        last: torch.Tensor, *shape: int, causal: bool, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal
        self._take(rows, indptr, indices, last, shape)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = Decode
    library.BatchPrefillWithPagedKVCacheWrapper = Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(attention_flashinfer, "obstacle", lambda *_, **__: "")
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(attention_flashinfer, "INT_WORKSPACE_BYTES", 1024)
    Wrapper.made.clear()
    # The interpreter takes milliseconds a program.
    monkeypatch.setattr("moeserve.triton_kernels.attention_decode.NUM_PROGRAMS", 4)


LENGTHS = [3, 18, 1, 33, 5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for CPUs")
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.usefixtures("stand_in")
def test_prompts_and_decode_rows_go_through_its_plans(is_eager: bool) -> None:
    asked = [request(str(i), p, 3 + i % 2) for i, p in enumerate(prompts(LENGTHS))]
    expected = {n: tokens(e) for n, e in run(engine_of("torch"), asked).items()}
    engine = engine_of("flashinfer", enforce_eager=is_eager, max_num_batched_tokens=24)
    assert engine.runner.attention.name == "flashinfer"
    assert {n: tokens(e) for n, e in run(engine, asked).items()} == expected
    graphs = [w for w in Wrapper.made if w.is_graph]
    # Every size of the ladder has one, planned before its capture; those that ran, again.
    assert len(graphs) == (0 if is_eager else 8)
    assert all(w.num_plans for w in graphs)
    assert is_eager or max(w.num_plans for w in graphs) > 1
    # Tensor cores pay from four query heads a key head on; this model has two.
    assert not any(w.options.get("use_tensor_cores") for w in Wrapper.made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for CPUs")
@pytest.mark.usefixtures("stand_in")
def test_a_common_prefix_is_read_once_by_our_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.layers.attention_triton.MIN_SHARED_READS", 32)
    batch = [request(str(i), p, 3) for i, p in enumerate(prompts([3, 2, 1, 4], shared=32))]
    expected = {n: tokens(e) for n, e in run(engine_of("torch"), batch).items()}
    engine = engine_of("flashinfer", enforce_eager=True)
    shared: list[bool] = []
    attention: Any = engine.runner.attention
    prepare = attention.prepare

    def watched(*args: Any, has_shared: bool, in_graph: bool) -> None:
        shared.append(has_shared)
        prepare(*args, has_shared=has_shared, in_graph=in_graph)

    monkeypatch.setattr(attention, "prepare", watched)
    assert {n: tokens(e) for n, e in run(engine, batch).items()} == expected
    assert True in shared
    assert False in shared


def test_what_it_cannot_serve_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flashinfer, "library_reason", lambda *_, **__: "")
    assert obstacle(SHAPE, is_deterministic=False) == ""
    assert "deterministic mode" in obstacle(SHAPE, is_deterministic=True)
    shape = AttentionShape(4, 2, 16, torch.bfloat16)
    assert obstacle(shape, is_deterministic=False) == (
        "no kernels for head_dim=16, only 64, 128, 256"
    )
    shape = AttentionShape(4, 2, 64, torch.float32)
    assert obstacle(shape, is_deterministic=False) == "no kernels for float32"
    monkeypatch.setattr(attention_flashinfer, "library_reason", lambda *_, **__: "not installed")
    assert obstacle(SHAPE, is_deterministic=False) == "not installed"


def test_asked_for_by_name_it_serves_or_says_why_not() -> None:
    if not library_reason("flashinfer", "flashinfer-python"):
        pytest.skip("FlashInfer is installed")
    with pytest.raises(Unsupported, match=r"'flashinfer': flashinfer-python is not installed"):
        engine_of("flashinfer")
    reason = engine_of("triton", attention_backend="auto", device="auto").runner.attention.reason
    assert "flashinfer: flashinfer-python is not installed" in reason or "CPU" in reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("is_eager", [False, True])
def test_values_equal_our_own_kernels(is_eager: bool) -> None:
    if why := obstacle(SHAPE, is_deterministic=False):
        pytest.skip(why)
    changes: dict[str, Any] = {
        "dtype": "bfloat16",
        "enforce_eager": is_eager,
        "page_size": 64,
        "max_model_len": 512,
        "hf_overrides": {
            "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 128, "eos_token_id": 0,
        },
    }  # fmt: skip
    scores: dict[str, list[float]] = {}
    for name in ("triton", "flashinfer"):
        # The same seed on the same device: the same weights.
        engine = Engine(EngineConfig(**{**CONFIG, "attention_backend": name, **changes}))
        assert isinstance(engine.runner.attention, FlashInferPagedAttention) == (
            name == "flashinfer"
        )
        asked = [
            request(str(i), p, 1, num_prompt_logprobs=0, num_logprobs=0)
            for i, p in enumerate(prompts([200, 64, 65, 7, 300]))
        ]
        events = run(engine, asked)
        scores[name] = [
            entry.logprob
            for key in sorted(events)
            for event in events[key]
            for entry in (*event.prompt_logprobs, *event.logprobs)
            if entry is not None
        ]
        # Replayed steps too: the same tokens' scores after a few decode steps of all.
        asked = [
            request(f"d{i}", p, 6, num_logprobs=0)
            for i, p in enumerate(prompts([200, 64, 65, 7, 300]))
        ]
        events = run(engine, asked)
        scores[name] += [e.logprobs[0].logprob for key in sorted(events) for e in events[key]]
    ours, theirs = (torch.tensor(scores[name]) for name in ("triton", "flashinfer"))
    assert len(ours) == len(theirs) > 600
    assert float((ours - theirs).norm() / ours.norm()) < 2e-2
