"""Template families about counting: sums, differences, products, sharing, remainders.

Receives `Dice`, returns a `Problem`; each family registers itself. Money is in `families_money`,
time, rates, fractions and measures in `families_measure`.
"""

from __future__ import annotations

from moeserve.tiny.writing import Dice, Problem, add, div, family, mul, problem, sub


@family
def baskets(d: Dice) -> Problem:
    """Full baskets and loose ones, some given away."""
    (who,), (what,) = d.people(1), d.things(1)
    num, each, loose = d.factor(), d.count(), d.between(3, 60)
    packed = mul(num, each)
    have = add(packed, loose)
    left = sub(have, d.between(5, min(have.value - 1, 400)))
    given = have.value - left.value
    box = d.pick(("baskets", "boxes", "bags", "jars"))
    return problem(
        f"{who} has {num} {box} with {each} {what} in each and {loose} loose {what}. "
        f"{who.he.capitalize()} gives away {given} {what}. How many {what} are left?",
        f"The {box} hold {packed} {what}.",
        f"With the loose ones there are {have}.",
        f"There are {left} left.",
        answer=left,
    )


@family
def three_days(d: Dice) -> Problem:
    """Three days, each told by the one before."""
    (who,), (what,) = d.people(1), d.things(1)
    first, more, times = d.count(), d.between(5, 95), d.pick((2, 3, 4))
    second = add(first, more)
    third = mul(second, times)
    total = add(first, second, third)
    verb = d.pick(("collects", "sells", "counts", "packs"))
    word = {2: "twice", 3: "three times", 4: "four times"}[times]
    return problem(
        f"{who} {verb} {first} {what} on Monday and {more} more than that on Tuesday. On Wednesday "
        f"{who.he} {verb} {word} as many as on Tuesday. How many {what} is that in all?",
        f"Tuesday: {second}.",
        f"Wednesday: {third}.",
        f"In all: {total}.",
        answer=total,
    )


@family
def in_and_out(d: Dice) -> Problem:
    """A chain of gains and losses."""
    (who, friend), (what,) = d.people(2), d.things(1)
    now = start = d.large()
    told, lines = [], []
    mark = add(start, 0)
    for _ in range(d.between(3, 4)):
        change = d.between(12, 240)
        if d.chance(0.5) or change >= now:
            mark = add(now, change)
            told.append(d.pick((f"buys {change}", f"finds {change}", f"gets {change}")))
        else:
            mark = sub(now, change)
            told.append(d.pick((f"loses {change}", f"sells {change}", f"gives {friend} {change}")))
        now = mark.value
        lines.append(f"Then {mark}.")
    story = ", ".join(told[:-1]) + " and then " + told[-1]
    return problem(
        f"{who} starts with {start} {what}, {story}. How many {what} does {who} have now?",
        *lines,
        answer=mark,
    )


@family
def times_as_many(d: Dice) -> Problem:
    """Three owners compared with each other."""
    (one, two, three), (what,) = d.people(3), d.things(1)
    base, times = d.count(), d.digit()
    second = mul(base, times)
    less = d.between(3, min(second.value - 2, 150))
    third = sub(second, less)
    total = add(base, second, third)
    return problem(
        f"{one} has {base} {what}. {two} has {times} times as many as {one}. {three} has {less} "
        f"fewer than {two}. How many {what} do they have together?",
        f"{two} has {second}.",
        f"{three} has {third}.",
        f"Together they have {total}.",
        answer=total,
    )


@family
def how_many_more(d: Dice) -> Problem:
    """Two products compared."""
    (one, two), (what,) = d.people(2), d.things(1)
    pairs = [(d.factor(), d.count()), (d.factor(), d.count())]
    if pairs[0][0] * pairs[0][1] == pairs[1][0] * pairs[1][1]:
        pairs[0] = (pairs[0][0] + 1, pairs[0][1])
    first, second = mul(*pairs[0]), mul(*pairs[1])
    if first.value > second.value:
        who, gap = one, sub(first, second)
    else:
        who, gap = two, sub(second, first)
    return problem(
        f"{one} packs {pairs[0][0]} boxes of {pairs[0][1]} {what}. {two} packs {pairs[1][0]} boxes "
        f"of {pairs[1][1]} {what}. How many more {what} does one pack than the other?",
        f"{one} packs {first}.",
        f"{two} packs {second}.",
        f"{who} packs {gap} more.",
        answer=gap,
    )


@family
def share_equally(d: Dice) -> Problem:
    """Two heaps joined and shared without rest."""
    (one, two), (what,) = d.people(2), d.things(1)
    friends, each = d.factor(), d.count()
    total = friends * each
    part = d.between(1, total - 1)
    kept = d.between(1, each - 1)
    together = add(part, total - part)
    share = div(together, friends)
    left = sub(share, kept)
    return problem(
        f"{one} has {part} {what} and {two} has {total - part}. They share them all equally among "
        f"{friends} children. Each gives {kept} away. How many {what} has each child now?",
        f"There are {together} {what}.",
        f"Each child gets {share}.",
        f"Each has {left} left.",
        answer=left,
    )


