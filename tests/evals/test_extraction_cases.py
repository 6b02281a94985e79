"""What a reply is worth: the reported extraction faults, each with its right value."""

from __future__ import annotations

import ast
import re
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalsuite import tasks
from evalsuite.tasks import readings
from evalsuite.tasks.base import Score
from evalsuite.tasks.readings import FLEXIBLE, STRICT_MARKER, STRICT_SENTENCE, script_value

GSM8K = tasks.get("gsm8k")


def numeric(text: str, target: str, finish_reason: str = "stop") -> Score:
    return GSM8K.score("numeric", target, text, finish_reason)


RIGHT, WRONG, NONE = "correct", "wrong", "no_answer"


@pytest.mark.parametrize(
    ("text", "target", "outcome", "value"),
    [
        # A comma after the number.
        ("The total is 72 clips, altogether.", "72", RIGHT, "72"),
        ("#### 72,", "72", RIGHT, "72"),
        ("72,", "72", RIGHT, "72"),
        ("1,319", "1319", RIGHT, "1319"),
        ("1,2,3", "3", RIGHT, "3"),
        ("1,2,3", "123", WRONG, "3"),
        (", , ,", "3", NONE, ""),
        ("12,345,678 in all", "12345678", RIGHT, "12345678"),
        ("1,3190", "3190", RIGHT, "3190"),
        ("72 .", "72", RIGHT, "72"),
        ("72,,", "72", RIGHT, "72"),
        (",72", "72", RIGHT, "72"),
        ("72; that is all", "72", RIGHT, "72"),
        ("so \\boxed{72}, and **done**", "72", RIGHT, "72"),
        ("1,2,", "2", RIGHT, "2"),
        ("$72,000,", "72000", RIGHT, "72000"),
        ("100,000", "100000", RIGHT, "100000"),
        ("1,00", "100", WRONG, "00"),
        # Currency, zeros, full stop; exact decimals.
        ("... is $29.00.", "29", RIGHT, "29.00"),
        ("#### 18.00", "18", RIGHT, "18.00"),
        ("18.", "18", RIGHT, "18"),
        ("018", "18", RIGHT, "018"),
        ("$18", "18", RIGHT, "18"),
        ("€18", "18", RIGHT, "18"),
        ("150", "150", RIGHT, "150"),
        ("15", "150", WRONG, "15"),
        ("150.0", "150", RIGHT, "150.0"),
        ("10", "100", WRONG, "10"),
        ("18.5", "18", WRONG, "18.5"),
        (".5", "0.5", RIGHT, ".5"),
        ("$1,234.50.", "1234.5", RIGHT, "1234.50"),
        ("£2.10", "2.1", RIGHT, "2.10"),
        ("18..", "18", RIGHT, "18"),
        ("18%", "18", RIGHT, "18"),
        ("-0.0", "0", RIGHT, "-0.0"),
        ("0.30000000000000004", "0.3", WRONG, "0.30000000000000004"),
        ("9007199254740993.0", "9007199254740993", RIGHT, "9007199254740993.0"),
        ("9007199254740992", "9007199254740993", WRONG, "9007199254740992"),
        ("9007199254740993", "9007199254740993", RIGHT, "9007199254740993"),
        # Signs; no equality by ending.
        ("711", "11", WRONG, "711"),
        ("25", "5", WRONG, "25"),
        ("5", "-5", WRONG, "5"),
        ("so it is -5 exactly", "-5", RIGHT, "-5"),
        ("−5", "-5", RIGHT, "-5"),
        ("+7", "7", RIGHT, "7"),
        ("-3.0", "-3", RIGHT, "-3.0"),
        ("10-5", "5", RIGHT, "5"),
        ("3-5", "5", RIGHT, "5"),
        ("10 -5", "5", RIGHT, "5"),
        ("10 - 5", "5", RIGHT, "5"),
        ("(-5)", "-5", RIGHT, "-5"),
        ("**-5**", "-5", RIGHT, "-5"),
        ("x=-5", "-5", RIGHT, "-5"),
        ("10-5=-5", "-5", RIGHT, "-5"),
        ("5 - -5", "-5", RIGHT, "-5"),
        ("(3)-5", "5", RIGHT, "5"),
        ("3\u20135", "5", RIGHT, "5"),
        ("\uff0d5", "-5", RIGHT, "-5"),
        # A minus apart from its number is a bullet or a subtraction.
        ("- 5", "5", RIGHT, "5"),
        ("#### -$5", "-5", RIGHT, "-5"),
        ("a loss: -$5", "-5", RIGHT, "-5"),
        ("a loss: $-5", "-5", RIGHT, "-5"),
        # Scientific notation is read as the number it is.
        ("1e3", "2", WRONG, "1e3"),
        ("1e3", "1000", RIGHT, "1e3"),
        ("1e3", "3", WRONG, "1e3"),
        ("12E-1", "1.2", RIGHT, "12E-1"),
        ("3 eggs", "3", RIGHT, "3"),
        ("2e9999 and 3e5x", "5", RIGHT, "5"),
        # Nothing to read.
        ("", "5", NONE, ""),
        ("no idea", "5", NONE, ""),
        ("#### none", "5", NONE, ""),
        ("٥", "5", NONE, ""),
    ],
)
def test_numeric_reads_the_value(text: str, target: str, outcome: str, value: str) -> None:
    assert numeric(text, target) == Score(outcome, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("9+9=18\n#### 18\n\nQuestion: How many legs?\nAnswer: 4\n#### 7", RIGHT),
        ("so 18\nQuestion: How many legs?\nAnswer: 4", RIGHT),
        ("so 18\r\n\r\n \tQuestion: How many legs?\nAnswer: 4", RIGHT),
        ("#### 18\n\nQuestion 2: How many legs?\nAnswer: 4\n#### 7", RIGHT),
        ("#### 18\n\n**Question 2:** How many legs?\n#### 7", RIGHT),
        ("#### 18\n### Question: How many legs?\n#### 7", RIGHT),
        ("#### 18\nAssistant: anything else? 7", RIGHT),
        ("<think>Example: #### 5 ...</think>So 18.\n#### 18", RIGHT),
        # The opening mark may have been part of the prompt.
        ("Example: #### 5 ...</think>So 18.", RIGHT),
        ("<think>a</think><think>#### 5</think>18", RIGHT),
        ("<thinking>Example: #### 5</thinking>So 18.", RIGHT),
        ("<seed:think>#### 5</seed:think>So 18.", RIGHT),
        ("<longcat_think>#### 5</longcat_think>So 18.", RIGHT),
        ("[THINK]#### 5[/THINK]So 18.", RIGHT),
        ("\u25c1think\u25b7#### 5\u25c1/think\u25b7So 18.", RIGHT),
        ("[THINK]... #### 18", NONE),
        ("<thinking>... #### 18", NONE),
        ("#### 17 - no, #### 18", RIGHT),
        ("#### 17 - no, ####\n#### 18 ####", RIGHT),
        ("#### 18\n####", RIGHT),
        ("#### 18 dollars for 3 days", RIGHT),
        ("2 + 16\n#### 18\nThat took 3 steps.", RIGHT),
        ("First I restate the Question. 9+9=18\n#### 18", RIGHT),
        ("\n\nQuestion: How many?\nAnswer: 18", NONE),
        ("<think>... #### 18", NONE),
        ("<think>18</think>", NONE),
        ("<think>18</think>so <think>again 18", NONE),
    ],
)
def test_run_on_replies_and_thinking(text: str, outcome: str) -> None:
    score = numeric(text, "18")
    assert score.outcome == outcome
    assert score.extracted in ("18", "")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("there are 9 and then 18", NONE),  # cut before the answer: no lucky hit
        ("#### 18", NONE),  # perhaps the beginning of 180
        ("#### 18 and on it goes", RIGHT),
        ("so 18\n\nQuestion: and another", RIGHT),  # complete, cut in the made-up question
        ("<think>... #### 18", NONE),
        ("<think>a</think>#### 18\n", RIGHT),
    ],
)
def test_a_reply_cut_by_the_token_limit_needs_a_finished_answer(text: str, outcome: str) -> None:
    assert numeric(text, "18", "length").outcome == outcome


