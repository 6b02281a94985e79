"""The embedded model in torch and large batches, without a server: one side of the noise study.

Receives what to vary; returns greedy replies, or the log-probabilities of given ones. On a GPU the
products outside the experts are cuBLAS's, which takes another kernel for another size of batch: the
noise that most engines have. On a CPU other batches change no bit in bfloat16, so that the output
of every MoE layer can be dithered: rounded up or down at random, as sums in another order would be.
The model in moeserve's own engine is `noise_engine.py`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from evalsuite.noise_runs import NUM_LOADS, NUM_SHOTS, Reply, RunPlan, Score
from moeserve.moe.backends.registry import registry
from moeserve.tiny import model_dir
from moeserve.tiny.checkpoint import load_model
from moeserve.tiny.decode import greedy_replies, reply_logprobs, run_prefix
from moeserve.tiny.faults import FaultyExperts, parse_fault
from moeserve.tiny.layered import with_backend
from moeserve.tiny.measure import machine
from moeserve.tiny.minigsm import load_split

# Questions decoded at a time, run by run: a server's batch under different loads. The largest is
# what two gigabytes of scores allow during a prefill.
BATCH_SIZES = (330, 256, 192, 128, 224, 160)
REPLAY_SIZES = (16, 24, 12, 20, 14, 18)


class TorchModel:
    """The model with the server's router, dispatch and a backend in place of its experts."""

    def __init__(self, variant: str, plan: RunPlan) -> None:
        """Load it.

        Args:
            variant: "clean" or a fault ("noise:0.03").
            plan: Questions, device, dtype and dither.
        """
        self.questions = load_split("test")[: plan.num_questions]
        self.shots = load_split("train")[:NUM_SHOTS]
        self.model, self.tokenizer = load_model(model_dir(), getattr(torch, plan.dtype))
        self.model.to(plan.device)
        is_cuda = plan.device == "cuda"
        experts = registry().get("triton" if is_cuda else "cpu")
        is_fault = variant != "clean"
        with_backend(
            self.model, FaultyExperts(experts, parse_fault(variant)) if is_fault else experts
        )
        self.dither = plan.dither
        self.generator = torch.Generator(plan.device)
        self.machine = f"{device_name(plan.device)}, {plan.dtype}"
        if plan.dither:
            for name, module in self.model.named_modules():
                if name.endswith(".moe"):
                    module.register_forward_hook(self._dithered)

    def _dithered(self, _: object, __: object, out: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(out.shape, generator=self.generator, device=out.device)
        return (out.float() * (1 + self.dither * (2 * drawn - 1))).to(out.dtype)

    def ask(self, order: Sequence[int], number: int) -> dict[int, Reply]:
        """Answer questions greedily, in this order; the number seeds the dither."""
        self.generator.manual_seed(number)
        asked = [self.questions[index] for index in order]
        size = BATCH_SIZES[number % NUM_LOADS]
        found = greedy_replies(self.model, self.tokenizer, self.shots, asked, size)
        rows = zip(order, found.token_ids, found.texts, found.margins, strict=True)
        return {index: Reply(ids, text, margins) for index, ids, text, margins in rows}

    def score(self, replies: Mapping[int, Sequence[int]], number: int) -> dict[int, Score]:
        """Teacher-force replies, in an order and in batches of this run's own."""
        self.generator.manual_seed(10_000 + number)
        prefix = run_prefix(self.model, self.tokenizer, self.shots)
        order = random.Random(number).sample(sorted(replies), len(replies))
        scores = reply_logprobs(
            self.model,
            self.tokenizer,
            prefix,
            [self.questions[index] for index in order],
            [replies[index] for index in order],
            REPLAY_SIZES[number % NUM_LOADS],
        )
        return {index: Score(row) for index, row in zip(order, scores, strict=True)}


def device_name(device: str) -> str:
    """What it runs on."""
    if device == "cpu":
        return machine()
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
