"""Times of calls, interleaved: in a round each runs once, so that a change of the machine's speed falls on all. And the
sustained time of a step, run back to back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

Thunk = Callable[[], object]
AHEAD_BYTES = 1 << 30
AHEAD_STEPS = 2


def interleaved(thunks: dict[str, Thunk], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each thunk in each round, after two rounds to warm up.

    On CUDA a write of AHEAD_BYTES goes before each: it empties the caches, and while it runs the host gets ahead, so that
    the time is the device's, not Python's.
    """
    ahead = torch.empty(AHEAD_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    ms: dict[str, list[float]] = {name: [] for name in thunks}
    for round_ in range(-2, repeats):
        for name, run in thunks.items():
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                ahead.zero_()
                start.record()
                run()
                end.record()
                end.synchronize()
                took = start.elapsed_time(end)
            else:
                began = time.perf_counter()
                run()
                took = 1e3 * (time.perf_counter() - began)
            if round_ >= 0:
                ms[name].append(took)
    return ms


class Sustained(NamedTuple):
    """Back-to-back steps: how many, and the seconds from the first one's start to the last one's end."""

    steps: int
    seconds: float


def sustained(step: Thunk, seconds: float, device: torch.device) -> Sustained:
    """Run `step` over and over for at least `seconds`. The host stays AHEAD_STEPS steps before the current
    stream, so the device never waits for it, and the time is the device's; a step on a stream of its own sees to that by
    itself. A long run shows what a power-capped card keeps up."""
    pending: deque[torch.cuda.Event] = deque()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began, steps = time.perf_counter(), 0
    while not steps or time.perf_counter() - began < seconds:
        step()
        steps += 1
        if device.type == "cuda":
            pending.append(torch.cuda.Event())
            pending[-1].record()
            if len(pending) > AHEAD_STEPS:
                pending.popleft().synchronize()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Sustained(steps, time.perf_counter() - began)
