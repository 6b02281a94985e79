"""Baselines: one approved run's per-question outcomes in a content-addressed file.

Receives a job's result and ledger (or a file), returns `Baseline`; says what makes a run not
comparable with it. Where the files lie and which one is approved is `baseline_store.py`; the
test against it is `gates/paired.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError
from evalsuite.evaluators.base import EvalResult
from evalsuite.ledger import LedgerRecord

SCHEMA = "evalsuite.baseline/1"
# Log-probabilities are kept to this many digits after the point; replay lets 1e-6 pass always.
LOGPROB_DIGITS = 7


@dataclass(frozen=True)
class Identity:
    """What must be equal for two runs to be compared question by question.

    Attributes:
        model_name: From the config.
        model_revision: Revision or hash of the weights, "" where unknown.
        task: Task name.
        evaluator: "builtin" or "lm-eval".
        profile: Prompt profile.
        metric: The metric that gates.
        prompt_hash: Over all prompts.
        num_questions: Questions asked.
        sampling: Every setting that changes a reply.
    """

    model_name: str
    model_revision: str
    task: str
    evaluator: str
    profile: str
    metric: str
    prompt_hash: str
    num_questions: int
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One question of the baseline.

    Attributes:
        outcomes: Right or wrong per repeat, None for a missing answer.
        target: Gold answer.
        text: Reply of the first repeat, None where it is missing.
        text_sha256: Of the reply, "" where it is missing.
        logprobs: Log-probabilities of the reply's tokens, () where not recorded.
        logprobs_again: From a second replay by the same build, () where there was none.
        logprob_noise: Root mean square shift per token between the two, None where unknown.
    """

    outcomes: tuple[bool | None, ...]
    target: str = ""
    text: str | None = None
    text_sha256: str = ""
    logprobs: tuple[float, ...] = ()
    logprob_noise: float | None = None
    logprobs_again: tuple[float, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """An approved run.

    Attributes:
        identity: What a run must share with it.
        engine: Engine and version that made it; may differ from the run's.
        hardware: Accelerator or CPU; a difference is remarked.
        commit: Revision of the code that made it.
        answers: Question index -> its answer.
        logprob_source: "replay" (teacher-forced), "sampled" (as generated), "" for none.
    """

    identity: Identity
    engine: str
    hardware: str
    commit: str
    answers: Mapping[int, Answer] = field(default_factory=dict)
    logprob_source: str = ""

    @property
    def outcomes(self) -> dict[int, tuple[bool | None, ...]]:
        """Question index -> outcomes, the shape of `EvalResult.per_question`."""
        return {index: answer.outcomes for index, answer in self.answers.items()}

    @property
    def repeats(self) -> int:
        """Repeats of the question that has most."""
        return max((len(answer.outcomes) for answer in self.answers.values()), default=0)

    @property
    def accuracy(self) -> float:
        """Mean over questions of the mean over repeats, missing answers left out."""
        means = [
            sum(known) / len(known)
            for answer in self.answers.values()
            if (known := [x for x in answer.outcomes if x is not None])
        ]
        return sum(means) / len(means) if means else 0.0


@dataclass(frozen=True)
class BaselinePair:
    """What a job is compared with; `anchor` is None where it is the current one."""

    current: Baseline
    anchor: Baseline | None = None

    def references(self) -> dict[str, Baseline]:
        """Name -> baseline, the pinned anchor last."""
        named = {"baseline": self.current}
        return named if self.anchor is None else {**named, "anchor": self.anchor}


def text_sha256(text: str) -> str:
    """Hash of a reply; lone surrogates are kept apart from what they would be replaced by."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def identity_of(config: EvalConfig, result: EvalResult, model_revision: str = "") -> Identity:
    """Build the identity of a run from its config and result."""
    return Identity(
        model_name=config.model_name,
        model_revision=model_revision,
        task=result.task,
        evaluator=result.evaluator,
        profile=result.profile,
        metric=result.metric,
        prompt_hash=result.prompt_hash,
        num_questions=result.num_questions,
        sampling={
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "gen_prefix": config.gen_prefix,
            "num_fewshot": config.num_fewshot,
            "use_chat_completions": config.use_chat_completions,
        },
    )


def differences(baseline: Identity, run: Identity) -> list[str]:
    """Say what differs, "key: baseline's value -> run's value"; an unknown revision is no fault."""
    before, after = _flat(baseline), _flat(run)
    found = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, "absent"), after.get(key, "absent")
        if old == new or (key == "model_revision" and "" in (old, new)):
            continue
        found.append(f"{key}: {old!r} -> {new!r}")
    return found


def _flat(identity: Identity) -> dict[str, Any]:
    values = asdict(identity)
    sampling = values.pop("sampling")
    return values | {f"sampling.{key}": value for key, value in sampling.items()}


def make_baseline(
    identity: Identity,
    result: EvalResult,
    records: Sequence[LedgerRecord],
    *,
    engine: str,
    hardware: str,
    commit: str,
) -> Baseline:
    """Build a baseline from a finished run; ConfigError where it ended early or lacks answers."""
    if result.stopped:
        raise ConfigError(
            f"the run ended early ({result.stopped}); a baseline needs every answer: run the job "
            "again with --no-early-end"
        )
    missing = sum(None in outcomes for outcomes in result.per_question.values())
    if not result.per_question or missing:
        raise ConfigError(
            f"a baseline needs every answer of a run: {len(result.per_question)} questions are "
            f"recorded and {missing} of them lack an answer; run the job again"
        )
    first = {record.index: record for record in records if record.repeat == 0}
    answers = {}
    for index, outcomes in sorted(result.per_question.items()):
        record = first.get(index)
        text = record.text if record else None
        logprobs = record.token_logprobs if record else ()
        answers[index] = Answer(
            outcomes=outcomes,
            target=record.target if record else "",
            text=text,
            text_sha256="" if text is None else text_sha256(text),
            logprobs=tuple(round(value, LOGPROB_DIGITS) for value in logprobs),
        )
    source = "sampled" if any(answer.logprobs for answer in answers.values()) else ""
    return Baseline(identity, engine, hardware, commit, answers, source)


def with_logprobs(
    baseline: Baseline,
    logprobs: Mapping[int, Sequence[float]],
    noise: Mapping[int, float],
    again: Mapping[int, Sequence[float]] | None = None,
) -> Baseline:
    """Put teacher-forced log-probabilities, their noise and a second replay into a baseline."""
    answers = {
        index: replace(
            answer,
            logprobs=tuple(round(x, LOGPROB_DIGITS) for x in logprobs.get(index, ())),
            logprob_noise=round(noise[index], 8) if index in noise else None,
            logprobs_again=tuple(round(x, LOGPROB_DIGITS) for x in (again or {}).get(index, ())),
        )
        for index, answer in baseline.answers.items()
    }
    return replace(baseline, answers=answers, logprob_source="replay")


def to_dict(baseline: Baseline) -> dict[str, Any]:
    """Turn a baseline into JSON types."""
    data = asdict(baseline)
    data["schema"] = SCHEMA
    data["answers"] = {str(index): value for index, value in data["answers"].items()}
    for value in data["answers"].values():
        # Absent where there is none: files made before there was this key keep their digest.
        if not value["logprobs_again"]:
            del value["logprobs_again"]
    return data


def digest(baseline: Baseline) -> str:
    """Content address: sha256 of the canonical JSON (sorted keys, no spaces, ASCII)."""
    text = json.dumps(to_dict(baseline), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def render(baseline: Baseline) -> str:
    """Return the file's text: one question a line, so that a diff shows questions."""
    data = to_dict(baseline)
    answers = data.pop("answers")
    head = json.dumps(data, indent=1, sort_keys=True)
    lines = [
        f"  {json.dumps(index)}: {json.dumps(value, sort_keys=True)}"
        for index, value in sorted(answers.items(), key=lambda item: int(item[0]))
    ]
    return head[:-2] + ',\n "answers": {\n' + ",\n".join(lines) + "\n }\n}\n"


def parse(text: str, name: str) -> Baseline:
    """Read a file's text back.

    Raises:
        ConfigError: Not JSON, another schema, or fields that do not fit; names the file.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(f"{name}: schema is {found!r}, this version reads {SCHEMA!r}")
    try:
        answers = {
            int(index): Answer(
                outcomes=tuple(value["outcomes"]),
                target=value["target"],
                text=value["text"],
                text_sha256=value["text_sha256"],
                logprobs=tuple(value["logprobs"]),
                logprob_noise=value["logprob_noise"],
                logprobs_again=tuple(value.get("logprobs_again", ())),
            )
            for index, value in data["answers"].items()
        }
        return Baseline(
            Identity(**data["identity"]),
            data["engine"],
            data["hardware"],
            data["commit"],
            answers,
            data["logprob_source"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: not a baseline: {type(error).__name__}: {error}") from error
