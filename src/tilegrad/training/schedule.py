"""The learning rate of a step: linear warm-up, then half a cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
    """The rate of `step`, which counts from 0.

    step < W          peak · (step + 1) / W                                W = warmup_steps
    W ≤ step < N      floor + (peak − floor) · (1 + cos(π·p)) / 2          p = (step + 1 − W) / (N − W)    N = total_steps
    step ≥ N          floor

    So no step has rate 0 unless the floor is 0, step W − 1 has the peak, and step N − 1, the last, has the floor.
    """
    if step < 0:
        raise ValueError(f"step: got {step}; accepted: at least 0, the first")
    if not (math.isfinite(peak) and 0 <= floor <= peak):
        raise ValueError(f"peak, floor: got {peak}, {floor}; accepted: finite numbers with 0 ≤ floor ≤ peak")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps, total_steps: got {warmup_steps}, {total_steps}; accepted: 0 ≤ warmup < total")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= total_steps - 1:
        return floor
    progress = (step + 1 - warmup_steps) / (total_steps - warmup_steps)
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
