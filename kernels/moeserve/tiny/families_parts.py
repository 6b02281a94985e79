"""Template families about parts of a whole: fractions, per cent, ratios, averages, ages.

Receives `Dice`, returns a `Problem`; each family registers itself. Prices are in `families_money`,
speeds and areas in `families_measure`.
"""

from __future__ import annotations

from moeserve.tiny.writing import Dice, Problem, add, div, family, mul, percent, problem, sub

_PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth"}


@family
def fraction_of_class(d: Dice) -> Problem:
    """A fraction of a fraction."""
    bottom, inner = d.pick((3, 4, 5, 6, 8)), d.pick((2, 3, 4, 5))
    top = d.between(1, bottom - 1)
    total = bottom * inner * d.between(2, 29)
    one = div(total, bottom)
    girls = mul(one, top)
    some = div(girls, inner)
    rest = sub(girls, some)
    what = d.pick(("play chess", "wear glasses", "sing", "swim", "have a pet"))
    return problem(
        f"Of {total} pupils {top}/{bottom} are girls, and {_PARTS[inner]} of the girls {what}. How "
        f"many girls do not {what}?",
        f"1/{bottom} is {one}.",
        f"Girls: {girls}.",
        f"Of them {some} {what}.",
        f"The others: {rest}.",
        answer=rest,
    )


@family
def percent_of_crowd(d: Dice) -> Problem:
    """A per cent of a per cent."""
    rate, inner = 5 * d.between(2, 18), d.pick((10, 20, 25, 40, 50, 60, 75))
    total = 20 * d.between(2, 48)
    while total * rate % 100 or total * rate // 100 * inner % 100:
        total += 20
    first = percent(total, rate)
    second = percent(first, inner)
    left = sub(total, second)
    crowd = d.pick(("members", "visitors", "workers", "voters"))
    return problem(
        f"A club asks {total} {crowd}. {rate}% of them answer, and {inner}% of those say yes. How "
        f"many {crowd} do not say yes?",
        f"Answers: {first}.",
        f"Yes: {second}.",
        f"Not yes: {left}.",
        answer=left,
    )


@family
def eat_the_rest(d: Dice) -> Problem:
    """A fraction taken, then a fraction of the rest."""
    (one, two), (what,) = d.people(2), d.things(1)
    first, second = d.pick((2, 3, 4, 5)), d.pick((2, 3, 4, 5, 6))
    total = first * second * d.between(2, 30)
    taken = div(total, first)
    rest = sub(total, taken)
    taken_two = div(rest, second)
    left = sub(rest, taken_two)
    return problem(
        f"There are {total} {what} in a box. {one} takes {_PARTS[first]} of them, then {two} takes "
        f"{_PARTS[second]} of the rest. How many {what} are left?",
        f"{one} takes {taken}.",
        f"The rest is {rest}.",
        f"{two} takes {taken_two}.",
        f"Left: {left}.",
        answer=left,
    )


@family
def average(d: Dice) -> Problem:
    """The mean of four numbers."""
    (who,) = d.people(1)
    values = [d.count() for _ in range(3)]
    values.append(d.between(12, 98))
    values[3] += -sum(values) % 4
    total = add(*values)
    mean = div(total, 4)
    goal = mean.value + d.between(1, 40)
    gap = sub(goal, mean)
    what = d.pick(("points", "metres", "steps", "laps"))
    return problem(
        f"{who} makes {values[0]}, {values[1]}, {values[2]} and {values[3]} {what} in four games. "
        f"By how much is the average below {goal}?",
        f"The sum is {total}.",
        f"The average is {mean}.",
        f"It is {gap} below.",
        answer=gap,
    )


@family
def ratio(d: Dice) -> Problem:
    """A total divided in a ratio."""
    (one, two), (what,) = d.people(2), d.things(1)
    a, b, unit = d.between(1, 6), d.between(7, 13), d.count()
    parts = add(a, b)
    each = div(parts.value * unit, parts)
    first, second = mul(a, each), mul(b, each)
    gap = sub(second, first)
    return problem(
        f"{one} and {two} share {parts.value * unit} {what} in the ratio {a} to {b}. How many more "
        f"does {two} get than {one}?",
        f"Parts: {parts}.",
        f"A part is {each}.",
        f"{one} gets {first}.",
        f"{two} gets {second}.",
        f"{two} gets {gap} more.",
        answer=gap,
    )


@family
def recipe(d: Dice) -> Problem:
    """A recipe scaled to more people."""
    (who,) = d.people(1)
    serves, times, grams = d.between(2, 9), d.factor(), d.count()
    people = serves * times
    scale = div(people, serves)
    need = mul(grams, scale)
    have = d.between(1, need.value - 1)
    buy = sub(need, have)
    what = d.pick(("flour", "sugar", "rice", "butter", "cheese"))
    return problem(
        f"A recipe for {serves} people takes {grams} g of {what}. {who} cooks for {people} people "
        f"and has {have} g. How many grams must {who.he} buy?",
        f"That is {scale} times the recipe.",
        f"It takes {need} g.",
        f"To buy: {buy} g.",
        answer=buy,
    )


@family
def ages(d: Dice) -> Problem:
    """Ages now and in some years."""
    one, two, three = d.people(3)
    age, times, older, years = d.between(4, 29), d.between(2, 5), d.between(2, 28), d.digit()
    second = mul(age, times)
    third = add(second, older)
    now = add(age, second, third)
    later = mul(3, years)
    total = add(now, later)
    return problem(
        f"{one} is {age} years old. {two} is {times} times as old, and {three} is {older} years "
        f"older than {two}. What is the sum of their ages in {years} years?",
        f"{two} is {second}.",
        f"{three} is {third}.",
        f"The sum is {now}.",
        f"It grows by {later}.",
        f"Then it is {total}.",
        answer=total,
    )
