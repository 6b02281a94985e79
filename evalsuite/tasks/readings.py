"""The readings: how a number is found in a reply, and when it counts as the right one.

Receives a reply's text, a gold answer and a finish reason; returns a `Score`. Two readings are
other people's, quirks included, because thresholds were made with them (`last_number`: the
field's GSM8K script; `PatternReading`: lm-eval's filters). `numeric` is the right one. Each takes
time in proportion to the reply: a broken build repeats one character up to the token limit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from evalsuite.tasks.base import NO_ANSWER, Score

# --- numeric -------------------------------------------------------------------------------

# Digits with thousands groups, or plain digits; a decimal part; an exponent of at most three
# digits (longer ones are no magnitude anyone means, and cost memory).
_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212\u2013\uff0d]?)"
    r"(?P<currency>[$\u20ac\u00a3]?)"
    r"(?P<inner>[-\u2212]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?P<exponent>(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?)"
)
_MINUS = "-\u2212\u2013\uff0d"
_MARKER = "####"
# How models mark their thinking: most write <think>; Seed-OSS, LongCat, Magistral and Kimi-VL
# their own forms of it.
_OPEN_THINKING = re.compile(r"<(?:seed:|longcat_)?think(?:ing)?>|\[THINK\]|\u25c1think\u25b7")
_CLOSE_THINKING = re.compile(r"</(?:seed:|longcat_)?think(?:ing)?>|\[/THINK\]|\u25c1/think\u25b7")


def shot_border(*words: str) -> re.Pattern[str]:
    """Pattern of a line that opens a new question: one of `words`, perhaps numbered or in bold."""
    return re.compile(rf"\n[^\S\n]*(?:[*#]+[^\S\n]*)?(?:{'|'.join(words)})(?: ?[0-9]+)?:")


@dataclass(frozen=True)
class _Found:
    """A number in a text: its cleaned form and where it ends."""

    text: str
    end: int


def read_number(text: str, border: re.Pattern[str], is_cut: bool) -> str:
    """Find the answer in a reply.

    The rule, in order: a closed thinking block goes, an open one takes the rest of the reply with
    it; text from the first shot border on goes; the first number on the line of the last `####`
    that has one; otherwise the last number. A minus counts where it touches the number and
    nothing that it could subtract from stands before it. A reply cut by the token limit is read
    only where a number is marked by `####` and something follows it.

    Args:
        text: The raw reply.
        border: Where a made-up next question begins.
        is_cut: Whether the server stopped at the token limit.

    Returns:
        The number in a form that `Decimal` reads, "" for none.
    """
    start = 0
    # A template may have opened the block inside the prompt, so the closing mark alone counts.
    for closed in _CLOSE_THINKING.finditer(text):
        start = closed.end()
    body = text[start:]
    opened = _OPEN_THINKING.search(body)
    if opened:
        body = body[: opened.start()]
        is_cut = False
    cut_at = border.search(body)
    if cut_at:
        body = body[: cut_at.start()]
        is_cut = False
    marked = _after_last_marker(body)
    if marked is not None:
        return "" if is_cut and marked.end >= len(body) else marked.text
    if is_cut:
        return ""
    last = ""
    for number in _numbers(body, 0, len(body)):
        last = number.text
    return last


def _after_last_marker(body: str) -> _Found | None:
    end = len(body)
    at = body.rfind(_MARKER)
    while at >= 0:
        start = at + len(_MARKER)
        line_end = body.find("\n", start, end)
        for number in _numbers(body, start, end if line_end < 0 else line_end):
            return number
        # What lies behind this marker is known to hold no number of an earlier marker's line.
        end = at
        at = body.rfind(_MARKER, 0, at)
    return None


def _numbers(body: str, start: int, end: int) -> Iterator[_Found]:
    for match in _NUMBER.finditer(body, start, end):
        sign = match["sign"] or match["inner"]
        is_negative = sign != "" and sign in _MINUS
        if match["sign"] and is_negative and _has_left_operand(body, match.start()):
            is_negative = False
        digits = match["digits"].replace(",", "") + match["exponent"]
        yield _Found(("-" if is_negative else "") + digits, match.end())


def _has_left_operand(body: str, at: int) -> bool:
    """Whether the minus at `at` subtracts: a word touches it, or a number stands before it."""
    if at and (body[at - 1].isalnum() or body[at - 1] in ")]"):
        return True
    while at and body[at - 1] == " ":
        at -= 1
    return at > 0 and body[at - 1].isdigit()


def numeric(text: str, target: str, finish_reason: str, border: re.Pattern[str]) -> Score:
    """Score by value: exact decimals, so `29.00` is 29 and 2**53 + 1 is not 2**53."""
    value = read_number(text, border, finish_reason == "length")
    if not value:
        return NO_ANSWER
    return Score("correct" if Decimal(value) == Decimal(target) else "wrong", value)


# --- last-number ---------------------------------------------------------------------------

_DIGITS = re.compile(r"\d+")


def script_value(text: str) -> str:
    """Read a text as the field's script does: commas out, last run of digits, as a literal.

    Sign and decimals are lost, and what Python does not read as an integer literal (leading
    zeros, other scripts' digits, more digits than `int` converts) is no answer: thresholds were
    made with this.

    Returns:
        The digits without leading zeros, "" for none.
    """
    runs = _DIGITS.findall(text.replace(",", ""))
    if not runs:
        return ""
    digits: str = runs[-1]
    has_leading_zero = digits[0] == "0" and digits.strip("0") != ""
    if not digits.isascii() or has_leading_zero:
        return ""
    limit = sys.get_int_max_str_digits()
    if limit and len(digits) > limit:
        return ""
    return digits.lstrip("0") or "0"


def last_number(text: str, target: str) -> Score:
    """Score as the field's script does; its label comes from the gold by the same reading."""
    value = script_value(text)
    if not value:
        return NO_ANSWER
    return Score("correct" if value == script_value(target) else "wrong", value)


# --- lm-eval's filters ---------------------------------------------------------------------

_END_STOP = re.compile(r"\.$")


@dataclass(frozen=True)
class PatternReading:
    """One of lm-eval's filters: a pattern, which match of it, and its exact-match comparison.

    Attributes:
        pattern: With one group, or with several of which the first filled one counts.
        select: Index of the match; lm-eval takes the first for "strict", the last for "flexible".
    """

    pattern: re.Pattern[str]
    select: int

    def __call__(self, text: str, target: str) -> Score:
        """Score `text`; both sides lose commas, dollar signs, markers and a full stop."""
        matches = self.pattern.findall(text)
        if not matches:
            return NO_ANSWER
        match = matches[self.select]
        if isinstance(match, tuple):
            match = next((group for group in match if group), "")
        value = match.strip()
        if not value:
            return NO_ANSWER
        return Score("correct" if _clean(value) == _clean(target) else "wrong", value)


def _clean(value: str) -> str:
    bare = value.replace(",", "").replace("$", "")
    # Equals lm-eval's pattern `(?s).*#### `, which takes quadratic time where there is no marker.
    return _END_STOP.sub("", bare.rpartition("#### ")[2]).lower()


# Patterns of lm-eval's task files gsm8k.yaml and gsm8k-cot.yaml, version 3.
STRICT_MARKER = PatternReading(re.compile(r"#### (\-?[0-9\.\,]+)"), 0)
STRICT_SENTENCE = PatternReading(re.compile(r"The answer is (\-?[0-9\.\,]+)."), 0)
FLEXIBLE = PatternReading(re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"), -1)

METRICS = ("last-number", "strict-match", "flexible-extract", "numeric")


@dataclass(frozen=True)
class Readings:
    """All readings of one prompt form.

    Attributes:
        strict: What "strict-match" is for these prompts.
        border: Where a made-up next question begins in a reply.
    """

    strict: PatternReading
    border: re.Pattern[str]

    def score(self, metric: str, target: str, text: str, finish_reason: str) -> Score:
        """Read `text` under one of `METRICS`. Never raises on any text."""
        if metric == "last-number":
            return last_number(text, target)
        if metric == "numeric":
            return numeric(text, target, finish_reason, self.border)
        pattern = {"strict-match": self.strict, "flexible-extract": FLEXIBLE}[metric]
        return pattern(text, target)
