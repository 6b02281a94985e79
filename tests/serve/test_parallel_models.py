"""What ranks hold of a model: cuts of every kind of layer; a GPU's steps over two ranks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_helpers import (
    CONFIG,
    GREEDY,
    assert_same_scores,
    collect,
    serving,
    tokens,
)
from safetensors.torch import save_file

from moeserve.engine.config import EngineConfig
from moeserve.engine.dp import Lane, emptiest, merged_stats
from moeserve.engine.engine import Engine
from moeserve.engine.request import Request, SamplingParams, TokenEvent
from moeserve.errors import Unsupported
from moeserve.models.config import load_model_spec
from moeserve.models.shards import check_divides, first_kv_head, vocabulary_rows
from moeserve.parallel import Parallel
from moeserve.tiny import model_dir

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

DEVICE = EngineConfig(
    model="", max_model_len=128, num_pages=80, page_size=16, max_num_seqs=4, num_threads=1,
    max_num_batched_tokens=64, attention_backend="triton", dtype="float32",
)  # fmt: skip


def save_tiny(folder: Path, **changes: object) -> None:
    """A checkpoint of random weights: dummy weights differ between one rank and several."""
    overrides = TINY | changes
    engine = Engine(replace(
        DEVICE, model="minigsm-tiny", load_format="dummy", hf_overrides=overrides,
        attention_backend="torch", moe_backend="cpu", device="cpu",
    ))  # fmt: skip
    tensors = {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in engine.runner.model.destinations().items():
        # The checkpoint has one norm for all heads.
        is_spread = name.endswith(("q_norm.weight", "k_norm.weight"))
        tensors[name] = (tensor[0] if is_spread else tensor).clone()
        if name.endswith(".bias"):
            tensors[name].normal_(generator=generator)
    save_file(tensors, str(folder / "model.safetensors"))
    keys = json.loads((Path(model_dir()) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | overrides))


@pytest.mark.parametrize(
    ("tp", "dp", "dense_layers"),
    [(2, 1, [0]), pytest.param(1, 2, [0, 1], marks=pytest.mark.slow)],
)
def test_dense_layers_biases_and_an_odd_untied_vocabulary_are_cut_too(
    tmp_path: Path, tp: int, dp: int, dense_layers: list[int]
) -> None:
    """Also a model without any experts, whose DP ranks have nothing to wait for."""
    save_tiny(
        tmp_path,
        num_hidden_layers=2,
        mlp_only_layers=dense_layers,
        attention_bias=True,
        tie_word_embeddings=False,
        vocab_size=131,
    )
    config = replace(DEVICE, model=str(tmp_path), attention_backend="auto", page_size=0)
    prompts = [tuple((5 * i + 3 * j) % 130 + 1 for j in range(20)) for i in range(3)]
    scored = SamplingParams(max_tokens=30, temperature=0.0, num_logprobs=2, ignore_eos=True)

    async def run(config: EngineConfig) -> list[list[TokenEvent]]:
        async with serving(config) as client:
            wanted = [collect(client, Request(str(i), p, scored)) for i, p in enumerate(prompts)]
            return list(await asyncio.wait_for(asyncio.gather(*wanted), 60))

    parallel = replace(
        config, tensor_parallel_size=tp, data_parallel_size=dp, has_expert_parallel=dp > 1
    )
    assert_same_scores(asyncio.run(run(parallel)), asyncio.run(run(config)))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_the_steps_of_a_gpu_agree_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, dp: int
) -> None:
    """Steps ahead of the host and padded decode steps, run by Triton's interpreter over gloo."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    save_tiny(tmp_path)
    prompts = [tuple((7 * i * j + 3 * i + j) % 120 + 1 for j in range(5 + 7 * i)) for i in range(4)]
    params = [
        SamplingParams(max_tokens=5 + i, temperature=0.7 * (i == 2), seed=i, ignore_eos=True)
        for i in range(4)
    ]

    async def texts(config: EngineConfig) -> list[list[int]]:
        async with serving(replace(config, model=str(tmp_path))) as client:
            wanted = [
                collect(client, Request(str(i), prompt, params[i]))
                for i, prompt in enumerate(prompts)
            ]
            found = [tokens(events) for events in await asyncio.gather(*wanted)]
            # One rank alone, the other without a request.
            return [*found, tokens(await collect(client, Request("z", prompts[0], params[3])))]

    parallel = replace(
        DEVICE, tensor_parallel_size=tp, data_parallel_size=dp, has_expert_parallel=dp > 1
    )
    assert asyncio.run(texts(parallel)) == asyncio.run(texts(DEVICE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, "=3 does not divide num_attention_heads=4"),
        (
            {"tensor_parallel_size": 4, "hf_overrides": {"num_key_value_heads": 3}},
            "=4 neither divides num_key_value_heads=3 nor is a multiple",
        ),
        (
            {"tensor_parallel_size": 4, "hf_overrides": {"moe_intermediate_size": 126}},
            "=4 does not divide moe_intermediate_size=126; with --enable-expert-parallel",
        ),
    ],
)
def test_a_size_that_does_not_cut_the_model_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    spec = load_model_spec(CONFIG.model, changes.get("hf_overrides"))
    with pytest.raises(Unsupported, match=message):
        check_divides(spec, changes["tensor_parallel_size"], is_expert_parallel=False)


def test_heads_and_vocabulary_rows_of_each_rank() -> None:
    spec = load_model_spec(CONFIG.model)  # two key and value heads, 1024 rows
    ranks = [Parallel(tp_size=4, tp_rank=rank) for rank in range(4)]
    assert [first_kv_head(spec, rank) for rank in ranks] == [0, 0, 1, 1]
    assert [vocabulary_rows(10, rank) for rank in ranks] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert [vocabulary_rows(5, rank) for rank in ranks] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_requests_go_to_the_emptiest_lane_and_counters_add_up() -> None:
    lanes = [Lane(), Lane(), Lane()]
    chosen = []
    for _ in range(4):
        lane = emptiest(lanes)
        lane.num_open += 1
        chosen.append(lanes.index(lane))
    assert chosen == [0, 1, 2, 0]
    lanes[1].num_open -= 1
    assert lanes.index(emptiest(lanes)) == 1
    lanes[2].new.append(Request("a", (1,), GREEDY))
    assert merged_stats(lanes).num_waiting == 1
