"""Two public gates, for comparison on the same draws.

Receives accuracies as fractions, returns whether the rule passes. Neither uses the pairing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evalsuite.stats.proportion import normal_quantile

# vLLM tests/evals/gsm8k: accuracy >= threshold - 0.08 unless the file says otherwise.
VLLM_TOLERANCE = 0.08
# TensorRT-LLM accuracy suite, GSM8K: sigma 50 of 100, alpha 0.05, beta 0.2.
TRTLLM_SIGMA = 0.5


@dataclass(frozen=True)
class TrtllmRule:
    """TensorRT-LLM's hypothesis test: reference and run as independent samples.

    Attributes:
        n: Questions.
        sigma: Standard deviation of one question's score, 0.5 is the worst case.
        alpha: One-sided false-alarm rate under independence.
        beta: Miss rate at `theta`.
    """

    n: int
    sigma: float = TRTLLM_SIGMA
    alpha: float = 0.05
    beta: float = 0.2

    @property
    def scale(self) -> float:
        """Standard deviation of the difference of two independent samples."""
        return math.sqrt(2 * self.sigma**2 / self.n)

    @property
    def offset(self) -> float:
        """Threshold minus reference (negative)."""
        return normal_quantile(self.alpha) * self.scale

    @property
    def theta(self) -> float:
        """Minimum detectable effect by the rule's own formula."""
        return -(normal_quantile(self.alpha) + normal_quantile(self.beta)) * self.scale

    def passes(self, accuracy: float, reference: float) -> bool:
        """Whether an accuracy reaches reference + offset."""
        return accuracy >= reference + self.offset


def vllm_passes(accuracy: float, reference: float, tolerance: float = VLLM_TOLERANCE) -> bool:
    """VLLM's rule: accuracy >= reference - tolerance."""
    return accuracy >= reference - tolerance
