"""`moeserve bench engine` on the CPU: loads, their figures, experts, a profile, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.__main__ import main as moeserve
from moeserve.bench.engine import main
from moeserve.bench.engine_load import LOADS, make_prompts, read_load, run_load
from moeserve.bench.engine_profile import Batch, experts_touched, fits, own_times, profile_step
from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.errors import UsageError

MODEL = "moeserve/minigsm-tiny"
CPU = ["--device", "cpu", "--num-threads", "1", "--max-model-len", "256"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        EngineConfig(
            "minigsm-tiny",
            load_format="dummy",
            hf_overrides={"num_hidden_layers": 2},
            max_model_len=256,
            max_num_seqs=8,
            num_pages=200,
            num_threads=1,
            device="cpu",
        )
    )


def test_every_request_is_answered_and_the_numbers_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.json"
    argv = [MODEL, *CPU, "--loads", "6x5x12@2,3x40x4", "--json", str(file)]
    assert moeserve(["bench", "engine", *argv]) == 0
    found = json.loads(file.read_text())
    narrow, wide = found["loads"]
    assert (narrow["num_requests"], narrow["input_tokens"], narrow["output_tokens"]) == (6, 30, 72)
    assert (wide["num_requests"], wide["input_tokens"], wide["output_tokens"]) == (3, 120, 12)
    # Two at a time: three rounds of twelve tokens at least.
    assert narrow["num_steps"] >= 36 > wide["num_steps"] >= 4
    for one in found["loads"]:
        assert one["output_tok_s"] == pytest.approx(one["output_tokens"] / one["seconds"])
        tokens = one["input_tokens"] + one["output_tokens"]
        assert one["total_tok_s"] == pytest.approx(tokens / one["seconds"])
        assert 0 < one["tpot_ms"] * 1e-3 < one["seconds"]
        assert 0 < one["ttft_ms"] * 1e-3 < one["seconds"]
        assert one["num_preemptions"] == 0
    assert found["device"] == "cpu"
    assert found["profiles"] == []
    out = capsys.readouterr().out
    assert "6x5x12@2" in out
    assert "experts touched" in out


def test_experts_touched_lie_between_top_k_and_all(engine: Engine) -> None:
    layer = engine.runner.model.moe_layers()[0]
    kernel = layer.kernel
    one = experts_touched(engine, Batch(1, 5, num_warm=3))
    assert one.least == one.most == one.mean == layer.spec.routing.top_k
    many = experts_touched(engine, Batch(8, 5, num_warm=3))
    assert one.most < many.least <= many.mean <= many.most <= layer.spec.num_experts
    assert layer.kernel is kernel
    assert not engine.has_work


def test_a_profile_names_what_ran_and_leaves_the_engine_as_it_was(engine: Engine) -> None:
    steps = engine.steps
    found = profile_step(engine, Batch(4, 20, 16, num_warm=6))
    assert engine.steps is steps
    assert not engine.has_work
    assert 0 <= found.wait_ms <= found.step_ms
    assert found.kernels_ms == pytest.approx(sum(k.us for k in found.kernels) / 1e3)
    assert found.kernels[0].us == max(k.us for k in found.kernels) > 0
    # In each of two layers query, key and value, output and gate; then the output head.
    products = [kernel.calls for kernel in found.kernels if kernel.name == "aten::mm"]
    assert products[0] >= 7
    figures = run_load(engine, read_load("2x3x4"), make_prompts(read_load("2x3x4"), 1000))
    assert figures.output_tokens == 8


def test_batches_beyond_the_engine_are_left_out(engine: Engine) -> None:
    assert fits(engine, Batch(8, 20, num_warm=4))
    assert not fits(engine, Batch(9, 20, num_warm=4))
    assert not fits(engine, Batch(1, 250, num_warm=4))


def test_prompts_are_the_same_in_every_run_and_share_their_shots() -> None:
    load = LOADS["gsm256"].of(20)
    prompts = make_prompts(load, 151_936)
    assert prompts == make_prompts(load, 151_936)
    assert len({prompt[:650] for prompt in prompts}) == 1
    assert all(710 <= len(prompt) <= 750 for prompt in prompts)
    assert len({prompt[650:] for prompt in prompts}) == 20
    assert min(map(min, prompts)) >= 1000
    small = make_prompts(LOADS["in1000"].of(3), 300)
    assert [len(prompt) for prompt in small] == [1000] * 3
    assert max(map(max, small)) < 300


def test_kernels_that_overlap_are_not_counted_twice() -> None:
    # The second begins while the first runs and waits for it; the third inside the second.
    spans = [("c", 15.0, 18.0), ("a", 0.0, 10.0), ("b", 8.0, 20.0), ("d", 25.0, 27.0)]
    assert own_times(spans) == [0.0, 10.0, 10.0, 2.0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loads", "b1"], "MODEL comes first"),
        ([MODEL, "--loads", "b2"], "--loads b2: want b128"),
        ([MODEL, "--loads", "0x2x2"], "at least 1"),
        ([MODEL, "--loads", ","], "at least one"),
        ([MODEL, "--loads", "gsmall-cached"], "right after"),
        ([MODEL, "--loads"], "expected one argument"),
        ([MODEL, "--json", "/no/such/folder/a"], "--json /no/such/folder/a: no folder"),
        ([MODEL, "--no-such-flag"], "no-such-flag"),
        ([MODEL, "-tp", "2"], "2 ranks"),
        ([MODEL, *CPU, "--loads", "1x250x20"], "270 tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        main(argv)
