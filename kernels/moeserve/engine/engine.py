"""The step loop's body: schedule, launch, finish.

Receives `Request`s, returns `StepOutput`s. `Engine.step` is the only place that schedules, runs
the model and finishes sequences. On a GPU a step is launched before the tokens of the one before
it are read, so that the host's work is hidden behind the device's; a sequence that turns out to
have ended then runs in one step too many, whose token is dropped. `process.py` runs the engine in
its own process; tests call it directly.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moeserve.engine.client import EngineInfo, EngineStats
from moeserve.engine.config import EngineConfig
from moeserve.engine.describe import describe
from moeserve.engine.events import StepOutput, end_event, token_event
from moeserve.engine.host_steps import Step
from moeserve.engine.kv_cache import PagePool
from moeserve.engine.request import FinishReason, Logprob, Request, TokenEvent
from moeserve.engine.scheduler import Scheduler, StepPlan
from moeserve.engine.sequence import Sequence
from moeserve.engine.startup import start
from moeserve.parallel import Place
from moeserve.runner.model_runner import LOGITS_ROWS
from moeserve.runner.sampler import Sampled, score_tokens

if TYPE_CHECKING:
    from moeserve.engine.batch import SharedStep
    from moeserve.engine.team import Team
    from moeserve.runner.compile_process import CompileProcess

logger = logging.getLogger(__name__)
NOT_FINITE = "the model produced no finite logits for this request"


@dataclass(frozen=True)
class Flight:
    """A launched step whose tokens have not been read.

    Attributes:
        step: Where they will come from.
        places: Index of each row's token in its sequence; empty where none was reserved.
        scored: Sequences that wanted their prompt scored and nothing else.
    """

    step: Step
    places: list[int]
    scored: list[Sequence]


class Engine:
    """One rank's scheduler, runner and sequences.

    Attributes:
        team: The other ranks; None where there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        place: Place | None = None,
        compiling: CompileProcess | None = None,
    ) -> None:
        place = place or Place()
        started = start(config, place, compiling)
        self.place = place
        self.team: Team | None = None
        self.config = started.config
        self.runner = started.runner
        self.steps = started.steps
        self.limits = started.limits
        self.pool = PagePool(
            self.runner.num_pages, self.runner.attention.page_size, config.has_prefix_caching
        )
        self.scheduler = Scheduler(self.limits, self.pool)
        self._sequences: dict[str, Sequence] = {}
        self._pending: list[TokenEvent] = []
        self._plan = StepPlan([], [])
        self._flight: Flight | None = None
        self._arrivals = 0
        self._num_steps = 0
        self._threads = started.threads

    @property
    def has_work(self) -> bool:
        """Whether a step would do or say anything."""
        return bool(self._sequences or self._pending)

    def info(self, load_s: float = 0.0) -> EngineInfo:
        """What the front needs to know."""
        return describe(self.runner, self.limits, load_s, self.place)

    def stats(self) -> EngineStats:
        """Counters after the last step."""
        scheduler = self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            cache_usage=self.pool.num_used / (self.pool.num_pages - 1),
            num_preemptions=scheduler.num_preemptions,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            padding_rows=self.runner.padding_rows() + self.steps.num_padding_rows,
            nan_rows=self.steps.num_nan_rows(),
            num_steps=self._num_steps,
        )

    def add(self, request: Request) -> None:
        """Queue a request; one that cannot run ends with an ERROR event in the next step."""
        problem = self._problem(request)
        if problem:
            self._pending.append(
                TokenEvent(request.id, finish_reason=FinishReason.ERROR, error=problem)
            )
            return
        seq = Sequence(
            request, self._arrivals, self.runner.spec.eos_token_ids, self.limits.max_model_len
        )
        self._arrivals += 1
        self._sequences[request.id] = seq
        if len(seq.tokens) == seq.max_total and not seq.needs_prompt_logprobs:
            # Nothing to generate and nothing to score.
            self._pending.append(end_event(seq, FinishReason.LENGTH))
            del self._sequences[request.id]
        else:
            self.scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """End a request early; unknown ids have ended already."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq)
            self._pending.append(TokenEvent(request_id, finish_reason=FinishReason.ABORT))

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Schedule and launch a step, then finish the one before it, or both where it must."""
        out = StepOutput(events=self._pending)
        self._pending = []
        plan = self._plan = self.scheduler.schedule()
        shared = self.team.agree(plan) if self.team is not None else None
        flight = self._launch(plan, shared) if plan else None
        if shared is not None and not plan:
            self.steps.idle(shared)
        if self._flight is not None:
            self._land(self._flight, out)
        self._flight = flight
        if flight is not None and not flight.step.may_wait:
            self._land(flight, out)
            self._flight = None
        self._plan = StepPlan([], [])
        return out

    def fail_step(self, error: str) -> StepOutput:
        """End every sequence of the step that raised; its pages hold nothing to rely on."""
        out = StepOutput(events=self._pending)
        self._pending = []
        self.pool.drop_cache()
        flying = self._flight.step.rows if self._flight is not None else []
        self._flight = None
        broken = [*self._plan.decodes, *(s for s, _ in self._plan.prefills), *flying]
        for seq in dict.fromkeys(broken):
            if self._sequences.get(seq.request.id) is seq:
                self._discard(seq, error, out)
        self._plan = StepPlan([], [])
        return out

    def end_all(self, error: str) -> StepOutput:
        """End every open request with an ERROR event."""
        out = StepOutput(events=self._pending)
        self._pending = []
        for seq in list(self._sequences.values()):
            self._finish(seq)
            out.events.append(
                TokenEvent(seq.request.id, finish_reason=FinishReason.ERROR, error=error)
            )
        return out

    def _problem(self, request: Request) -> str:
        vocab_size, limit = self.runner.spec.vocab_size, self.limits.max_model_len
        prompt = request.prompt_ids
        if not prompt:
            return "the prompt is empty"
        if len(prompt) > limit:
            return f"the prompt has {len(prompt)} tokens; max_model_len is {limit}"
        ids = (*request.sampling.stop_token_ids, *request.sampling.logit_bias, *prompt)
        if max(ids) >= vocab_size or min(ids) < 0:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            return f"token id {wrong} is outside the vocabulary of {vocab_size}"
        if request.id in self._sequences:
            return f"request id {request.id!r} is in use"
        return ""

    def _launch(self, plan: StepPlan, shared: SharedStep | None) -> Flight:
        """Begin a step and reserve the places of its tokens, where they may come later."""
        self._threads.use_for(plan.num_tokens)
        table = self.scheduler.block_table
        if shared is None:
            step = self.steps.launch(plan, table)
        else:
            step = self.steps.launch(plan, table, shared)
        self._num_steps += 1
        scored = []
        if plan.prefills and step.hidden is not None:
            scored = self._score_prompts(plan, step.hidden)
        self.scheduler.advance(plan)
        places = []
        if step.may_wait:
            for seq in step.rows:
                places.append(len(seq.tokens))
                seq.tokens.append(-1 - seq.row)
                seq.num_pending += 1
        return Flight(step, places, scored)

    def _land(self, flight: Flight, out: StepOutput) -> None:
        """Wait for a step's tokens and give them to their sequences."""
        step = flight.step
        sampled = step.sampled() if self.team is None else self.team.sampled(step)
        rows = flight.step.rows
        if sampled is not None:
            places = flight.places or [len(seq.tokens) for seq in rows]
            self._append(rows, places, sampled, out)
        for seq in flight.scored:
            if self._sequences.get(seq.request.id) is seq:
                self._finish(seq)
                out.events.append(end_event(seq, FinishReason.LENGTH))

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> list[Sequence]:
        """Log-probabilities of prompt tokens; returns sequences that wanted nothing else."""
        done = []
        row = len(plan.decodes)
        for seq, count in plan.prefills:
            if seq.needs_prompt_logprobs:
                self._score_chunk(seq, hidden[row : row + count])
                if seq.num_computed + count == len(seq.tokens) == seq.max_total:
                    done.append(seq)
            row += count
        return done

    def _score_chunk(self, seq: Sequence, hidden: torch.Tensor) -> None:
        num_top = seq.request.sampling.num_prompt_logprobs or 0
        # Row i of the chunk predicts token num_computed + i + 1; some may be scored already.
        first = len(seq.prompt_logprobs) - seq.num_computed - 1
        last = min(hidden.shape[0], seq.num_prompt - seq.num_computed - 1)
        for row in range(max(first, 0), last, LOGITS_ROWS):
            stop = min(row + LOGITS_ROWS, last)
            targets = seq.tokens[seq.num_computed + row + 1 : seq.num_computed + stop + 1]
            scores = score_tokens(self.runner.model.logits(hidden[row:stop]), targets, num_top)
            seq.prompt_logprobs.extend(
                scores.as_logprob(i, num_top, Logprob) for i in range(len(targets))
            )

    def _append(
        self, rows: list[Sequence], places: list[int], sampled: Sampled, out: StepOutput
    ) -> None:
        ids, tokens = out.ids, out.tokens
        for index, seq in enumerate(rows):
            # Aborted, or ended by the step before: this one was launched too early to know.
            if self._sequences.get(seq.request.id) is not seq:
                continue
            token, place = sampled.tokens[index], places[index]
            if sampled.bad_rows and index in sampled.bad_rows:
                self.pool.drop_cache()
                self._discard(seq, NOT_FINITE, out)
                continue
            is_stop = token in seq.stop_ids
            if place == len(seq.tokens):
                seq.tokens.append(token)
            else:
                seq.tokens[place] = token
                seq.num_pending -= 1
            is_last = is_stop or place + 1 >= seq.max_total
            if seq.counts is not None:
                seq.counts[token] += 1
            if seq.is_started and not is_last and index not in sampled.scored_rows:
                ids.append(seq.request.id)
                tokens.append(token)
                continue
            out.events.append(token_event(seq, sampled, index, is_stop=is_stop, is_last=is_last))
            seq.is_started = True
            if is_last:
                self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        del self._sequences[seq.request.id]

    def _discard(self, seq: Sequence, error: str, out: StepOutput) -> None:
        """End a sequence whose pages may hold NaN, and silence them before they are reused."""
        pages = seq.pages
        self._finish(seq)
        self.runner.clear_pages(self.pool.unreferenced(pages))
        out.events.append(TokenEvent(seq.request.id, finish_reason=FinishReason.ERROR, error=error))
