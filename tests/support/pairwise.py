"""Few specifications of a call that cover every pair of values of any two axes: all-pairs testing, greedily.

A specification is one value of every axis. A value that an axis lists twice is taken twice as often where it makes no difference.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

Axes = Mapping[str, tuple[object, ...]]
Spec = dict[str, Any]
Pair = tuple[tuple[str, object], tuple[str, object]]

DRAWS = 10  # specifications of which the best is taken
TRIES = 1000  # to complete a pair


def pairs(spec: Spec) -> set[Pair]:
    return set(itertools.combinations(spec.items(), 2))


def all_pairs(axes: Axes, allowed: Callable[[Spec], bool] = lambda _spec: True) -> set[Pair]:
    return {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(axes.items(), 2)
        for x, y in itertools.product(xs, ys)
        if allowed({a: x, b: y})
    }


def covering(axes: Axes, allowed: Callable[[Spec], bool] = lambda _spec: True, seed: int = 0) -> list[Spec]:
    """Each specification begins with a pair that is not covered yet and takes, axis by axis in any order, the value that
    covers the most; of DRAWS such the best is chosen. `allowed` also judges a specification of some axes: it must not ask for
    others."""
    dice = random.Random(seed)
    names = list(axes)
    number: dict[tuple[str, object], int] = {}
    for axis, values in axes.items():
        for value in values:
            number.setdefault((axis, value), len(number))
    missing = [0] * len(number)  # of each value, as bits: those it was not seen with yet, and those it may be seen with
    for x, y in all_pairs(axes, allowed):
        missing[number[x]] |= 1 << number[y]
        missing[number[y]] |= 1 << number[x]
    may = list(missing)

    def draw(begin: list[int]) -> tuple[int, list[int]] | None:
        """(pairs that it covers anew, its values); None where a value of some axis goes with none of the others."""
        found, new = dict(begin_of(begin)), 0
        bits = sum(1 << n for n in begin)
        for axis in dice.sample(names, len(names)):
            if axis in found:
                continue
            fit = [n for value in axes[axis] if may[n := number[axis, value]] & bits == bits]
            if not fit:
                return None
            gains = [(missing[n] & bits).bit_count() for n in fit]
            best = max(gains)
            n = dice.choice([n for n, gain in zip(fit, gains, strict=True) if gain == best])
            found[axis], bits, new = n, bits | 1 << n, new + best
        return new, list(found.values())

    def begin_of(begin: list[int]) -> list[tuple[str, int]]:
        return [(values_of[n][0], n) for n in begin]

    values_of = {n: pair for pair, n in number.items()}
    chosen: list[Spec] = []
    failures = 0
    while any(missing):
        first = dice.choice([n for n, bits in enumerate(missing) if bits])
        second = dice.choice([n for n in range(len(number)) if missing[first] >> n & 1])
        drawn = [it for it in (draw([first, second]) for _ in range(DRAWS)) if it is not None]
        specs = [(new, {values_of[n][0]: values_of[n][1] for n in sorted(ns)}) for new, ns in drawn]
        specs = [(new, spec) for new, spec in specs if allowed(spec)]
        if not specs:
            failures += 1
            if failures == TRIES:
                raise ValueError(f"{values_of[first]} and {values_of[second]}: allowed, and in no specification")
            continue
        spec = max(specs, key=lambda it: it[0])[1]
        chosen.append(spec)
        mine = [number[item] for item in spec.items()]
        bits = sum(1 << n for n in mine)
        for n in mine:
            missing[n] &= ~bits
    return chosen
