"""The step kinds of word problems: which numbers they draw and which lines they work.

A kind is a function of a random generator and the `Run` so far. It draws its given numbers, works
its lines on the running value, and returns the numbers in the order of its phrases' slots. A run
whose value leaves 1…HIGHEST, or that divides unevenly, is marked as failed and drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from examples.tinyflash.draw import between, pick

HIGHEST = 999
MAX_LINES = 5

_DIVISORS = tuple(
    tuple(d for d in range(2, 11) if value % d == 0 and value >= 2 * d)
    for value in range(HIGHEST + 1)
)


class Line(NamedTuple):
    """One worked step: `left op right = result`."""

    left: int
    op: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right} = {self.result}, which gives {self.result}."


class Run:
    """The running value of a problem under construction and the lines worked so far."""

    def __init__(self) -> None:
        self.value = 0
        self.lines: list[Line] = []
        self.failed = False

    def work(self, left: int, op: str, right: int) -> int:
        """Append `left op right` (a large product in parts) and return its result."""
        if op == "*" and left > 10 and right > 10 and left % 10 and right % 10:
            tens = self.work(left, "*", right // 10 * 10)
            return self.work(tens, "+", self.work(left, "*", right % 10))
        result = _OPERATIONS[op](left, right)
        self.failed |= not 1 <= result <= HIGHEST or max(left, right) > HIGHEST
        self.lines.append(Line(left, op, right, result))
        return result

    def then(self, op: str, right: int) -> None:
        self.value = self.work(self.value, op, right)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,  # only ever asked for where it is exact
}


def count(rng: Random, high: int = HIGHEST) -> int:
    """A number from 2 to `high`; of two digits or fewer more often than its share."""
    if high > 99 and rng.random() < 0.45:
        return between(rng, 100, high)
    return between(rng, 2, max(2, min(high, 99)))


def factors(rng: Random, high: int = HIGHEST) -> tuple[int, int]:
    """Two factors of a product up to `high` (at least 4); sometimes both above ten."""
    if high >= 200 and rng.random() < 0.08:
        first = between(rng, 11, 31)
        return first, between(rng, 11, max(11, min(31, high // first)))
    small = between(rng, 2, max(2, min(10, high // 2)))
    large_limit = high // small
    if rng.random() < 0.8:
        large_limit = min(large_limit, 99)
    large = between(rng, 2, max(2, large_limit))
    return (small, large) if rng.random() < 0.5 else (large, small)


# -- step kinds: draw the given numbers, work the lines, return the numbers ------------------------


def _have(rng: Random, run: Run) -> tuple[int, ...]:
    run.value = count(rng)
    return (run.value,)


def _groups(rng: Random, run: Run) -> tuple[int, ...]:
    number, each = factors(rng)
    run.value = run.work(number, "*", each)
    return number, each


def _sum(rng: Random, run: Run) -> tuple[int, ...]:
    first = count(rng, HIGHEST - 2)
    second = count(rng, HIGHEST - first)
    run.value = run.work(first, "+", second)
    return first, second


def _two_groups(rng: Random, run: Run) -> tuple[int, ...]:
    number, each = factors(rng, 700)
    first = run.work(number, "*", each)
    other_number, other_each = factors(rng, HIGHEST - first)
    run.value = run.work(first, "+", run.work(other_number, "*", other_each))
    return number, each, other_number, other_each


def _joint(op: str) -> Callable[[Random, Run], tuple[int, ...]]:
    """Two people: the second has the first's number `op` another; then both together."""

    def kind(rng: Random, run: Run) -> tuple[int, ...]:
        first = count(rng, 499)
        if op == "*":
            second = between(rng, 2, 9)
        else:
            second = count(rng, HIGHEST - 2 * first if op == "+" else first - 1)
        run.value = run.work(first, "+", run.work(first, op, second))
        return first, second

    return kind


def _gain(rng: Random, run: Run) -> tuple[int, ...]:
    number = count(rng, HIGHEST - run.value)
    run.then("+", number)
    return (number,)


def _lose(rng: Random, run: Run) -> tuple[int, ...]:
    number = count(rng, run.value - 1)
    run.then("-", number)
    return (number,)


def _change_by_groups(op: str) -> Callable[[Random, Run], tuple[int, ...]]:
    def kind(rng: Random, run: Run) -> tuple[int, ...]:
        number, each = factors(rng, HIGHEST - run.value if op == "+" else run.value - 1)
        run.then(op, run.work(number, "*", each))
        return number, each

    return kind


def _multiply(highest: int) -> Callable[[Random, Run], tuple[int, ...]]:
    def kind(rng: Random, run: Run) -> tuple[int, ...]:
        factor = between(rng, 2, max(2, min(highest, HIGHEST // run.value)))
        run.then("*", factor)
        return (factor,)

    return kind


def _double(rng: Random, run: Run) -> tuple[int, ...]:
    run.then("*", 2)
    return ()


def _divide(rng: Random, run: Run) -> tuple[int, ...]:
    divisors = _DIVISORS[run.value]
    if not divisors:
        run.failed = True
        return ()
    divisor = pick(rng, divisors)
    run.then("/", divisor)
    return (divisor,)


def _half(rng: Random, run: Run) -> tuple[int, ...]:
    run.failed |= run.value % 2 == 1
    run.then("/", 2)
    return ()


def _need(rng: Random, run: Run) -> tuple[int, ...]:
    goal = run.value + count(rng, HIGHEST - run.value)
    run.value = run.work(goal, "-", run.value)
    return (goal,)


def _now(rng: Random, run: Run) -> tuple[int, ...]:
    return ()


def _sell_and_spend(rng: Random, run: Run) -> tuple[int, ...]:
    return *_multiply(12)(rng, run), *_lose(rng, run)


def _share_and_add(rng: Random, run: Run) -> tuple[int, ...]:
    return *_divide(rng, run), *_gain(rng, run)


KINDS: dict[str, Callable[[Random, Run], tuple[int, ...]]] = {
    # starts
    "have": _have,
    "groups": _groups,
    "sum": _sum,
    "two_groups": _two_groups,
    "more_than": _joint("+"),
    "times_as": _joint("*"),
    "fewer_than": _joint("-"),
    # changes
    "gain": _gain,
    "lose": _lose,
    "gain_groups": _change_by_groups("+"),
    "lose_groups": _change_by_groups("-"),
    "double": _double,
    "times": _multiply(9),
    "half": _half,
    # questions
    "now": _now,
    "share": _divide,
    "pack": _divide,
    "sell": _multiply(12),
    "sell_spend": _sell_and_spend,
    "compare": _lose,
    "need": _need,
    "together": _gain,
    "share_add": _share_and_add,
}
