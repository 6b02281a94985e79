"""Which gate sees which fault at which dose: `python -m evalsuite.dose_response --work DIR`.

Receives the folder that `moeserve.tiny.measure` fills; asks this project's gates and two public
rules about each variant against the clean one, and replaces the text between two marks of a
Markdown page. Error rates on simulated runs are `simulate.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evalsuite.baseline import Answer, text_sha256
from evalsuite.files import write_text
from evalsuite.gates.absolute import Floor, statistical_gate, threshold_gate
from evalsuite.gates.base import Counts
from evalsuite.gates.equal import equal_gate
from evalsuite.gates.paired import PairedPlan, paired_gate
from evalsuite.ledger import LedgerRecord
from evalsuite.replay import ReplayLimits, ReplayOutcome, compare_logprobs, noise_between
from evalsuite.report.markdown import table
from evalsuite.stats.paired import Discordance, discordance
from evalsuite.stats.rules import TrtllmRule, vllm_passes
from evalsuite.verdict import Status

if TYPE_CHECKING:
    from moeserve.tiny.measure import Measured

BEGIN = "<!-- dose and response: begin (made by a command, do not edit) -->"
END = "<!-- dose and response: end -->"
COMMAND = "python -m evalsuite.dose_response --work build/embedded --out docs/verdicts.md"
TOLERANCE = 0.02
PLANS = {
    "paired 5 %": PairedPlan(alpha=0.05, power=0.8),
    "paired 0.1 %": PairedPlan(alpha=0.001, power=0.95),
}
# Gates that look at right and wrong answers alone.
ACCURACY_GATES = ("threshold", "statistical", *PLANS, "vLLM -8 points", "TensorRT-LLM")
OTHER_KERNELS = "replay, other kernels"
GATES = (*ACCURACY_GATES, "equal", "replay", OTHER_KERNELS)
WORDS = {Status.FAIL: "**seen**", Status.PASS: "·", Status.INCONCLUSIVE: "unsure"}


@dataclass(frozen=True)
class Response:
    """What the gates say of one variant.

    Attributes:
        name: of the variant.
        flips: against the clean answers.
        outcomes: status by gate, in the order of `GATES`.
        replayed: the replay against measured noise, for its numbers.
    """

    name: str
    flips: Discordance
    outcomes: Mapping[str, Status]
    replayed: ReplayOutcome

    def is_seen_by(self, gates: Sequence[str]) -> bool:
        """Whether one of these gates fails the variant."""
        return any(self.outcomes[gate] is Status.FAIL for gate in gates)


def respond(clean: Measured, found: Measured, noise: Mapping[int, float]) -> Response:
    """Ask every gate about one variant.

    Args:
        clean: the model without a fault, on at least the questions of `found`.
        found: the variant.
        noise: question -> spread between two replays of the clean model.
    """
    n = len(found.right)
    before, after = clean.right[:n], found.right
    reference, accuracy = sum(before) / n, sum(after) / n
    counts, floor = Counts(sum(after), 0, n), Floor(reference, TOLERANCE)
    run = {index: (right,) for index, right in enumerate(after)}
    baseline = {"baseline": {index: (right,) for index, right in enumerate(before)}}
    logprobs = dict(enumerate(found.logprobs))
    base = {index: clean.logprobs[index] for index in logprobs}
    replayed = compare_logprobs(base, logprobs, ReplayLimits(), noise)
    lenient = ReplayLimits(has_other_kernels=True)
    outcomes = {
        "threshold": threshold_gate(counts, floor).status,
        "statistical": statistical_gate(counts, floor).status,
        **{name: paired_gate(run, baseline, floor, plan).status for name, plan in PLANS.items()},
        "vLLM -8 points": _status(vllm_passes(accuracy, reference)),
        "TensorRT-LLM": _status(TrtllmRule(n).passes(accuracy, reference)),
        "equal": _equal(clean.texts[:n], found.texts),
        "replay": replayed.status,
        OTHER_KERNELS: compare_logprobs(base, logprobs, lenient, noise).status,
    }
    return Response(found.name, discordance(before, after), outcomes, replayed)


def _status(passes: bool) -> Status:
    return Status.PASS if passes else Status.FAIL


def _equal(before: Sequence[str], after: Sequence[str]) -> Status:
    answers = {
        index: Answer((None,), text=text, text_sha256=text_sha256(text))
        for index, text in enumerate(before)
    }
    records = [
        LedgerRecord(index, 0, "answered", text, target="") for index, text in enumerate(after)
    ]
    return equal_gate(records, answers).status


def responses(folder: Path) -> tuple[list[Response], str]:
    """Return the responses to every measured variant, the clean one first, and the machine.

    Raises:
        FileNotFoundError: the clean model was not measured twice.
    """
    from moeserve.tiny.measure import AGAIN, BFLOAT16, CLEAN, FAULTS, load

    clean, again = load(folder, CLEAN), load(folder, AGAIN)
    if clean is None or again is None:
        raise FileNotFoundError(
            f"{folder}: measure first, with python -m moeserve.tiny.measure --work {folder}"
        )
    noise = noise_between(dict(enumerate(clean.logprobs)), dict(enumerate(again.logprobs)))
    found = [load(folder, name) for name in (AGAIN, *FAULTS, BFLOAT16)]
    return [respond(clean, one, noise) for one in found if one is not None], clean.machine


def render(folder: Path) -> str:
    """Return the text between the marks."""
    found, machine = responses(folder)
    rows = [
        [
            one.name,
            str(one.flips.n),
            f"{100 * one.flips.drop:+.2f}",
            *(WORDS.get(one.outcomes[gate], str(one.outcomes[gate])) for gate in GATES),
            f"{round(one.replayed.mean_shift, 5) + 0.0:+.5f}",
            f"{one.replayed.spread:.5f}",
            str(one.replayed.num_beyond),
        ]
        for one in found
    ]
    header = [
        "fault",
        "questions",
        "drop (points)",
        *GATES,
        "mean loss (nats)",
        "spread (nats)",
        "answers beyond",
    ]
    replayed = found[0].replayed
    return "\n\n".join(
        [
            f"Made by `{COMMAND}` from answers measured on {machine}. Tolerance {TOLERANCE:g}; the "
            "threshold is the clean accuracy on the same questions, and both public rules have it "
            f"as their reference. Replay: {replayed.num_questions} clean replies, "
            f"{replayed.num_tokens} tokens, teacher-forced, against the clean model's own noise in "
            f"other batches; a shift of {ReplayLimits().min_spread:g} nats always passes.",
            table(header, rows),
            summary(found[1:]),
        ]
    )


def summary(faults: Sequence[Response]) -> str:
    """Count what each gate sees, and what replay sees of the rest."""
    unseen = [one for one in faults if not one.is_seen_by(ACCURACY_GATES)]
    counts = [f"{gate} {sum(one.is_seen_by([gate]) for one in faults)}" for gate in GATES]
    left = [one.name for one in unseen if not one.is_seen_by(["replay"])]
    names = ", ".join(f"`{name}`" for name in left) or "none"
    lenient = [f"`{one.name}`" for one in unseen if one.is_seen_by([OTHER_KERNELS])]
    return (
        f"Doses seen, of {len(faults)}: {', '.join(counts)}.\n\n"
        f"No accuracy gate sees {len(unseen)} of them. Of these, replay sees "
        f"{len(unseen) - len(left)}; unseen by it too: {names}. Where other kernels are allowed "
        f"for, it sees {len(lenient)}: {', '.join(lenient) or 'none'}."
    )


def main(argv: list[str] | None = None) -> int:
    """Write the section, or print it."""
    parser = argparse.ArgumentParser(prog="python -m evalsuite.dose_response", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the measured answers")
    parser.add_argument("--out", type=Path, help="page with the two marks; else standard output")
    args = parser.parse_args(argv)
    try:
        section = render(args.work)
    except FileNotFoundError as error:
        parser.error(str(error))
    if args.out is None:
        print(section)
        return 0
    before, begin, rest = args.out.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        parser.error(f"{args.out} lacks the marks {BEGIN!r} and {END!r}")
    write_text(args.out, f"{before}{BEGIN}\n\n{section}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
