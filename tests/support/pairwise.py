"""Few specifications of a call that cover every pair of values of any two axes: all-pairs testing, greedily.

A specification is one value of every axis. A value that an axis lists twice wins ties twice as often.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

Axes = Mapping[str, tuple[object, ...]]
Spec = dict[str, Any]
Pair = tuple[tuple[str, object], tuple[str, object]]
Allowed = Callable[[Spec], bool]

DRAWS = 10  # specifications of which the best is taken
TRIES = 1000  # to complete pairs


def pairs(spec: Spec) -> set[Pair]:
    return set(itertools.combinations(spec.items(), 2))


def all_pairs(axes: Axes, allowed: Allowed = lambda _spec: True) -> set[Pair]:
    return {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(axes.items(), 2)
        for x, y in itertools.product(xs, ys)
        if allowed({a: x, b: y})
    }


class _Missing:
    """The pairs that no specification has yet. A value is a number, and a set of values is the bits of an int."""

    def __init__(self, axes: Axes, allowed: Allowed, dice: random.Random) -> None:
        self.axes, self.dice = axes, dice
        self.items = list(dict.fromkeys((axis, value) for axis, values in axes.items() for value in values))
        self.number = {item: n for n, item in enumerate(self.items)}
        self.partners = [0] * len(self.items)  # the values that a value has not been paired with
        for x, y in all_pairs(axes, allowed):
            self.partners[self.number[x]] |= 1 << self.number[y]
            self.partners[self.number[y]] |= 1 << self.number[x]
        self.allowed = list(self.partners)  # the values that it may be paired with

    def draw(self, first: int, second: int) -> tuple[int, Spec] | None:
        """(new pairs, a specification with these two values); None if some axis has no value that is allowed with the rest."""
        found, bits, new = {first, second}, 1 << first | 1 << second, 1
        begun = {self.items[n][0] for n in found}
        for axis in self.dice.sample(list(self.axes), len(self.axes)):
            if axis in begun:
                continue
            fit = [n for value in self.axes[axis] if self.allowed[n := self.number[axis, value]] & bits == bits]
            if not fit:
                return None
            gains = [(self.partners[n] & bits).bit_count() for n in fit]
            n = self.dice.choice([n for n, gain in zip(fit, gains, strict=True) if gain == max(gains)])
            found.add(n)
            bits, new = bits | 1 << n, new + max(gains)
        return new, dict(self.items[n] for n in sorted(found))

    def cover(self, spec: Spec) -> None:
        numbers = [self.number[item] for item in spec.items()]
        bits = sum(1 << n for n in numbers)
        for n in numbers:
            self.partners[n] &= ~bits


def covering(axes: Axes, allowed: Allowed = lambda _spec: True, seed: int = 0) -> list[Spec]:
    """Each specification begins with a missing pair and takes, axis by axis, the value that covers the most pairs. The best of
    DRAWS specifications is taken. `allowed` must also judge a specification that has only some axes."""
    dice = random.Random(seed)
    missing, chosen, tries = _Missing(axes, allowed, dice), list[Spec](), 0
    while any(missing.partners):
        first = dice.choice([n for n, bits in enumerate(missing.partners) if bits])
        second = dice.choice([n for n in range(len(missing.items)) if missing.partners[first] >> n & 1])
        drawn = [it for it in (missing.draw(first, second) for _ in range(DRAWS)) if it is not None and allowed(it[1])]
        if drawn:
            chosen.append(max(drawn, key=lambda it: it[0])[1])
            missing.cover(chosen[-1])
        elif (tries := tries + 1) == TRIES:
            raise ValueError(
                f"{missing.items[first]}, {missing.items[second]}: got in no specification; accepted: pairs that are"
            )
    return chosen