@pytest.mark.parametrize(
    ("text", "target", "outcome", "value"),
    [
        ("... is $29.00.", "29", WRONG, "0"),
        ("#### 1,234", "1234", RIGHT, "1234"),
        ("1,2,3", "123", RIGHT, "123"),
        ("5", "-5", RIGHT, "5"),
        ("018", "18", NONE, ""),
        ("00", "0", RIGHT, "0"),
        ("#### 18\n\nQuestion: 7", "18", WRONG, "7"),
        ("nothing", "18", NONE, ""),
        (", , ,", "3", NONE, ""),
    ],
)
def test_last_number_keeps_the_scripts_quirks(
    text: str, target: str, outcome: str, value: str
) -> None:
    assert GSM8K.score("last-number", target, text, "stop") == Score(outcome, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["gsm8k", "gsm8k-lm-eval", "gsm8k_cot"])
@pytest.mark.parametrize(
    "unit",
    ["\n", "\n ", " ", "#", "#### ", "#### 1", "1", "1,", ",111", ".", "-1 ", "+$-", "1e", "$",
     "<think>", "</think>", "\n#", "The answer is ", "Q: "],
)  # fmt: skip
def test_a_reply_of_one_thing_over_and_over_is_read_at_once(task: str, unit: str) -> None:
    """A broken build repeats itself up to the limit; quadratic reading took seconds a reply."""
    text = (unit * 200_000)[:200_000]
    began = time.process_time()
    for metric in tasks.get(task).metrics:
        tasks.get(task).score(metric, "18", text, "stop")
    # 0.1 s measured at most; reading that is not linear needs minutes at this length.
    assert time.process_time() - began < 2.0


