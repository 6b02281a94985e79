"""Ending an evaluation when its outcome is settled, so that a dead build costs seconds.

Receives progress of a running evaluation (`Progress`), answers `should_abort`; the verdict on
such a run is made in `judge.py`, which knows the text by its prefix.
"""

from __future__ import annotations

from evalsuite.evaluators.base import Progress
from evalsuite.stats.sequential import Sprt, outcome_decided

DECIDED = "decided: "
# A build this far below its floor is broken, not noisy; with error rates of 0.1 % a build at
# the floor is stopped by mistake once in a thousand runs.
BROKEN_BELOW_FLOOR = 0.08


class EarlyEnd:
    """Watches one evaluation of the `threshold` gate, first repeat only.

    Two reasons end it: the answers left cannot lift it over the floor, or the sequential test
    calls it broken. The second needs questions in random order (`order_seed`), because a file's
    first questions may be easier than the rest.
    """

    def __init__(self, needed: int, total: int, *, is_shuffled: bool) -> None:
        """Watch for fewer than `needed` right of `total`."""
        self.needed = needed
        self.total = total
        floor = needed / total if total else 0.0
        broken = floor - BROKEN_BELOW_FLOOR
        self.sprt = Sprt(floor, broken) if is_shuffled and 0.0 < broken < floor < 1.0 else None
        self._reason = ""

    def on_progress(self, progress: Progress) -> None:
        """Take note of the counts; failed requests are neither right nor wrong."""
        answered = min(progress.done, self.total) - progress.failed
        wrong = answered - progress.correct
        if self._reason or progress.done > self.total:
            return
        if outcome_decided(progress.correct, answered, self.total, self.needed) == "fail":
            self._reason = (
                f"{DECIDED}{wrong} of {answered} answers are wrong, {self.needed} right of "
                f"{self.total} can no longer be reached"
            )
        elif self.sprt and self.sprt.decide(progress.correct, wrong) == "broken":
            self._reason = (
                f"{DECIDED}{progress.correct} right and {wrong} wrong are those of a broken build "
                f"(sequential test, accuracy {self.sprt.p_broken:.2f} or less against "
                f"{self.sprt.p_healthy:.2f}, error rates {self.sprt.alpha:.1%})"
            )

    def should_abort(self) -> str:
        """Why to end now, "" to go on."""
        return self._reason
