"""Template families about money: prices, change, wages, discounts, profit, savings.

Receives `Dice`, returns a `Problem`; each family registers itself. Every final answer is a whole
number, because the field's scoring script reads the last run of digits.
"""

from __future__ import annotations

from moeserve.tiny.writing import (
    Dice,
    Mark,
    Problem,
    add,
    div,
    family,
    mul,
    percent,
    problem,
    sub,
    with_commas,
)


@family
def change(d: Dice) -> Problem:
    """Two purchases paid with a large note."""
    (who,), (one, two) = d.people(1), d.foods(2)
    n1, n2, p1, p2 = d.factor(), d.digit(), d.between(2, 24), d.between(2, 24)
    first, second = mul(n1, p1), mul(n2, p2)
    total = add(first, second)
    paid = next(note for note in (50, 100, 200, 500, 1000) if note > total.value)
    back = sub(paid, total)
    return problem(
        f"{who} buys {n1} crates of {one} at ${p1} each and {n2} crates of {two} at ${p2} each and "
        f"pays with ${paid}. How many dollars of change does {who.he} get?",
        f"The {one} cost ${first}.",
        f"The {two} cost ${second}.",
        f"Both cost ${total}.",
        f"The change is ${back}.",
        answer=back,
    )


@family
def cents(d: Dice) -> Problem:
    """Small prices in cents paid with dollars."""
    (who,) = d.people(1)
    one, two = d.pick(("pencil", "pen", "card")), d.pick(("rubber", "ruler", "stamp"))
    n1, n2, p1, p2 = d.digit(), d.digit(), d.between(12, 95), d.between(12, 95)
    first, second = mul(n1, p1), mul(n2, p2)
    total = add(first, second)
    dollars = total.value // 100 + d.between(1, 3)
    have = mul(dollars, 100)
    left = sub(have, total)
    return problem(
        f"A {one} costs {p1} cents and a {two} {p2} cents. {who} has ${dollars} and buys {n1} of "
        f"the first and {n2} of the second. How many cents has {who.he} left?",
        f"{n1} times the {one}: {first}.",
        f"{n2} times the {two}: {second}.",
        f"Together: {total} cents.",
        f"{who} has {have} cents.",
        f"Left: {left}.",
        answer=left,
    )


@family
def half_dollars(d: Dice) -> Problem:
    """Prices with a half or a quarter of a dollar."""
    (who,), (what,) = d.people(1), d.foods(1)
    dollars, part = d.between(1, 19), d.pick((25, 50, 75))
    num = 4 * d.between(1, 6) if part != 50 else 2 * d.between(1, 12)
    cost = num * (100 * dollars + part) // 100
    price = f"{dollars}.{part}"
    spent = Mark(f"{num}*{price}", cost, str(cost))
    have = d.between(cost + 3, cost + 240)
    left = sub(have, spent)
    return problem(
        f"A bag of {what} costs ${price}. {who} has ${have} and buys {num} bags. How many dollars "
        f"has {who.he} left?",
        f"The bags cost ${spent}.",
        f"{who} has ${left} left.",
        answer=left,
    )


@family
def wages(d: Dice) -> Problem:
    """Pay by the hour, with a bonus and a deduction."""
    (who,) = d.people(1)
    rate, hours, days = d.between(8, 38), d.between(3, 9), d.factor()
    bonus, rent = d.between(15, 180), 0
    per_day = mul(rate, hours)
    pay = mul(per_day, days)
    total = add(pay, bonus)
    rent = d.between(10, min(total.value - 5, 600))
    left = sub(total, rent)
    job = d.pick(("in a shop", "in a garden", "at a bakery", "at a hotel"))
    return problem(
        f"{who} works {job} for ${rate} an hour, {hours} hours a day, {days} days, and gets a "
        f"bonus of ${bonus}. {who.he.capitalize()} pays ${rent} of rent. How many dollars "
        f"are left?",
        f"A day brings ${per_day}.",
        f"All days bring ${pay}.",
        f"With the bonus: ${total}.",
        f"Left: ${left}.",
        answer=left,
    )


@family
def overtime(d: Dice) -> Problem:
    """A week with hours beyond forty at double pay."""
    (who,) = d.people(1)
    rate, extra = d.between(9, 48), d.factor()
    base, double = mul(40, rate), mul(rate, 2)
    more = mul(extra, double)
    total = add(base, more)
    return problem(
        f"{who} earns ${rate} an hour for the first 40 hours of a week and twice that for every "
        f"hour beyond. How many dollars does {who.he} earn in a week of {40 + extra} hours?",
        f"40 hours: ${base}.",
        f"Beyond: {sub(40 + extra, 40)} hours.",
        f"They pay ${double} each.",
        f"That is ${more}.",
        f"In all: ${total}.",
        answer=total,
    )


