"""Several runs of the same questions against each other: table, p-values, flips.

Receives folders of finished runs, returns one `Comparison` per set of equal prompts. Engines,
backends and layouts of one checkpoint are compared this way; rendering is `report/comparison.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evalsuite.errors import ConfigError
from evalsuite.evaluators.base import EvalResult
from evalsuite.flips import Flip, flips_between
from evalsuite.ledger import LedgerRecord
from evalsuite.report.json_report import ledger_name, read, read_questions
from evalsuite.stats.paired import repeats_test
from evalsuite.stats.proportion import wilson_interval
from evalsuite.stats.sequential import holm
from evalsuite.verdict import Verdict


@dataclass(frozen=True)
class Contender:
    """One job of one run.

    Attributes:
        label: Short name that tells it from the others.
        run: Name of the run folder.
        verdict: As the run left it; its status does not matter here.
        result: The verdict's counts.
        records: Its ledger.
    """

    label: str
    run: str
    verdict: Verdict
    result: EvalResult
    records: Sequence[LedgerRecord] = field(repr=False, default=())

    @property
    def num_fewshot(self) -> str:
        """Shots, "-" where the run did not say."""
        return str(self.verdict.detail.get("num_fewshot", "-"))


@dataclass(frozen=True)
class Score:
    """One metric of one contender, with lm-eval's standard error (sample, n - 1)."""

    metric: str
    value: float
    stderr: float
    interval: tuple[float, float]
    is_gating: bool


@dataclass(frozen=True)
class Pair:
    """Two contenders on the same questions.

    Attributes:
        first: Label of A.
        second: Label of B.
        difference: Accuracy of B minus A.
        stderr: Of the difference, paired.
        p_value: Two-sided, exact.
        p_holm: Adjusted over all pairs of the comparison.
        flips: Questions with different outcomes, both replies.
        num_same_text: Questions with equal replies, -1 without ledgers.
        n: Questions both answered.
    """

    first: str
    second: str
    difference: float
    stderr: float
    p_value: float
    p_holm: float
    flips: tuple[Flip, ...]
    num_same_text: int
    n: int


@dataclass(frozen=True)
class Comparison:
    """Contenders that answered the same prompts under the same metric."""

    title: str
    metric: str
    contenders: tuple[Contender, ...]
    pairs: tuple[Pair, ...]


def load(paths: Sequence[Path]) -> list[Contender]:
    """Read every evaluated job of every run folder.

    Raises:
        ConfigError: A folder that is no run, or one without an evaluated job.
    """
    found = []
    for path in paths:
        evaluated = [(v, v.result) for v in read(path) if v.result is not None]
        if not evaluated:
            raise ConfigError(f"{path}: no job of this run was evaluated")
        for verdict, result in evaluated:
            questions = path / "questions" / ledger_name(verdict.job_id)
            records = read_questions(questions) if questions.is_file() else []
            found.append(Contender("", path.name, verdict, result, records))
    return _labelled(found)


def _labelled(contenders: list[Contender]) -> list[Contender]:
    """What tells them apart: the job id, the engine of one job, else run and job id."""
    ids = [one.verdict.job_id for one in contenders]
    served_by = [one.verdict.engine for one in contenders]
    if len(set(ids)) == 1 and all(served_by) and len(set(served_by)) == len(contenders):
        return [replace(one, label=one.verdict.engine) for one in contenders]
    labels = []
    for one in contenders:
        job = one.verdict.job_id
        label = job if ids.count(job) == 1 else f"{one.run}: {job}"
        labels.append(one.run if len(set(ids)) == 1 else label)
    return [
        replace(one, label=label if labels.count(label) == 1 else f"{label} #{number}")
        for number, (one, label) in enumerate(zip(contenders, labels, strict=True), start=1)
    ]


def compare(contenders: Sequence[Contender], metric: str | None = None) -> list[Comparison]:
    """Compare what can be compared: equal task, prompts and metric.

    Args:
        contenders: From `load`.
        metric: Gating metric of the comparison; each run's own where None.

    Raises:
        ConfigError: No two of them asked the same questions; says what differs.
    """
    groups: dict[tuple[str, str, str], list[Contender]] = {}
    for one in contenders:
        used = metric or one.result.metric
        groups.setdefault((one.result.task, one.result.prompt_hash, used), []).append(one)
    found = [
        _compare_group(f"{task}, prompts {prompts}", used, members)
        for (task, prompts, used), members in groups.items()
        if len(members) > 1
    ]
    if not found:
        keys = "; ".join(
            f"{one.label}: {one.result.task}, prompts {one.result.prompt_hash}, metric "
            f"{metric or one.result.metric}"
            for one in contenders
        )
        raise ConfigError(f"no two runs asked the same questions under the same metric: {keys}")
    return found


def _compare_group(title: str, metric: str, members: list[Contender]) -> Comparison:
    pairs = [_pair(a, b, metric) for a, b in itertools.combinations(members, 2)]
    adjusted = holm([pair.p_value for pair in pairs])
    held = tuple(replace(pair, p_holm=p) for pair, p in zip(pairs, adjusted, strict=True))
    return Comparison(title, metric, tuple(members), held)


def _outcomes(one: Contender, metric: str) -> dict[int, tuple[bool | None, ...]]:
    if metric == one.result.metric and one.result.per_question:
        return dict(one.result.per_question)
    latest = {(r.index, r.repeat): r for r in one.records if metric in r.scores}
    found: dict[int, tuple[bool | None, ...]] = {}
    for (index, _), record in sorted(latest.items()):
        found[index] = (*found.get(index, ()), record.scores[metric] == "correct")
    if not found:
        raise ConfigError(f"{one.label}: no outcome per question under metric {metric!r}")
    return found


def _pair(first: Contender, second: Contender, metric: str) -> Pair:
    a, b = _outcomes(first, metric), _outcomes(second, metric)
    there, back = repeats_test(a, b), repeats_test(b, a)
    texts = {r.index: r.text for r in first.records if r.repeat == 0}
    same = sum(
        r.text is not None and texts.get(r.index) == r.text for r in second.records if r.repeat == 0
    )
    return Pair(
        first=first.label,
        second=second.label,
        difference=-there.drop + 0.0,  # no negative zero
        stderr=there.stderr,
        p_value=min(1.0, 2 * min(there.p_value, back.p_value)),
        p_holm=1.0,
        flips=tuple(flips_between(first.records, second.records, metric)),
        num_same_text=same if first.records and second.records else -1,
        n=there.n,
    )


def scores(one: Contender) -> list[Score]:
    """Every metric of a contender, the gating one first."""
    n = one.result.num_questions
    found = []
    for metric, right in sorted(
        one.result.num_correct.items(), key=lambda item: (item[0] != one.result.metric, item[0])
    ):
        value = right / n
        found.append(
            Score(
                metric,
                value,
                math.sqrt(value * (1 - value) / (n - 1)) if n > 1 else 0.0,
                wilson_interval(right, n),
                metric == one.result.metric,
            )
        )
    return found
