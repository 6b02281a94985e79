"""Building blocks of a word problem: numbers by difficulty, names, calculator marks, families.

Receives a random generator and a `Difficulty`; gives the `families_*` modules dice to draw
numbers and words from, marks such as `<<3*4=12>>12`, and the registry that they add themselves
to. Splits, files and checksums are in `minigsm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Difficulty:
    """Every knob that decides how hard the arithmetic is. Ranges are inclusive."""

    digit: tuple[int, int] = (2, 9)
    teen: tuple[int, int] = (11, 29)
    two_digit: tuple[int, int] = (12, 98)
    three_digit: tuple[int, int] = (112, 985)
    # Chance that a number is drawn one class wider than its family needs (a digit becomes a
    # teen, two digits become three). Products of two widened numbers are what a small model
    # gets wrong, so this share moves the accuracy of the whole set.
    hard_share: float = 0.3


DIFFICULTIES = {
    "gentle": Difficulty(hard_share=0.12),
    "standard": Difficulty(),
    "hard": Difficulty(hard_share=0.55),
}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_GIRLS = _words(
    "Ada Amina Bella Clara Dora Elena Fatima Grace Hana Ida Julia Kira Lena Maria Nora Olga "
    "Priya Rosa Sara Tina Vera Yuki"
)
_BOYS = _words(
    "Adam Ben Carlos David Emil Felix George Hugo Ivan Jack Karim Leo Marco Noah Omar Paul Raj "
    "Sam Tom Victor Will Yusuf"
)
THINGS = _words(
    "apples oranges pears lemons marbles stickers stamps coins cards shells beads buttons "
    "pencils books toys balloons cookies muffins candies flowers"
)
FOODS = _words("apples oranges pears lemons plums peaches onions carrots muffins cookies")


@dataclass(frozen=True)
class Person:
    """A name with its pronouns."""

    name: str
    he: str
    his: str

    def __str__(self) -> str:
        """Return the name, so that a person can stand in an f-string."""
        return self.name


PEOPLE = [Person(name, "she", "her") for name in _GIRLS]
PEOPLE += [Person(name, "he", "his") for name in _BOYS]


@dataclass(frozen=True)
class Mark:
    """One calculation, printed as `<<3*4=12>>12`. `shown` is how prose prints the value."""

    expression: str
    value: int
    shown: str

    def __str__(self) -> str:
        """Return the calculator mark followed by the value as prose prints it."""
        return f"<<{self.expression}={self.value}>>{self.shown}"


Number = int | Mark


def value_of(number: Number) -> int:
    """Return the integer behind a plain number or a mark."""
    return number.value if isinstance(number, Mark) else number


def _mark(expression: str, value: int) -> Mark:
    return Mark(expression, value, str(value))


def add(*terms: Number) -> Mark:
    """Return the sum of two or more terms."""
    values = [value_of(term) for term in terms]
    return _mark("+".join(map(str, values)), sum(values))


def sub(first: Number, *rest: Number) -> Mark:
    """Return `first` less each of the others."""
    values = [value_of(first), *(value_of(term) for term in rest)]
    return _mark("-".join(map(str, values)), values[0] - sum(values[1:]))


def mul(*factors: Number) -> Mark:
    """Return the product of two or more factors."""
    values = [value_of(factor) for factor in factors]
    product = 1
    for value in values:
        product *= value
    return _mark("*".join(map(str, values)), product)


def div(whole: Number, parts: Number) -> Mark:
    """Return an exact quotient.

    Raises:
        ValueError: the division leaves a remainder.
    """
    top, bottom = value_of(whole), value_of(parts)
    if top % bottom:
        raise ValueError(f"{top}/{bottom} is not exact")
    return _mark(f"{top}/{bottom}", top // bottom)


def percent(whole: Number, rate: int) -> Mark:
    """Return `rate` per cent of `whole`, which must be an integer.

    Raises:
        ValueError: the result is not an integer.
    """
    top = value_of(whole)
    if top * rate % 100:
        raise ValueError(f"{rate}% of {top} is not exact")
    return _mark(f"{top}*{rate}/100", top * rate // 100)


def with_commas(mark: Mark) -> Mark:
    """Return the same mark with its value printed as 1,250 in prose."""
    return Mark(mark.expression, mark.value, f"{mark.value:,}")


@dataclass(frozen=True)
class Problem:
    """A question, the lines that solve it, and the final answer as it is printed."""

    question: str
    lines: tuple[str, ...]
    answer: str


def problem(question: str, *lines: str, answer: Mark) -> Problem:
    """Join a question with its working; `answer` is the last mark of the working."""
    return Problem(question, lines, answer.shown)


class Dice:
    """Random words and numbers for one problem, drawn in a fixed order from one generator."""

    def __init__(self, rng: Random, difficulty: Difficulty) -> None:
        """Bind the generator and the knobs."""
        self._rng = rng
        self._difficulty = difficulty

    def between(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return self._rng.randint(low, high)

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return self._rng.choice(items)

    def chance(self, share: float) -> bool:
        """Return True with probability `share`."""
        return self._rng.random() < share

    def digit(self) -> int:
        """Return a one-digit number that never widens (2 to 9)."""
        return self.between(*self._difficulty.digit)

    def factor(self) -> int:
        """Return a one-digit factor, or with `hard_share` a factor of two digits."""
        knobs = self._difficulty
        return self.between(*(knobs.teen if self.chance(knobs.hard_share) else knobs.digit))

    def count(self) -> int:
        """Return a number of two digits, or with `hard_share` one of three."""
        knobs = self._difficulty
        wide = self.chance(knobs.hard_share)
        return self.between(*(knobs.three_digit if wide else knobs.two_digit))

    def large(self) -> int:
        """Return a number of three digits."""
        return self.between(*self._difficulty.three_digit)

    def people(self, num_people: int) -> list[Person]:
        """Return different persons."""
        return self._rng.sample(PEOPLE, num_people)

    def things(self, num_things: int) -> list[str]:
        """Return different countable objects in the plural."""
        return self._rng.sample(THINGS, num_things)

    def foods(self, num_foods: int) -> list[str]:
        """Return different goods of a grocer in the plural."""
        return self._rng.sample(FOODS, num_foods)


Family = Callable[[Dice], Problem]
FAMILIES: dict[str, Family] = {}


def family(function: Family) -> Family:
    """Register a template family under its function's name."""
    FAMILIES[function.__name__] = function
    return function
