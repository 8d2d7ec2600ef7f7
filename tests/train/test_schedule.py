"""The learning rate is a function of the step: its corners, its shape, and what it refuses."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from tilegrad.training.schedule import learning_rate

RUN: dict[str, Any] = {"peak": 1e-3, "floor": 1e-4, "warmup_steps": 10, "total_steps": 110}


def test_corners() -> None:
    assert learning_rate(0, **RUN) == 1e-3 / 10
    assert learning_rate(4, **RUN) == 1e-3 / 2
    assert learning_rate(9, **RUN) == 1e-3
    assert learning_rate(59, **RUN) == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-12)
    assert learning_rate(109, **RUN) == learning_rate(110, **RUN) == learning_rate(10**9, **RUN) == 1e-4


def test_warm_up_is_a_line_and_the_rest_is_a_cosine() -> None:
    rates = [learning_rate(step, **RUN) for step in range(110)]
    rise = [b - a for a, b in pairwise(rates[:10])]
    assert rise == pytest.approx([1e-4] * 9, rel=1e-9)
    for step in range(10, 110):
        angle = math.pi * (step - 9) / 100
        assert rates[step] == pytest.approx(1e-4 + 9e-4 * math.cos(angle / 2) ** 2, rel=1e-9)
    assert all(a > b for a, b in pairwise(rates[9:]))


def test_without_warm_up_and_in_one_step() -> None:
    assert learning_rate(0, peak=1.0, floor=0.0, warmup_steps=0, total_steps=2) == 0.5
    assert learning_rate(0, peak=1.0, floor=0.1, warmup_steps=0, total_steps=1) == 0.1
    assert learning_rate(7, peak=0.3, floor=0.3, warmup_steps=0, total_steps=20) == 0.3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"floor": 2e-3}, "peak, floor: got 0.001, 0.002"),
        ({"floor": -1e-3}, "0 ≤ floor ≤ peak"),
        ({"peak": math.nan}, "peak, floor: got nan"),
        ({"peak": math.inf}, "peak, floor: got inf"),
        ({"warmup_steps": 110}, "warmup_steps, total_steps: got 110, 110"),
        ({"warmup_steps": -1}, "warmup_steps, total_steps: got -1"),
    ],
)
def test_what_is_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        learning_rate(0, **(RUN | change))
    with pytest.raises(ValueError, match="step: got -1; accepted: at least 0"):
        learning_rate(-1, **RUN)
