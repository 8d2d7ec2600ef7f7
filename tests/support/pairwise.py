"""Few specifications of a call that cover every pair of values of any two axes: all-pairs testing, greedily.

A specification is one value of every axis. A value that an axis lists twice is drawn twice as often.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

Axes = Mapping[str, tuple[object, ...]]
Spec = dict[str, Any]
Pair = tuple[tuple[str, object], tuple[str, object]]

DRAWS = 60  # random specifications of which the best is taken


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
    """Of DRAWS random specifications always the one with the most pairs not covered yet, until none is missing.

    `allowed` also judges a specification of two axes only: it must not ask for others."""
    dice = random.Random(seed)

    def draw() -> Spec:
        while True:
            spec = {axis: dice.choice(values) for axis, values in axes.items()}
            if allowed(spec):
                return spec

    missing, chosen = all_pairs(axes, allowed), []
    while missing:
        best = max((draw() for _ in range(DRAWS)), key=lambda spec: len(pairs(spec) & missing))
        if pairs(best) & missing:
            chosen.append(best)
            missing -= pairs(best)
    return chosen
