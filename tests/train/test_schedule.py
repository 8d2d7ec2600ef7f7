"""The learning rate is a function of the step: its corner points, the shape of each schedule, its errors."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from tilegrad.training.config import RunConfig, TrainConfig
from tilegrad.training.schedule import learning_rate
from tilegrad.training.sections import with_steps

RUN: dict[str, Any] = {"peak": 1e-3, "floor": 1e-4, "warmup_steps": 10, "total_steps": 110}


def test_the_learning_rate_at_its_corner_points() -> None:
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


def rates(schedule: str, **change: Any) -> list[float]:
    run = RUN | {"schedule": schedule} | change
    return [learning_rate(step, **run) for step in range(run["total_steps"])]


def test_linear_is_a_line_to_the_floor() -> None:
    found = rates("linear")
    assert found[:10] == rates("cosine")[:10] and found[-1] == 1e-4
    assert [a - b for a, b in pairwise(found[9:])] == pytest.approx([9e-4 / 100] * 100, rel=1e-9)


@pytest.mark.parametrize(("schedule", "decay"), [("wsd", lambda p: 1 - p**0.5), ("trapezoid", lambda p: 1 - p)])
def test_wsd_and_trapezoid_are_stable_and_then_decay(schedule: str, decay: Any) -> None:
    found = rates(schedule, decay_steps=20)
    assert found[:10] == rates("cosine")[:10] and found[10:90] == [1e-3] * 80
    assert found[90:] == pytest.approx([1e-4 + 9e-4 * decay((i + 1) / 20) for i in range(20)], rel=1e-12)
    assert found[109] == learning_rate(999, **RUN, schedule=schedule, decay_steps=20) == 1e-4  # type: ignore[arg-type]
    longer = rates(schedule, decay_steps=20, total_steps=200)
    assert longer[:90] == found[:90], "the past does not depend on the number of steps"
    assert longer[180:] == found[90:]
    assert rates(schedule, decay_steps=0)[10:] == [1e-3] * 100
    assert rates(schedule, decay_steps=100)[10] < 1e-3


def test_by_default_the_last_fifth_of_the_steps_decays() -> None:
    for steps, decay in ((1000, 200), (4, 1), (1, 1)):
        for schedule, expected in (("wsd", decay), ("trapezoid", decay), ("cosine", -1), ("linear", -1)):
            settings = TrainConfig(steps=steps, warmup_steps=0, schedule=schedule)  # type: ignore[arg-type]
            assert RunConfig(train=settings).train.decay_steps == expected
    of_epochs = RunConfig(train=TrainConfig(epochs=1, schedule="wsd", batch_size=1))
    assert of_epochs.train.decay_steps == -1 and with_steps(of_epochs, lambda _: 50).train.decay_steps == 10
    tight = RunConfig(train=TrainConfig(epochs=1, schedule="wsd", batch_size=1, warmup_steps=9, decay_steps=42))
    with pytest.raises(
        ValueError, match="epochs: got 1, which is 50 steps, with warmup_steps 9 and decay_steps 42; acc"
    ):
        with_steps(tight, lambda _: 50)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "cos"}, "schedule: got 'cos'; accepted: 'cosine', 'linear', 'wsd', 'trapezoid'"),
        ({"decay_steps": 0}, "decay_steps: got 0 with schedule 'cosine'; accepted: -1, or schedule 'wsd' or 'trapezoid'"),
        ({"schedule": "linear", "decay_steps": 9}, "decay_steps: got 9 with schedule 'linear'; accepted: -1, or sche"),
        ({"schedule": "wsd", "decay_steps": -2}, "decay_steps: got -2; accepted: an int ≥ 0, or -1: a fifth of the steps"),
        ({"schedule": "wsd", "decay_steps": 1.0}, "decay_steps: got 1.0; accepted: an int ≥ 0"),
        (
            {"schedule": "wsd", "decay_steps": 91, "warmup_steps": 10},
            "decay_steps: got 91 with steps 100 and warmup_steps 10; accepted: at most 90",
        ),
    ],
)  # fmt: skip
def test_bad_settings_of_a_schedule_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        TrainConfig(steps=100, **settings)


def test_a_schedule_may_have_no_warm_up_or_one_step() -> None:
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
        ({"decay_steps": 1}, "decay_steps: got 1; accepted: 0 with 'cosine'"),
        (
            {"decay_steps": 101, "schedule": "wsd"},
            "decay_steps: got 101; accepted: 0 … 100, the steps after the warm-up",
        ),
        ({"decay_steps": -1, "schedule": "wsd"}, "decay_steps: got -1; accepted: 0 … 100"),
    ],
)
def test_bad_arguments_of_learning_rate_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        learning_rate(0, **(RUN | change))
    with pytest.raises(ValueError, match="step: got -1; accepted: at least 0"):
        learning_rate(-1, **RUN)