@family
def savings(d: Dice) -> Problem:
    """Weeks until a goal is reached."""
    (who,) = d.people(1)
    earn, weeks = d.between(14, 60), d.between(3, 24)
    spend, gift = d.between(2, earn - 6), d.count()
    week = sub(earn, spend)
    goal = week.value * weeks + gift
    need = sub(goal, gift)
    num = div(need, week)
    thing = d.pick(("bike", "phone", "tent", "guitar", "desk"))
    return problem(
        f"{who} wants a {thing} for ${goal} and has ${gift}. Each week {who.he} earns ${earn} and "
        f"spends ${spend}. How many weeks does it take to have enough?",
        f"{who} needs ${need} more.",
        f"A week brings ${week}.",
        f"It takes {num} weeks.",
        answer=num,
    )


@family
def discount(d: Dice) -> Problem:
    """A price cut in per cent, several pieces bought."""
    (who,) = d.people(1)
    rate = d.pick((5, 10, 15, 20, 25, 30, 40, 60))
    price, num = 20 * d.between(2, 24), d.digit()
    cut = percent(price, rate)
    new = sub(price, cut)
    total = mul(new, num)
    thing = d.pick(("chairs", "lamps", "coats", "shelves", "clocks", "tables"))
    return problem(
        f"Some {thing} cost ${price} each. In a sale they are {rate}% cheaper. How many dollars "
        f"does {who} pay for {num} of them?",
        f"The cut is ${cut}.",
        f"One costs ${new}.",
        f"All cost ${total}.",
        answer=total,
    )


@family
def tip(d: Dice) -> Problem:
    """A restaurant bill with a tip, split among friends."""
    (who,) = d.people(1)
    friends, rate = d.digit(), d.pick((5, 10, 15, 20, 25))
    dish = 20 * d.between(1, 9)
    bill = mul(friends, dish)
    extra = percent(bill, rate)
    total = add(bill, extra)
    each = div(total, friends)
    return problem(
        f"{who} and friends, {friends} people in all, each order food for ${dish}. They add a tip "
        f"of {rate}% and share the sum equally. How many dollars does each pay?",
        f"The bill is ${bill}.",
        f"The tip is ${extra}.",
        f"The sum is ${total}.",
        f"Each pays ${each}.",
        answer=each,
    )


@family
def profit(d: Dice) -> Problem:
    """Bought cheap, sold dear, less a fee."""
    (who,), (what,) = d.people(1), d.things(1)
    num, buy, gain = d.count(), d.digit(), d.digit()
    cost, income = mul(num, buy), mul(num, buy + gain)
    gross = sub(income, cost)
    fee = d.between(1, gross.value - 1)
    net = sub(gross, fee)
    return problem(
        f"{who} buys {num} {what} at ${buy} each, sells them all at ${buy + gain} each and pays "
        f"${fee} for the stall. How many dollars of profit does {who.he} make?",
        f"Cost: ${cost}.",
        f"Income: ${income}.",
        f"More than the cost: ${gross}.",
        f"Profit: ${net}.",
        answer=net,
    )


@family
def budget(d: Dice) -> Problem:
    """Sums of thousands, printed with commas."""
    first, second = 10 * d.between(120, 980), 10 * d.between(110, 890)
    total = with_commas(add(first, second))
    spent = 10 * d.between(20, (first + second) // 10 - 105)
    left = with_commas(sub(total, spent))
    who = d.pick(("A school", "A club", "A town", "A museum", "A library"))
    return problem(
        f"{who} gets ${first:,} from the state and ${second:,} from gifts and spends ${spent:,} on "
        f"repairs. How many dollars are left?",
        f"It gets ${total}.",
        f"There are ${left} left.",
        answer=left,
    )


@family
def tickets(d: Dice) -> Problem:
    """Two kinds of tickets, a share of the income given away."""
    adults, children = 10 * d.between(2, 19), 10 * d.between(2, 19)
    dear, cheap = d.between(6, 24), d.between(2, 9)
    rate = d.pick((10, 20, 30, 40, 50, 60, 70))
    first, second = mul(adults, dear), mul(children, cheap)
    total = add(first, second)
    given = percent(total, rate)
    left = sub(total, given)
    place = d.pick(("fair", "zoo", "concert", "play"))
    return problem(
        f"A {place} sells {adults} tickets to adults at ${dear} and {children} to children at "
        f"${cheap}. It gives {rate}% of the money away. How many dollars does it keep?",
        f"Adults pay ${first}.",
        f"Children pay ${second}.",
        f"Together: ${total}.",
        f"Given away: ${given}.",
        f"Kept: ${left}.",
        answer=left,
    )


@family
def rent(d: Dice) -> Problem:
    """What remains of a year's pay after monthly costs."""
    (who,) = d.people(1)
    pay = 10 * d.between(110, 390)
    room, food = 10 * d.between(20, 69), 5 * d.between(12, 70)
    months = d.digit()
    costs = add(room, food)
    kept = with_commas(sub(pay, costs))
    total = with_commas(mul(kept, months))
    return problem(
        f"{who} earns ${pay:,} a month and pays ${room} for a room and ${food} for food. How many "
        f"dollars does {who.he} keep in {months} months?",
        f"A month costs ${costs}.",
        f"{who} keeps ${kept} a month.",
        f"In {months} months: ${total}.",
        answer=total,
    )