def script_rule(text: str) -> object:
    """The rule of the field's script as its description gives it, on Python's own parser."""
    runs = re.findall(r"\d+", text.replace(",", ""))
    try:
        return ast.literal_eval(runs[-1]) if runs else None
    except SyntaxError:
        return None


TEXTS = st.text(st.sampled_from("0123456789٣²,.-$ ab\n"), max_size=20)


@settings(max_examples=1000, deadline=None)
@given(TEXTS)
def test_last_number_equals_the_scripts_rule(text: str) -> None:
    expected = script_rule(text)
    assert script_value(text) == ("" if expected is None else str(expected))


def test_a_number_too_long_for_int_is_no_answer_and_no_exception() -> None:
    digits = "9" * (sys.get_int_max_str_digits() + 1)
    assert script_value(digits) == ""
    assert script_value(digits[1:]) == digits[1:]
    assert numeric(digits, "9").outcome == WRONG


@settings(max_examples=1000, deadline=None)
@given(
    st.text(st.sampled_from("0123456789,.-+−$#e \n<>/thinkQuso:A"), max_size=60)
    | st.text(st.characters(exclude_categories=()), max_size=60),
    st.sampled_from(["stop", "length", ""]),
)
def test_no_text_makes_a_reading_raise(text: str, finish_reason: str) -> None:
    for name in tasks.names():
        task = tasks.get(name)
        for metric in task.metrics:
            score = task.score(metric, "18", text, finish_reason)
            assert (score.outcome == NONE) == (score.extracted == "")


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_found_in_every_dress(value: int) -> None:
    for dress in ("#### {}", "it is {}.", "it is {:,}.", "#### {:,}\n", "so {}.00, at last"):
        assert numeric(dress.format(value), str(value)).outcome == RIGHT


@pytest.mark.parametrize(
    ("text", "strict", "sentence", "flexible"),
    [
        ("#### 18", "18", None, "18"),
        ("#### 1,234.", "1,234.", None, "1,234."),
        ("#### $18", None, None, "$18"),
        ("#### 5 no #### 18", "5", None, "18"),
        ("The answer is 18.", None, "18", "18."),
        ("The answer is 18", None, "1", "18"),
        ("7", None, None, "7"),
        ("a. b", None, None, None),
        ("it is -5", None, None, "-5"),
        ("....", None, None, "...."),
        ("", None, None, None),
    ],
)
def test_lm_evals_patterns_keep_their_quirks(
    text: str, strict: str | None, sentence: str | None, flexible: str | None
) -> None:
    for reading, value in (
        (STRICT_MARKER, strict),
        (STRICT_SENTENCE, sentence),
        (FLEXIBLE, flexible),
    ):
        assert reading(text, "18").extracted == (value or "")


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from("#  ,$.1aB\n"), max_size=30))
def test_comparison_equals_lm_evals_patterns(text: str) -> None:
    """The four `regexes_to_ignore` of lm-eval's gsm8k.yaml, in its order, and its ignored case."""
    expected = text
    for pattern in (",", r"\$", "(?s).*#### ", r"\.$"):
        expected = re.sub(pattern, "", expected)
    assert readings._clean(text) == expected.lower()


def test_lm_evals_comparison_drops_commas_dollars_and_one_full_stop() -> None:
    assert STRICT_MARKER("#### 1,234.", "1234").outcome == RIGHT
    assert FLEXIBLE("$29.00.", "29").outcome == WRONG
    assert FLEXIBLE("$29.", "29").outcome == RIGHT
    assert FLEXIBLE("29..", "29").outcome == WRONG
