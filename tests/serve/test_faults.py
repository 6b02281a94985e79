"""Faults with a dose: each changes exactly what it says, and a dose of zero changes no bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moe_helpers import logits, make_spec, random_weights, relative_error, tokens

from moeserve.moe.backends.base import Routed
from moeserve.moe.backends.cpu import CpuExperts
from moeserve.moe.backends.registry import registry
from moeserve.moe.dispatch import MoEKernel, Workspace
from moeserve.moe.reference import reference_experts, reference_routing
from moeserve.moe.routing import route
from moeserve.moe.spec import MoESpec, MoEWeights, Plan, RoutingSpec
from moeserve.parallel import Parallel
from moeserve.tiny import faults, model_dir
from moeserve.tiny.checkpoint import load_model
from moeserve.tiny.decode import greedy_replies, reply_logprobs, run_prefix
from moeserve.tiny.faults import Fault, FaultyExperts, parse_fault, without_rows, wrong_experts
from moeserve.tiny.layered import with_backend
from moeserve.tiny.measure import FAULTS, rights
from moeserve.tiny.minigsm import load_split

FOLDER = Path(__file__).parent / "faulty_backend"
SPEC = make_spec(routing=RoutingSpec(3))
T = 40
CLOSE = 2e-6  # float32 against float64


def run(fault: Fault, spec: MoESpec = SPEC, num_tokens: int = T, layer: int = 0) -> torch.Tensor:
    """One layer with a fault, through dispatch; `layer` others are prepared before it."""
    backend = FaultyExperts(CpuExperts(), fault)
    raw = [random_weights(spec, seed) for seed in range(layer + 1)]
    weights = [backend.prepare(one) for one in raw][-1]
    plan = Plan(((spec.max_num_tokens, backend.name),), backend.layout, "test")
    kernel = MoEKernel(
        spec, plan, {backend.name: backend}, torch.device("cpu"), Parallel(), Workspace()
    )
    return kernel(tokens(spec, num_tokens), logits(spec, num_tokens), None, weights)


def truth(
    weights: MoEWeights | None = None,
    ids: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference in float64, with what a fault changes put in by hand."""
    weights = weights or random_weights(SPEC, 0)
    clean_factors, clean_ids = reference_routing(logits(SPEC, T), SPEC.routing)
    return reference_experts(
        SPEC,
        tokens(SPEC, T),
        clean_factors if factors is None else factors,
        clean_ids if ids is None else ids,
        weights.w13,
        weights.w2,
    )


@pytest.mark.parametrize("num_tokens", [1, 3, T])
@pytest.mark.parametrize("kind", sorted(faults.KINDS))
def test_dose_zero_is_bit_equal_to_clean(kind: str, num_tokens: int) -> None:
    topk = route(logits(SPEC, num_tokens), SPEC.routing)
    clean = CpuExperts().apply(
        SPEC, tokens(SPEC, num_tokens), Routed(topk.ids, topk.weights), random_weights(SPEC, 0)
    )
    assert torch.equal(run(Fault(kind, 0), num_tokens=num_tokens), clean)


@pytest.mark.parametrize("kind", sorted(faults.KINDS))
def test_a_fault_of_another_layer_changes_no_bit(kind: str) -> None:
    dose = 2 if kind in faults.WHOLE_DOSES else 0.5
    clean = run(Fault(kind, 0), layer=1)
    assert torch.equal(run(Fault(kind, dose, layer=0), layer=1), clean)
    assert not torch.equal(run(Fault(kind, dose, layer=1), layer=1), clean)


def test_weights_given_to_prepare_stay_as_they_are() -> None:
    for kind in ("noise", "experts-zeroed", "experts-swapped", "halves-swapped", "layer-scale"):
        weights = random_weights(SPEC, 0)
        FaultyExperts(CpuExperts(), Fault(kind, 2)).prepare(weights)
        assert torch.equal(weights.w13, random_weights(SPEC, 0).w13)
        assert torch.equal(weights.w2, random_weights(SPEC, 0).w2)


