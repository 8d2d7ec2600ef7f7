"""The learning rate of a step: linear warm-up, then one of four schedules."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "wsd", "trapezoid"]
DECAYS_LAST: tuple[Schedule, ...] = ("wsd", "trapezoid")  # the schedules that decay over the last decay_steps steps


def learning_rate(
    step: int,
    *,
    peak: float,
    floor: float,
    warmup_steps: int,
    total_steps: int,
    schedule: Schedule = "cosine",
    decay_steps: int = 0,
) -> float:
    """The rate of `step`, which counts from 0.       W = warmup_steps   N = total_steps   D = decay_steps

    step < W          peak · (step + 1) / W
    W ≤ step < S      peak
    S ≤ step < N      floor + (peak − floor) · f(p)       p = (step + 1 − S) / (N − S)
    step ≥ N          floor, or the peak if D = 0

    cosine       S = W        f(p) = (1 + cos(π·p)) / 2
    linear       S = W        f(p) = 1 − p
    wsd          S = N − D    f(p) = 1 − √p
    trapezoid    S = N − D    f(p) = 1 − p

    Every rate is above 0 if the floor is above 0. Step W − 1 has the peak. Step N − 1, the last, has the floor, unless D = 0.
    With wsd and trapezoid the rate of a step before S does not depend on N.
    """
    if step < 0:
        raise ValueError(f"step: got {step}; accepted: at least 0, the first")
    if not (math.isfinite(peak) and 0 <= floor <= peak):
        raise ValueError(f"peak, floor: got {peak}, {floor}; accepted: finite numbers with 0 ≤ floor ≤ peak")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps, total_steps: got {warmup_steps}, {total_steps}; accepted: 0 ≤ warmup < total")
    last = schedule in DECAYS_LAST
    if not 0 <= decay_steps <= (total_steps - warmup_steps if last else 0):
        most = f"0 … {total_steps - warmup_steps}, the steps after the warm-up" if last else f"0 with {schedule!r}"
        raise ValueError(f"decay_steps: got {decay_steps}; accepted: {most}")
    begin = total_steps - decay_steps if last else warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step < begin or begin == total_steps:
        return peak
    if step >= total_steps - 1:
        return floor
    progress = (step + 1 - begin) / (total_steps - begin)
    if schedule == "cosine":
        return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
    return floor + (peak - floor) * (1 - (math.sqrt(progress) if schedule == "wsd" else progress))
