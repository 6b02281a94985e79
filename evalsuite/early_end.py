"""Ending an evaluation when its outcome is settled, so that a dead build costs seconds.

Receives progress of a running evaluation (`Progress`), answers `should_abort`; `judge.py` knows
such a run by the text's prefix and takes its verdict from here.
"""

from __future__ import annotations

from dataclasses import replace

from evalsuite.evaluators.base import MAX_FAILED_SHARE, EvalResult, Progress
from evalsuite.gates.absolute import Floor, statistical_gate
from evalsuite.gates.base import Counts
from evalsuite.stats.proportion import min_correct
from evalsuite.stats.sequential import Sprt, outcome_decided
from evalsuite.verdict import Status, Verdict

DECIDED = "decided: "
# `equal` fails on one changed reply, whatever the accuracy: the counts do not settle it.
GATES = frozenset({"threshold", "statistical", "paired"})
# A build this far below its floor is broken, not noisy; a build at the floor is stopped by
# mistake at most once in a thousand runs, and never more than a tenth of the gate's own rate.
BROKEN_BELOW_FLOOR = 0.08
MAX_ALPHA = 0.001
SHARE_OF_ALPHA = 0.1


def fewest_right(gate: str, floor: Floor, n: int) -> int:
    """Fewest right answers of `n` that the gate does not fail.

    Args:
        gate: A name of `GATES`. For "paired" it is the floor alone: above it the pairs decide.
        floor: The config's side of the comparison.
        n: Questions.
    """
    if gate != "statistical":
        return min_correct(floor.threshold, floor.tolerance, n)
    low, high = 0, n + 1
    while low < high:
        middle = (low + high) // 2
        if middle <= n and statistical_gate(Counts(middle, 0, n), floor).status is Status.FAIL:
            low = middle + 1
        else:
            high = middle
    return low


def error_rate(floor: Floor) -> float:
    """Rate at which the sequential test ends a build at its floor, and misses a broken one."""
    return min(MAX_ALPHA, SHARE_OF_ALPHA * floor.alpha)


def ended_verdict(verdict: Verdict, result: EvalResult, floor: Floor) -> Verdict:
    """FAIL without an accuracy: what was asked is no fair sample once a look has ended it.

    Its rates are the sequential test's, and so is the drop: below the floor.
    """
    rate = error_rate(floor)
    asked = f"{result.num_answered} of {result.num_questions} questions"
    return replace(
        verdict,
        status=Status.FAIL,
        reason=f"ended early after {asked}: {result.stopped.removeprefix(DECIDED)}",
        warnings=(
            f"ended early after {asked}: no accuracy is given, and the run cannot become a "
            "baseline; --no-early-end asks all of them",
        ),
        alpha=rate,
        power=1.0 - rate,
        detectable_drop=BROKEN_BELOW_FLOOR,
        detail={
            "ended_early": True,
            "num_asked": result.num_answered,
            "accuracy_bounds": list(result.accuracy_bounds),
        },
    )


class EarlyEnd:
    """Watches the first repeat of one evaluation. It ends failures only, never a PASS.

    Two reasons end it: the answers left cannot keep the gate from failing, or the sequential test
    calls the build broken. The second looks at questions in the (random) order in which they were
    asked, up to the first that is still open: what ends first may be easier than the rest.
    """

    def __init__(self, gate: str, floor: Floor) -> None:
        """Watch for the gate of a config."""
        self._gate = gate
        self._floor = floor
        self._needed = -1
        self._sprt: Sprt | None = None
        self._reason = ""

    def on_progress(self, progress: Progress) -> None:
        """Take note of the counts; failed requests are neither right nor wrong."""
        total = progress.total
        if self._reason or progress.failed > MAX_FAILED_SHARE * total:
            # So many failures are an ERROR, whatever the answers say.
            return
        if self._needed < 0:
            self._prepare(total)
        answered = progress.done - progress.failed
        if outcome_decided(progress.correct, answered, total, self._needed) == "fail":
            self._reason = (
                f"{DECIDED}{answered - progress.correct} of {answered} answers are wrong, "
                f"{self._needed} right of {total} can no longer be reached"
            )
            return
        right, wrong = progress.settled_right, progress.settled_wrong
        if self._sprt and self._sprt.decide(right, wrong) == "broken":
            self._reason = (
                f"{DECIDED}{right} right and {wrong} wrong are those of a broken build "
                f"(sequential test, accuracy {self._sprt.p_broken:.2f} or less against "
                f"{self._sprt.p_healthy:.2f}, error rates {self._sprt.alpha:.2g})"
            )

    def _prepare(self, total: int) -> None:
        self._needed = fewest_right(self._gate, self._floor, total)
        healthy = self._needed / total if total else 0.0
        broken = healthy - BROKEN_BELOW_FLOOR
        if 0.0 < broken < healthy < 1.0:
            alpha = error_rate(self._floor)
            self._sprt = Sprt(healthy, broken, alpha, alpha)

    def should_abort(self) -> str:
        """Why to end now, "" to go on."""
        return self._reason