def test_zeroed_experts_answer_zero_and_no_other_changes() -> None:
    weights = random_weights(SPEC, 0)
    wrong = wrong_experts(0, SPEC.num_experts, 2)
    weights.w2[wrong] = 0
    assert relative_error(run(Fault("experts-zeroed", 2)), truth(weights)) < CLOSE


def test_swapped_experts_hold_each_others_weights() -> None:
    weights = random_weights(SPEC, 0)
    first, second = wrong_experts(0, SPEC.num_experts, 2)
    order = list(range(SPEC.num_experts))
    order[first], order[second] = second, first
    swapped = MoEWeights(weights.w13[order], weights.w2[order])
    assert relative_error(run(Fault("experts-swapped", 2)), truth(swapped)) < CLOSE


def test_halves_swapped_is_up_through_the_activation() -> None:
    gate, up = random_weights(SPEC, 0).w13.chunk(2, dim=1)
    swapped = MoEWeights(torch.cat((up, gate), dim=1), random_weights(SPEC, 0).w2)
    assert relative_error(run(Fault("halves-swapped", 8)), truth(swapped)) < CLOSE


def test_no_renormalisation_keeps_the_size_among_all_experts() -> None:
    routing = replace(SPEC.routing, is_renormalized=False)
    factors, _ = reference_routing(logits(SPEC, T), routing)
    assert relative_error(run(Fault("no-renormalisation", 1)), truth(factors=factors)) < CLOSE


def test_dropped_slots_are_the_least_and_add_nothing() -> None:
    factors, ids = reference_routing(logits(SPEC, T), SPEC.routing)
    assert bool((factors[:, 0] >= factors[:, 1]).all())
    ids[:, 2:] = -1
    assert relative_error(run(Fault("slots-dropped", 1)), truth(ids=ids)) < CLOSE
    assert not run(Fault("slots-dropped", 3)).any()


def test_random_routing_hits_its_share_with_distinct_experts() -> None:
    backend = FaultyExperts(CpuExperts(), Fault("random-routing", 0.25))
    ids = torch.full((20_000, 3), -1, dtype=torch.int32)
    changed = backend._random_ids(ids, 8)
    is_hit = (changed >= 0).all(1)
    assert float(is_hit.float().mean()) == pytest.approx(0.25, abs=0.015)
    assert bool((changed[~is_hit] == -1).all())
    rows = changed[is_hit].sort(dim=1).values
    assert bool((rows[:, 1:] > rows[:, :-1]).all())
    shares = torch.bincount(rows.flatten().long(), minlength=8) / rows.numel()
    assert float((shares - 1 / 8).abs().max()) < 0.01


def test_a_lost_row_is_the_last_of_each_full_tile() -> None:
    # Expert 0 has tokens 0 to 4 in slot 0; expert 1 tokens 0 and 2, expert 2 the others.
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2], [0, 2]], dtype=torch.int32)
    expected = torch.tensor([[0, 1], [-1, 2], [0, -1], [-1, -1], [0, 2]], dtype=torch.int32)
    assert torch.equal(without_rows(ids, 2), expected)
    assert torch.equal(without_rows(ids, 6), ids)
    _, chosen = reference_routing(logits(SPEC, T), SPEC.routing)
    lost = without_rows(chosen.to(torch.int32), 4)
    assert relative_error(run(Fault("row-lost", 4)), truth(ids=lost)) < CLOSE


@pytest.mark.parametrize("dose", [0.001, 0.03, 0.1])
def test_noise_has_the_size_of_its_dose(dose: float) -> None:
    weights = random_weights(make_spec(width=64, hidden_size=64), 0)
    noisy = FaultyExperts(CpuExperts(), Fault("noise", dose)).prepare(weights)
    for before, after in ((weights.w13, noisy.w13), (weights.w2, noisy.w2)):
        assert relative_error(after, before) == pytest.approx(dose, rel=0.05)


def test_scales_multiply_the_output_of_one_expert_or_of_all() -> None:
    clean = run(Fault("noise", 0))
    assert relative_error(run(Fault("layer-scale", 0.5)), 1.5 * clean) < CLOSE
    weights = random_weights(SPEC, 0)
    weights.w2[wrong_experts(0, SPEC.num_experts, 1)] *= 1.5
    assert relative_error(run(Fault("expert-scale", 0.5)), truth(weights)) < CLOSE


