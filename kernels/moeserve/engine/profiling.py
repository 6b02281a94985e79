"""What ran: one prefill and one decode step under torch's profiler.

Receives the engine between two steps; returns operator and kernel names with their counts, as
evidence of which MoE backend executes. Runs a sequence of its own on pages of its own; requests
that are open are not touched.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from moeserve.engine.batch import forward_batch
from moeserve.engine.request import Request, SamplingParams
from moeserve.engine.scheduler import StepPlan
from moeserve.engine.sequence import Sequence
from moeserve.layers.attention import Array
from moeserve.parallel import Place

if TYPE_CHECKING:
    from moeserve.engine.engine import Engine

# Long enough that a plan's prefill range is met, short enough to take no time.
PREFILL_TOKENS = 128


def _length(engine: Engine) -> int:
    limits = engine.limits
    return min(PREFILL_TOKENS, limits.max_num_batched_tokens, limits.max_model_len - 1)


def can_profile(engine: Engine) -> bool:
    """Whether there are pages for it now."""
    pool = engine.pool
    return pool.num_available > _length(engine) // pool.page_size


@torch.inference_mode()
def profile(engine: Engine, place: Place | None = None) -> dict[str, object]:
    """Profile one prefill of 128 tokens (or what the limits allow) and one decode.

    Args:
        engine: Between two steps; the other ranks do the same at the same time.
        place: The engine's.

    Returns:
        `num_moe_layers`, and `ranks`: for each rank `prefill` and `decode`, each a mapping from
        name to count, with `num_tokens`.

    Raises:
        OutOfPages: The KV cache is full of running sequences.
    """
    limits, runner = engine.limits, engine.runner
    place = place or Place()
    length = _length(engine)
    vocab_size = runner.spec.vocab_size
    prompt = tuple(i * 31 % vocab_size for i in range(length))
    seq = Sequence(Request("profile", prompt, SamplingParams()), 0, (), limits.max_model_len)
    seq.pages = engine.pool.allocate(length // engine.pool.page_size + 1)
    seq.row = 0
    table = engine.scheduler.block_table[:1].copy()
    table[0, : len(seq.pages)] = seq.pages
    try:
        prefill = _record(engine, StepPlan([], [(seq, length)]), table)
        seq.tokens.append(0)
        seq.num_computed = length
        decode = _record(engine, StepPlan([seq], []), table)
    finally:
        engine.pool.release(seq.pages)
    rank = {
        "rank": place.rank,
        "prefill": {"num_tokens": length, "counts": prefill},
        "decode": {"num_tokens": 1, "counts": decode},
    }
    return {"num_moe_layers": runner.spec.num_moe_layers, "ranks": [rank]}


def _record(engine: Engine, plan: StepPlan, table: Array) -> dict[str, int]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    runner = engine.runner
    activities = [ProfilerActivity.CPU]
    if runner.options.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dp_size = runner.parallel.dp_size
    counts = (plan.num_tokens,) * dp_size if dp_size > 1 else None
    batch = forward_batch(plan, table, runner.attention, runner.options.device, counts)
    with torch_profile(activities=activities) as recorded:
        hidden = runner.hidden(batch)
        runner.logits(hidden, batch.logits_rows)
    return dict(Counter(event.name for event in recorded.events()))
