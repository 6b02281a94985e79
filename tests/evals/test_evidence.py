"""Evidence: one spelling a backend, levels, mismatches, ignored switches."""

from __future__ import annotations

import pytest

from evalsuite.config import ExpectBackend
from evalsuite.evidence import BackendEvidence, canonical_backend, contradiction


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("TRITON", "triton"), ("FlashInfer TRTLLM", "flashinfer_trtllm"),
        ("flashinfer-cutlass", "flashinfer_cutlass"), ("ROCm AITER", "aiter"),
        ("BATCHED_TRITON", "batched_triton"),
        ("FlashInfer CUTLASS Unquantized MoE backend", "flashinfer_cutlass"),
        ("auto", ""), ("", ""), ("none", ""), ("torch_grouped_mm", "torch_grouped_mm"),
    ],
)  # fmt: skip
def test_canonical(spelling: str, name: str) -> None:
    assert canonical_backend(spelling) == name


@pytest.mark.parametrize(
    ("evidence", "level", "word"),
    [
        (BackendEvidence("triton", "TRITON"), "logged", ""),
        (BackendEvidence("triton", "TRITON", "triton"), "executed", ""),
        (
            BackendEvidence("triton", "FlashInfer CUTLASS"),
            "logged",
            "logged is 'Flash",
        ),
        (BackendEvidence("triton", "triton", "cpu"), "logged", "executed is 'cpu'"),
        (BackendEvidence("flashinfer_cutlass"), "declared", "declared is"),
        (BackendEvidence("triton"), "logged", "level 'logged'"),
        (BackendEvidence("triton", "triton"), "executed", "level 'executed'"),
        (BackendEvidence("triton", "triton", ignored_switches=("VLLM_X",)), "logged", "VLLM_X"),
        (BackendEvidence(), "declared", "level 'declared'"),
    ],
)
def test_expectation(evidence: BackendEvidence, level: str, word: str) -> None:
    expected = ExpectBackend(name="triton", level=level)  # type: ignore[arg-type]
    problem = contradiction(evidence, expected)
    assert (word in problem) if word else problem == ""
    if problem:
        for name in ("declared", "logged", "executed"):
            assert name in problem


def test_declared_backend_must_be_the_observed_one() -> None:
    assert "triton" in contradiction(BackendEvidence("triton", "FlashInfer CUTLASS"), None)
    assert contradiction(BackendEvidence("auto", "FlashInfer CUTLASS"), None) == ""
    assert contradiction(BackendEvidence("fi-cutlass", "FlashInfer CUTLASS"), None) == ""
    assert contradiction(BackendEvidence("triton", ""), None) == ""
