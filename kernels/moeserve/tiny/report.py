"""The measured part of `docs/embedded-model.md`: `python -m moeserve.tiny.report --work DIR`.

Receives a folder, measures there what is missing (`measure`), and replaces the text between two
marks of a Markdown page: accuracy by family, shares of the experts, margins, float32 against
bf16, accuracy under each fault. Which gate sees a fault is `evalsuite.dose_response`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeserve.tiny.faults import KINDS, parse_fault
from moeserve.tiny.measure import (
    AGAIN,
    BFLOAT16,
    CLEAN,
    FAULTS,
    GRADED,
    GROSS,
    PRECISION,
    Measured,
    Plan,
    add_options,
    load,
    measure,
    plan_of,
)

BEGIN = "<!-- measured: begin (made by a command, do not edit) -->"
END = "<!-- measured: end -->"
COMMAND = "python -m moeserve.tiny.report --work build/embedded --out docs/embedded-model.md"
FAMILIES_A_ROW = 4
# Asked by the files of `configs/`, so that a run takes half a minute.
NUM_FIRST = 330


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def interval(right: int, n: int) -> str:
    """Return the accuracy in per cent and its 95 % Wilson interval."""
    z, p = 1.959964, right / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{100 * p:.2f} ({100 * (centre - half):.1f}–{100 * (centre + half):.1f})"


def families(summary: dict[str, Any]) -> str:
    """Return accuracy by family, several families a row, the weakest first."""
    by_accuracy = sorted(summary["family_accuracy"].items(), key=lambda item: (item[1], item[0]))
    cells = [(f"`{name}`", f"{100 * value:.0f}") for name, value in by_accuracy]
    cells += [("", "")] * (-len(cells) % FAMILIES_A_ROW)
    rows = [
        [text for cell in cells[at : at + FAMILIES_A_ROW] for text in cell]
        for at in range(0, len(cells), FAMILIES_A_ROW)
    ]
    return table(["family", "%"] * FAMILIES_A_ROW, rows)


def shares(summary: dict[str, Any]) -> str:
    """Return the least and the most used expert of each layer, in fair shares (1/E)."""
    pairs = zip(
        summary["min_expert_share_of_fair"], summary["max_expert_share_of_fair"], strict=True
    )
    rows = [[layer, f"{low:.2f}", f"{high:.2f}"] for layer, (low, high) in enumerate(pairs)]
    return table(["layer", "least used expert", "most used expert"], rows)


def margins(summary: dict[str, Any]) -> str:
    """Return the histogram of margins between the two best tokens at digits."""
    edges = summary["margin_edges"]
    names = [f"below {edges[0]:g}"]
    names += [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    names.append(f"{edges[-1]:g} and more")
    columns = zip(
        names, summary["margins_computed_digits"], summary["margins_final_digits"], strict=True
    )
    return table(["margin (logits)", "digits of results", "digits after ####"], list(columns))


def precision_text(clean: Measured, narrow: Measured) -> str:
    """Say how float32 and bf16 differ on the same questions."""
    pairs = list(zip(clean.right, narrow.right, strict=False))
    changed = sum(map(str.__ne__, clean.texts, narrow.texts))
    return (
        f"The whole model in bf16 answers {sum(narrow.right)} of {len(narrow.right)} right "
        f"({100 * narrow.accuracy:.2f} %), in float32 {sum(clean.right[: len(pairs)])}. "
        f"From right to wrong: {pairs.count((True, False))}; from wrong to right: "
        f"{pairs.count((False, True))}; replies that differ somewhere: {changed}."
    )


def fault_rows(clean: Measured, folder: Path, names: Sequence[str]) -> list[list[str]]:
    """Return a row for each measured fault, against the clean model on the same questions."""
    rows = []
    for name in names:
        found = load(folder, name)
        if found is None:
            continue
        n = len(found.right)
        before = sum(clean.right[:n])
        pairs = list(zip(clean.right, found.right, strict=False))
        rows.append(
            [
                f"`{name}`",
                interval(sum(found.right), n),
                f"{100 * (sum(found.right) - before) / n:+.2f}",
                f"{pairs.count((True, False))} / {pairs.count((False, True))}",
                str(sum(map(str.__ne__, clean.texts, found.texts))),
            ]
        )
    return rows


def kinds_list() -> str:
    """Return what each kind of fault does."""
    used = dict.fromkeys(parse_fault(name).kind for name in FAULTS)
    return "\n".join(f"- `{kind}`: {KINDS[kind]}." for kind in used)


def fault_tables(clean: Measured, folder: Path) -> str:
    """Return the three tables of faults."""
    header = ["fault", "accuracy, % (95 %)", "points", "lost / gained", "replies changed"]
    groups = (("Gross", GROSS), ("Graded", GRADED), ("Precision", PRECISION))
    parts = []
    for title, names in groups:
        rows = fault_rows(clean, folder, names)
        parts += [f"**{title}**", table(header, rows)]
    return "\n\n".join(parts)


def render(folder: Path) -> str:
    """Return the measured text of a complete folder.

    Raises:
        FileNotFoundError: a variant that is needed was not measured.
    """
    clean, narrow = load(folder, CLEAN), load(folder, BFLOAT16)
    again = load(folder, AGAIN)
    if clean is None or narrow is None or again is None:
        raise FileNotFoundError(f"{folder}: not measured completely; run {COMMAND}")
    summary: dict[str, Any] = clean.summary
    found = [one for name in FAULTS if (one := load(folder, name)) is not None]
    n = len(found[0].right) if found else 0
    total_s = sum(one.seconds for one in (clean, narrow, again, *found))
    same = sum(map(str.__eq__, clean.texts, again.texts))
    parts = [
        f"Made by `{COMMAND}` on {clean.machine}; {total_s / 60:.0f} minutes in all, shared with "
        "other work.",
        "### Accuracy",
        f"{sum(clean.right)} of {len(clean.right)} held-out questions right, five-shot, greedy, "
        f"float32: **{interval(sum(clean.right), len(clean.right))} %**; "
        f"{sum(clean.right[:NUM_FIRST])} of the first {NUM_FIRST}. {summary['unfinished']} replies "
        f"lack an answer. A prompt has {summary['mean_prompt_tokens']:.0f} tokens on average "
        f"({summary['max_prompt_tokens']} at most), a reply {summary['mean_reply_tokens']:.0f}. "
        f"In batches of another size {same} of {len(again.texts)} replies are the same.",
        families(summary),
        "### Experts",
        "Tokens of an expert over the fair share of 1/32, prompts' questions and replies:",
        shares(summary),
        "### Margins",
        "Best minus second-best logit at the digits of each computed result and of the answer:",
        margins(summary),
        f"{100 * summary['questions_with_margin_below_half']:.1f} % of the replies have a token "
        "with a margin below 0.5: a fault, or another rounding, moves those first.",
        "### float32 and bf16",
        precision_text(clean, narrow),
        "### Accuracy under faults",
        f"The number is the dose, `@2` means layer 2 alone; without it every layer is hit. Asked: "
        f"{n:,} questions, of which the clean model answers {sum(clean.right[:n])} right "
        f"({100 * sum(clean.right[:n]) / max(1, n):.2f} %). *Lost* went from right to wrong, "
        "*gained* the other way.",
        kinds_list(),
        fault_tables(clean, folder),
    ]
    return "\n\n".join(parts)


def between_marks(page: str, text: str) -> str:
    """Return the page with `text` between its marks.

    Raises:
        ValueError: the page lacks one of them.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m moeserve.tiny.report", description=__doc__)
    add_options(parser)
    parser.add_argument("--out", type=Path, help="page with the two marks; else standard output")
    args = parser.parse_args()
    plan: Plan = plan_of(args)
    measure(plan)
    text = render(plan.folder)
    if args.out is None:
        print(text)
        return
    page = between_marks(args.out.read_text(encoding="utf-8"), text)
    args.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