@family
def left_over(d: Dice) -> Problem:
    """The remainder of a division."""
    (who,), (what,) = d.people(1), d.things(1)
    size, bags = d.between(6, 29), d.factor()
    rest = d.between(1, size - 1)
    total = size * bags + rest
    first = d.between(1, total - 1)
    have, packed = add(first, total - first), mul(bags, size)
    left = sub(have, packed)
    return problem(
        f"{who} picks {first} {what} in the morning and {total - first} in the afternoon and fills "
        f"as many bags of {size} as possible. How many {what} are left over?",
        f"{who} has {have} {what}.",
        f"{bags} bags hold {packed}.",
        f"Left over: {left}.",
        answer=left,
    )


@family
def theatre(d: Dice) -> Problem:
    """Seats of two blocks less the empty ones."""
    rows, seats = d.between(8, 29), d.count()
    balcony_rows, balcony = d.digit(), d.between(12, 60)
    hall, up = mul(rows, seats), mul(balcony_rows, balcony)
    seats_all = add(hall, up)
    empty = d.between(5, min(seats_all.value - 10, 300))
    people = sub(seats_all, empty)
    place = d.pick(("theatre", "cinema", "concert hall"))
    return problem(
        f"A {place} has {rows} rows of {seats} seats downstairs and {balcony_rows} rows of "
        f"{balcony} seats upstairs. Tonight {empty} seats are empty. How many are taken?",
        f"Downstairs: {hall}.",
        f"Upstairs: {up}.",
        f"Seats in all: {seats_all}.",
        f"Taken: {people}.",
        answer=people,
    )


@family
def buses(d: Dice) -> Problem:
    """Pupils and teachers into buses that fill up exactly."""
    num_buses, size = d.digit(), d.between(18, 56)
    total = num_buses * size
    divisors = [n for n in range(2, 13) if (total - 2 * n) % n == 0 and total > 4 * n]
    classes = d.pick(divisors) if divisors else 1
    each = total // classes - 2
    pupils, teachers = mul(classes, each), mul(classes, 2)
    people = add(pupils, teachers)
    needed = div(people, size)
    return problem(
        f"On a school trip go {classes} classes of {each} pupils, each with 2 teachers. A bus "
        f"takes {size} people. How many buses are needed?",
        f"Pupils: {pupils}.",
        f"Teachers: {teachers}.",
        f"People: {people}.",
        f"Buses: {needed}.",
        answer=needed,
    )


@family
def legs(d: Dice) -> Problem:
    """Legs of animals on a farm."""
    (who,) = d.people(1)
    four, two = d.count(), d.count()
    big = d.pick(("cows", "sheep", "goats", "horses"))
    bird = d.pick(("hens", "ducks", "geese"))
    sold = d.between(1, four - 1)
    kept = sub(four, sold)
    first, second = mul(kept, 4), mul(two, 2)
    total = add(first, second)
    return problem(
        f"{who} has {four} {big} and {two} {bird} and sells {sold} of the {big}. How many legs "
        f"do the animals that stay have?",
        f"{kept} {big} stay.",
        f"They have {first} legs.",
        f"The {bird} have {second} legs.",
        f"In all: {total}.",
        answer=total,
    )


@family
def reading(d: Dice) -> Problem:
    """Pages of a book at two speeds."""
    (who,) = d.people(1)
    slow, days, fast, more = d.between(8, 45), d.factor(), d.between(11, 48), d.digit()
    pages = slow * days + fast * more
    done = mul(slow, days)
    rest = sub(pages, done)
    need = div(rest, fast)
    total = add(days, need)
    return problem(
        f"{who} reads a book of {pages} pages: {slow} pages a day for {days} days, then {fast} "
        f"pages a day to the end. How many days does it take?",
        f"First {who.he} reads {done} pages.",
        f"Then {rest} are left.",
        f"They take {need} days.",
        f"In all: {total} days.",
        answer=total,
    )


@family
def albums(d: Dice) -> Problem:
    """A product of three factors and what is missing."""
    (who,) = d.people(1)
    thing = d.pick(("stickers", "stamps", "cards", "photos"))
    num, pages, each = d.digit(), d.factor(), d.digit()
    per = mul(pages, each)
    room = mul(num, per)
    have = d.between(1, room.value - 1)
    free = sub(room, have)
    return problem(
        f"{who} has {num} albums with {pages} pages each and room for {each} {thing} on a page. "
        f"{who.he.capitalize()} has {have} {thing}. How many more fit in?",
        f"An album holds {per}.",
        f"All hold {room}.",
        f"There is room for {free} more.",
        answer=free,
    )
