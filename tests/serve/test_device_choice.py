"""Which device an engine takes, on machines with and without a GPU."""

from __future__ import annotations

import pytest
import torch

from moeserve.engine.config import EngineConfig
from moeserve.engine.device import choose_device
from moeserve.errors import UsageError


@pytest.mark.parametrize(
    ("device", "moe_backend", "with_gpu", "without"),
    [
        ("auto", "auto", "cuda", "cpu"),
        ("auto", "triton", "cuda", "cpu"),
        ("auto", "torch_grouped_mm", "cuda", "cpu"),  # runs on both
        ("auto", "cpu", "cpu", "cpu"),
        ("auto", "CPU native", "cpu", "cpu"),
        ("cpu", "auto", "cpu", "cpu"),
        # What cannot be is refused by the oracle, which says why.
        ("cuda", "cpu", "cuda", None),
    ],
)
def test_auto_is_the_gpu_but_for_a_backend_of_cpus(
    device: str,
    moe_backend: str,
    with_gpu: str,
    without: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(model="any", device=device, moe_backend=moe_backend)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(config).type == with_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if without is None:
        with pytest.raises(UsageError, match="device 'cuda' was asked for"):
            choose_device(config)
    else:
        assert choose_device(config).type == without
