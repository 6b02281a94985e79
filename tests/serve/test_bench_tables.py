"""`moeserve bench router` and `bench moe` without a GPU: their words, and the error they print."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_helpers import make_spec, random_weights, tokens

from moeserve.bench import moe, router
from moeserve.bench.moe import floor_us, relative_error
from moeserve.bench.router import SIZES, sizes_of
from moeserve.errors import UsageError
from moeserve.moe.backends.base import Routed
from moeserve.moe.reference import reference_experts
from moeserve.moe.tuning import LayerShape


def test_router_sizes_are_the_product_of_what_was_given() -> None:
    assert sizes_of(None, None, None) == list(SIZES)
    assert sizes_of([1, 64], [60, 72], [4]) == [(1, 60, 4), (1, 72, 4), (64, 60, 4), (64, 72, 4)]
    # --top-k alone is honoured too.
    assert sizes_of(None, None, [2, 4]) == [(128, 128, 2), (128, 128, 4)]


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (router.main, ["--top-k", "200"], "tokens 128, experts 128, top-k 200: want"),
        (router.main, ["--tokens", "0"], "tokens 0, experts 128, top-k 8: want T >= 1"),
        (router.main, ["--nan-share", "1.5"], r"--nan-share \[1.5\]: shares are 0 to 1"),
        (router.main, ["--json", "/no/such/folder/a"], "--json /no/such/folder/a: no folder"),
        (moe.main, ["--tokens", "0"], "--tokens 0: at least 1"),
        (moe.main, ["--moe-backend", "tritn"], "Did you mean 'triton'"),
        (moe.main, ["--json", "/no/such/folder/a"], "--json /no/such/folder/a: no folder"),
        (moe.main, ["--out", "x"], "--out does nothing without --tune"),
        (moe.main, ["--tune", "--moe-backend", "triton"], "--moe-backend does nothing with --tune"),
        (moe.main, ["--tune", "--routing", "skewed"], "--routing does nothing with --tune"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(
    main: Callable[[list[str]], int], words: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        main(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_reason_is_said() -> None:
    for main, name in ((router.main, "router"), (moe.main, "moe")):
        with pytest.raises(UsageError, match=f"bench {name}: this needs a CUDA GPU"):
            main([])


def test_the_printed_error_counts_every_token() -> None:
    spec = make_spec(5, 32, 16)
    weights, x = random_weights(spec), tokens(spec, 300)
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(300)]).int()
    ids[7, 1] = -1
    routed = Routed(ids, torch.rand(300, 2, generator=generator))
    out = reference_experts(spec, x, routed.topk_weights, ids, weights.w13, weights.w2).float()
    assert relative_error(out, x, routed, weights) < 1e-6
    for row in (0, 128, 299):
        wrong = out.clone()
        wrong[row] = 0
        expected = float(out[row].norm() / out.norm())
        assert relative_error(wrong, x, routed, weights) == pytest.approx(expected, rel=1e-3)


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    rates = {"read_tb_s": 4.0, "matmul_tflop_s": 800.0}
    shape = LayerShape(128, 2048, 768, 8)
    # Eight experts of 9.4 MB and two rows; 16,384 tokens of eight products of three matrices.
    assert floor_us(shape, 1, 8, rates) == pytest.approx(75_505_664 / 4e6, rel=1e-6)
    operations = 6 * 16384 * 8 * 2048 * 768
    assert floor_us(shape, 16384, 128, rates) == pytest.approx(operations / 800e6, rel=1e-6)
