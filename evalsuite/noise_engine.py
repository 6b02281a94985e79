"""The embedded model in moeserve's engine, without HTTP: one side of the noise study.

Receives prompts and what to vary; returns greedy replies, or the log-probabilities of given ones.
Which runs are made of it is `noise_runs.py`; the model in torch alone is `noise_torch.py`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from evalsuite.noise_runs import NUM_LOADS, NUM_SHOTS, Reply, Score

if TYPE_CHECKING:
    from moeserve.engine.config import EngineConfig
    from moeserve.engine.request import TokenEvent

# Eight engines may share one GPU; a quarter of this holds 256 sequences of the model.
CACHE_BYTES = 1 << 31
# Requests open at once, run by run: as a server in fast mode sees them under different loads.
OPEN_REQUESTS = (256, 192, 128, 96, 224, 160)
# Changes that keep the arithmetic's meaning; everything else is the name of a fault.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "clean": {},
    "eager": {"enforce_eager": True},
    "deterministic": {"is_deterministic": True},
    "torch_grouped_mm": {"moe_backend": "torch_grouped_mm"},
    "flashinfer_cutlass": {"moe_backend": "flashinfer_cutlass"},
    "float32": {"dtype": "float32"},
}


@dataclass
class _Open:
    """A request on its way."""

    index: int
    ids: list[int]
    tail: str = ""


class EngineModel:
    """An engine with the embedded model and the test questions behind five shots."""

    def __init__(self, variant: str, num_questions: int, device: str) -> None:
        """Start the engine.

        Args:
            variant: A key of `OTHERS`, or a fault ("noise:0.03").
            num_questions: Prompts made, from the first test question.
            device: "cpu" or "cuda".
        """
        from tokenizers import Tokenizer

        from evalsuite.noise_torch import device_name
        from moeserve.engine.config import EngineConfig
        from moeserve.engine.engine import Engine
        from moeserve.tiny import model_dir
        from moeserve.tiny.corpus import few_shot_prefix, prompt_of
        from moeserve.tiny.minigsm import load_split

        self.questions = load_split("test")[:num_questions]
        self.tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
        prefix = few_shot_prefix(load_split("train")[:NUM_SHOTS])
        texts = [prefix + prompt_of(example) for example in self.questions]
        self.prompts = [tuple(found.ids) for found in self.tokenizer.encode_batch(texts)]
        config = EngineConfig(
            model="minigsm-tiny",
            dtype="bfloat16",
            device=cast("Any", device),
            kv_cache_memory_bytes=CACHE_BYTES,
        )
        self.config = _varied(config, variant)
        self.engine = Engine(self.config)
        self.machine = f"{device_name(device)}, moeserve's engine, {self.config.dtype}"

    def ask(self, order: Sequence[int], number: int) -> dict[int, Reply]:
        """Answer questions greedily, in this order.

        Args:
            order: Question indices.
            number: Of the run: chooses how many requests are open at once, and whether prefixes
                of the run before are still cached.
        """
        from moeserve.engine.request import Request, SamplingParams
        from moeserve.tiny.decode import MAX_NEW_TOKENS, STOP

        if random.Random(number).random() < 0.5:
            self.engine.pool.drop_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
        waiting = list(order)[::-1]
        most = OPEN_REQUESTS[number % NUM_LOADS]
        opened: dict[str, _Open] = {}
        done: dict[int, list[int]] = {}
        while waiting or self.engine.has_work:
            while waiting and len(opened) < most:
                index = waiting.pop()
                opened[str(index)] = _Open(index, [])
                self.engine.add(Request(str(index), self.prompts[index], sampling))
            for event in self.engine.step().all_events():
                one = opened.get(event.request_id)
                if one is None:
                    continue
                if self._takes(one, event, STOP):
                    done[one.index] = one.ids
                    del opened[event.request_id]
        return {index: self._reply(ids) for index, ids in done.items()}

    def _takes(self, one: _Open, event: TokenEvent, stop: str) -> bool:
        """Note an event's tokens; whether the reply has ended."""
        if event.error:
            raise RuntimeError(f"question {one.index}: {event.error}")
        for token in event.token_ids:
            one.ids.append(token)
            one.tail = (one.tail + (self.tokenizer.id_to_token(token) or ""))[-24:]
            if stop in one.tail:
                if event.finish_reason is None:
                    self.engine.abort(event.request_id)
                return True
        return event.finish_reason is not None

    def _reply(self, ids: list[int]) -> Reply:
        from moeserve.tiny.decode import cut

        text, kept, _ = cut(self.tokenizer, ids, [])
        return Reply(kept, text)

    def score(self, replies: Mapping[int, Sequence[int]], number: int) -> dict[int, Score]:
        """Teacher-force replies, in an order and at a concurrency of this run's own."""
        from moeserve.engine.request import Request, SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=0, num_prompt_logprobs=2)
        waiting = random.Random(number).sample(sorted(replies), len(replies))
        most = OPEN_REQUESTS[number % NUM_LOADS] // 8
        found: dict[int, Score] = {}
        num_open = 0
        while waiting or self.engine.has_work:
            while waiting and num_open < most:
                index = waiting.pop()
                text = (*self.prompts[index], *replies[index])
                self.engine.add(Request(str(index), text, sampling))
                num_open += 1
            for event in self.engine.step().events:
                if event.error:
                    raise RuntimeError(f"question {event.request_id}: {event.error}")
                index = int(event.request_id)
                rows = event.prompt_logprobs[len(self.prompts[index]) :]
                known = [row for row in rows if row is not None]
                found[index] = Score(
                    [row.logprob for row in known],
                    [row.top[0][1] - row.top[1][1] for row in known],
                )
                num_open -= 1
        return found


def _varied(config: EngineConfig, variant: str) -> EngineConfig:
    if variant in OTHERS:
        return replace(config, **OTHERS[variant])
    from moeserve.moe.backends.registry import registry
    from moeserve.tiny.faults import NAME, FaultyExperts, parse_fault

    fault = parse_fault(variant)
    is_cuda = config.device == "cuda"
    inner = registry().get("triton" if is_cuda else "cpu")
    # Not by an entry point: the fault lives in this process alone, and no server can name it.
    cast("dict[str, object]", registry().out_of_tree)[NAME] = FaultyExperts(inner, fault)
    return replace(config, moe_backend=NAME, enforce_eager=True)
