"""Interleaved times of calls: in a round each call runs once, so that a change of the machine's speed affects all, and the
order rotates from round to round. Also the sustained time of steps back to back."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

Thunk = Callable[[], object]
AHEAD_BYTES = 1 << 30
AHEAD_STEPS = 2


def interleaved(thunks: dict[str, Thunk], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each thunk in each round, after two rounds to warm up.

    On CUDA a write of AHEAD_BYTES precedes each call. It flushes the L2 cache, and the host enqueues the call while it
    runs, so the time is the device's, not Python's.
    """
    ahead = torch.empty(AHEAD_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    ms: dict[str, list[float]] = {name: [] for name in thunks}
    names = list(thunks)
    for round_ in range(-2, repeats):
        first = round_ % len(names) if names else 0
        for name in names[first:] + names[:first]:
            run = thunks[name]
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


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, glibc keeps freed memory: peers, which allocate in each call, then reuse mapped pages, as our calls do."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 1 << 26)):
        mallopt(option, value)
    try:
        yield
    finally:
        for option, value in ((mmap_max, 1 << 16), (trim_threshold, 1 << 17), (top_pad, 1 << 17)):
            mallopt(option, value)


class Sustained(NamedTuple):
    """Back-to-back steps: how many, and the seconds from the first one's start to the last one's end."""

    steps: int
    seconds: float


def sustained(step: Thunk, seconds: float, device: torch.device) -> Sustained:
    """Run `step` repeatedly for at least `seconds`. The host stays at most AHEAD_STEPS steps ahead of the current stream, so
    the device never waits for the host; a step on another stream must limit this itself. A long run shows the speed that
    a power-capped GPU sustains."""
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
