"""Template families about measures: distance, time, rates, areas, temperature.

Receives `Dice`, returns a `Problem`; each family registers itself. Fractions, per cent and ratios
are in `families_parts`.
"""

from __future__ import annotations

from moeserve.tiny.writing import Dice, Problem, add, div, family, mul, problem, sub


@family
def two_legs(d: Dice) -> Problem:
    """Distance at two speeds."""
    (who,) = d.people(1)
    v1, t1, v2, t2 = d.count(), d.digit(), d.between(11, 95), d.factor()
    first, second = mul(v1, t1), mul(v2, t2)
    total = add(first, second)
    how = d.pick(("train", "truck", "plane", "ferry"))
    return problem(
        f"{who} travels by {how} for {t1} hours at {v1} km an hour and then by car for {t2} hours "
        f"at {v2} km an hour. How many km is that?",
        f"By {how}: {first} km.",
        f"By car: {second} km.",
        f"In all: {total} km.",
        answer=total,
    )


@family
def travel_time(d: Dice) -> Problem:
    """Hours for a distance there and a slower way back."""
    (who,) = d.people(1)
    fast, slow, k = d.between(6, 30), d.between(4, 29), d.between(1, 6)
    length = fast * slow * k
    there, back = div(length, fast), div(length, slow)
    total = add(there, back)
    return problem(
        f"A path is {length} km long. {who} rides there at {fast} km an hour and back at {slow} km "
        f"an hour. How many hours is {who.he} on the way?",
        f"There: {there} hours.",
        f"Back: {back} hours.",
        f"In all: {total} hours.",
        answer=total,
    )


@family
def practice(d: Dice) -> Problem:
    """Hours and minutes added over days."""
    (who,) = d.people(1)
    hours, minutes, days, less = d.between(1, 4), 5 * d.between(1, 11), d.factor(), d.between(4, 58)
    first = mul(hours, 60)
    day = add(first, minutes)
    total = mul(day, days)
    left = sub(total, less)
    what = d.pick(("the piano", "the drums", "chess", "tennis", "the violin"))
    return problem(
        f"{who} practises {what} {hours} h {minutes} min a day for {days} days, but leaves {less} "
        f"min early on the last day. How many minutes is that?",
        f"{hours} h is {first} min.",
        f"A day: {day} min.",
        f"{days} days: {total} min.",
        f"Less the last: {left} min.",
        answer=left,
    )


@family
def clock(d: Dice) -> Problem:
    """Minutes between two times less the breaks."""
    h1, m1, m2 = d.between(6, 12), d.between(1, 59), d.between(1, 59)
    hours = d.between(2, 8)
    num, each = d.between(2, 4), d.between(4, 24)
    full, breaks = mul(hours, 60), mul(num, each)
    end = add(full, m2)
    gap = sub(end, m1)
    left = sub(gap, breaks)
    who = d.pick(("A class", "A team", "A choir", "A crew"))
    return problem(
        f"{who} works from {h1}:{m1:02d} to {h1 + hours}:{m2:02d} with {num} breaks of {each} "
        f"minutes. How many minutes of work is that?",
        f"{hours} h is {full} min.",
        f"From {h1}:00 it is {end}.",
        f"From {h1}:{m1:02d} it is {gap}.",
        f"Breaks: {breaks}.",
        f"Work: {left}.",
        answer=left,
    )


@family
def machines(d: Dice) -> Problem:
    """Two machines at work, some pieces broken."""
    r1, r2, hours = d.count(), d.between(11, 60), d.factor()
    both = add(r1, r2)
    made = mul(both, hours)
    bad = d.between(2, min(made.value - 1, 300))
    good = sub(made, bad)
    what = d.pick(("bolts", "cups", "bricks", "bottles", "tiles", "screws"))
    return problem(
        f"One machine makes {r1} {what} an hour and another {r2}. Both run for {hours} hours, and "
        f"{bad} {what} are broken. How many are whole?",
        f"Both make {both} an hour.",
        f"They make {made}.",
        f"Whole: {good}.",
        answer=good,
    )


@family
def tank(d: Dice) -> Problem:
    """Water flowing in and out."""
    start, inflow, minutes = d.large(), d.count(), d.factor()
    out = d.between(3, inflow - 2)
    net = sub(inflow, out)
    more = mul(net, minutes)
    total = add(start, more)
    what = d.pick(("tank", "pool", "pond", "barrel"))
    return problem(
        f"A {what} holds {start} litres. Each minute {inflow} litres flow in and {out} flow out. "
        f"How many litres are in it after {minutes} minutes?",
        f"Each minute adds {net}.",
        f"In all {more} are added.",
        f"Then it holds {total}.",
        answer=total,
    )


@family
def fence(d: Dice) -> Problem:
    """The cost of a fence round a garden."""
    (who,) = d.people(1)
    length, width, price = d.count(), d.between(6, 60), d.digit()
    half = add(length, width)
    around = mul(half, 2)
    gate = d.between(2, 9)
    need = sub(around, gate)
    cost = mul(need, price)
    return problem(
        f"{who} fences a garden of {length} m by {width} m and leaves {gate} m open for a gate. A "
        f"metre of fence costs ${price}. How many dollars does the fence cost?",
        f"Two sides: {half} m.",
        f"All around: {around} m.",
        f"Fence: {need} m.",
        f"Cost: ${cost}.",
        answer=cost,
    )


@family
def floor_area(d: Dice) -> Problem:
    """Area of a floor less a corner, in tiles."""
    length, width = d.between(11, 48), d.factor()
    side, tiles = d.between(2, min(width, 9)), d.digit()
    room, corner = mul(length, width), mul(side, side)
    area = sub(room, corner)
    need = mul(area, tiles)
    return problem(
        f"A hall is {length} m by {width} m, and a square of {side} m by {side} m stays bare. Each "
        f"square metre takes {tiles} tiles. How many tiles are needed?",
        f"The hall has {room} square metres.",
        f"The square has {corner}.",
        f"To cover: {area}.",
        f"Tiles: {need}.",
        answer=need,
    )


@family
def temperature(d: Dice) -> Problem:
    """Degrees up and down, sometimes below zero."""
    start, fall, rise, hours = d.between(2, 30), d.between(2, 9), d.between(1, 15), d.between(2, 7)
    drop = mul(fall, hours)
    night = sub(start, drop)
    day = add(night, rise)
    town = d.pick(("the hut", "the lake", "the camp", "the pass"))
    return problem(
        f"At {town} it is {start} degrees. It falls by {fall} degrees an hour for {hours} hours "
        f"and then rises by {rise}. How many degrees is it then?",
        f"It falls by {drop}.",
        f"Then it is {night}.",
        f"At the end it is {day}.",
        answer=day,
    )
