"""Sizes of the checkpoints that configs name, so that a job that cannot fit is known before.

Data only; the rule is `capacity.py`. Parameter counts: expert counts follow from the public
`config.json` shapes (layers x experts x 3 x hidden x expert width); totals are those of the
model cards. Bytes per parameter follow from the number format: BF16 2; FP8 1; NVFP4 and MXFP4
half a byte plus one scale byte per 16 or 32 values. Parts that a quantised checkpoint keeps in
BF16 (embedding, head, router) count as "other".
"""

from __future__ import annotations

from dataclasses import dataclass

BF16, FP8, NVFP4, MXFP4 = 2.0, 1.0, 0.5 + 1 / 16, 0.5 + 1 / 32


@dataclass(frozen=True)
class ModelSize:
    """Weights of one checkpoint.

    Attributes:
        num_params: All parameters.
        num_expert_params: Those of routed experts.
        expert_bytes: Bytes per expert parameter.
        other_bytes: Bytes per other parameter.
    """

    num_params: float
    num_expert_params: float
    expert_bytes: float = BF16
    other_bytes: float = BF16

    @property
    def expert_weight_bytes(self) -> float:
        """Bytes of the routed experts."""
        return self.num_expert_params * self.expert_bytes

    @property
    def other_weight_bytes(self) -> float:
        """Bytes of everything else."""
        return (self.num_params - self.num_expert_params) * self.other_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.expert_weight_bytes + self.other_weight_bytes


_QWEN3 = (30.53e9, 48 * 128 * 3 * 2048 * 768)
_MIXTRAL = (46.70e9, 32 * 8 * 3 * 4096 * 14336)
_SCOUT = (108.64e9, 48 * 16 * 3 * 5120 * 8192)
_QWEN35 = (35.1e9, 40 * 256 * 3 * 2048 * 512)

MODEL_SIZES = {
    "Qwen/Qwen3-30B-A3B": ModelSize(*_QWEN3),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": ModelSize(*_QWEN3, FP8),
    "RedHatAI/Qwen3-30B-A3B-FP8-block": ModelSize(*_QWEN3, FP8),
    "RedHatAI/Qwen3-30B-A3B-FP8-dynamic": ModelSize(*_QWEN3, FP8),
    "RedHatAI/Qwen3-30B-A3B-NVFP4": ModelSize(*_QWEN3, NVFP4),
    "nvidia/Qwen3-30B-A3B-NVFP4": ModelSize(*_QWEN3, NVFP4),
    "nm-testing/Qwen3-30B-A3B-MXFP4A16": ModelSize(*_QWEN3, MXFP4),
    "Qwen/Qwen3.5-35B-A3B": ModelSize(*_QWEN35),
    "mistralai/Mixtral-8x7B-v0.1": ModelSize(*_MIXTRAL),
    "amd/Mixtral-8x7B-Instruct-v0.1-FP8-KV": ModelSize(*_MIXTRAL, FP8),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ModelSize(*_SCOUT),
    "nvidia/Llama-4-Scout-17B-16E-Instruct-FP8": ModelSize(*_SCOUT, FP8),
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": ModelSize(*_SCOUT, FP8),
}