def test_narrow_sums_lose_precision_by_the_block() -> None:
    spec = make_spec(hidden_size=64, width=64)
    clean = run(Fault("noise", 0), spec)
    errors = [relative_error(run(Fault("narrow-sums", k), spec), clean) for k in (64, 16, 2)]
    # One rounding to bf16 is 2**-9 at most; more of them cost more, and none costs a digit.
    assert 5e-4 < errors[0] < 6e-3
    assert errors[0] < errors[1] < errors[2] < 5e-2


def test_doses_nest() -> None:
    for layer in range(4):
        assert wrong_experts(layer, 32, 8)[:2] == wrong_experts(layer, 32, 2)
    assert wrong_experts(0, 32, 8) != wrong_experts(1, 32, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nois:0.1", "did you mean 'noise'"),
        ("noise", "KIND:DOSE"),
        ("noise:much", "KIND:DOSE"),
        ("noise:nan", "dose nan"),
        ("noise:-1", "dose -1"),
        ("experts-swapped:3", "in pairs"),
        ("experts-zeroed:1.5", "no whole number"),
        ("random-routing:2", "more than 1"),
    ],
)
def test_a_fault_without_meaning_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fault(text)


def test_every_measured_fault_reads_back_as_itself() -> None:
    assert [str(parse_fault(name)) for name in FAULTS] == list(FAULTS)
    assert parse_fault("experts-zeroed:1@2") == Fault("experts-zeroed", 1, 2)
    with pytest.raises(ValueError, match="33 experts cannot be wrong of 32"):
        wrong_experts(0, 32, 33)


def test_no_installation_can_name_the_faulty_backend() -> None:
    assert faults.NAME not in registry().names


def test_served_layers_answer_as_the_trainers_do() -> None:
    shots, asked = load_split("train")[:5], load_split("test")[:8]
    model, tokenizer = load_model(model_dir())
    plain = greedy_replies(model, tokenizer, shots, asked)
    served = greedy_replies(with_backend(model, CpuExperts()), tokenizer, shots, asked, 3)
    assert served.texts == plain.texts
    assert torch.equal(served.expert_counts, plain.expert_counts)
    # Teacher-forced, each token of a greedy reply is at least as probable as its margin says.
    prefix = run_prefix(model, tokenizer, shots)
    scores = reply_logprobs(model, tokenizer, prefix, asked, served.token_ids)
    for row, margins in zip(scores, served.margins, strict=True):
        assert len(row) == len(margins)
        for score, margin in zip(row, margins, strict=True):
            assert -0.694 < score <= 0 or margin < 0.7


@pytest.mark.parametrize("name", ["random-routing:1", "halves-swapped:32", "experts-zeroed:8"])
def test_a_gross_fault_is_far_below_the_floor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in FAULTS
    # No right reply is longer; garbage would go on to the limit.
    monkeypatch.setattr("moeserve.tiny.decode.MAX_NEW_TOKENS", 130)
    shots, asked = load_split("train")[:5], load_split("test")[:24]
    model, tokenizer = load_model(model_dir())
    with_backend(model, FaultyExperts(CpuExperts(), parse_fault(name)))
    right = sum(rights(greedy_replies(model, tokenizer, shots, asked), asked))
    assert right <= len(asked) // 2  # the floor is above nine in ten


def test_a_server_with_a_fault_needs_the_path_the_variable_and_the_name() -> None:
    def ask(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moeserve", "backends", "--json", *words, str(model_dir())]
        environ = {**os.environ, **variables}
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, check=False
        )

    path = {"PYTHONPATH": str(FOLDER)}
    unset = ask("--moe-backend", "faulty", **path)
    assert unset.returncode != 0
    assert "KeyError" in unset.stdout + unset.stderr
    found = ask("--moe-backend", "faulty", **path, MOESERVE_TEST_FAULT="noise:0.1")
    assert found.returncode == 0, found.stderr
    assert "faulty" in json.dumps(json.loads(found.stdout))
    plain = ask(**path, MOESERVE_TEST_FAULT="noise:0.1")
    assert plain.returncode == 0
