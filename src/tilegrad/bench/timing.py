"""Interleaved times of calls: in a round each call runs once, so that a change in the speed of the machine affects all calls,
and the order rotates from round to round."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Thunk = Callable[[], object]
FLUSH_BYTES = 1 << 30
SLEEP_MS, LONGEST_SLEEP_MS = 1.0, 100.0
CALIBRATION_CYCLES = 10_000_000
MOST_TRIES = 3


class DeviceTime:
    """The device time of calls on CUDA with a cold L2 cache and a hidden host. Before a call the device writes FLUSH_BYTES and
    sleeps, for at least twice as long as the host took to enqueue the call in the last round. So all launches of the call are
    already in the stream when the first of them starts, and the time contains neither Python nor a launcher. If the host took
    longer than the device slept, the call runs again after a longer sleep, up to MOST_TRIES times: a call that waits for the
    device is never hidden."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._cycles_per_ms = 1.0
        for _round in range(2):  # the first round raises the clock
            start, end = self._events()
            start.record()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            end.record()
            end.synchronize()
        self._cycles_per_ms = CALIBRATION_CYCLES / start.elapsed_time(end)

    def ms(self, run: Thunk, host_ms: float) -> tuple[float, float]:
        """(milliseconds of the device, milliseconds of the host) of a call. `host_ms` is the time of the host in the last
        round."""
        for _try in range(MOST_TRIES):
            start, end = self._events()
            self._flush.zero_()
            torch.cuda._sleep(int(self._cycles_per_ms * min(max(SLEEP_MS, 2 * host_ms), LONGEST_SLEEP_MS)))
            start.record()
            began = time.perf_counter()
            run()
            host_ms = 1e3 * (time.perf_counter() - began)
            end.record()
            hidden = not start.query()  # the device still slept when the last launch was enqueued
            end.synchronize()
            if hidden:
                break
        return start.elapsed_time(end), host_ms

    @staticmethod
    def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def interleaved(thunks: dict[str, Thunk], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """thunk → milliseconds in each round, after two rounds to warm up: device time on CUDA (DeviceTime), else wall time."""
    on_device = DeviceTime(device) if device.type == "cuda" else None
    ms: dict[str, list[float]] = {name: [] for name in thunks}
    host_ms = dict.fromkeys(thunks, 0.0)
    names = list(thunks)
    for round_ in range(-2, repeats):
        first = round_ % len(names) if names else 0
        for name in names[first:] + names[:first]:
            run = thunks[name]
            if on_device is not None:
                call_ms, host_ms[name] = on_device.ms(run, host_ms[name])
            else:
                began = time.perf_counter()
                run()
                call_ms = 1e3 * (time.perf_counter() - began)
            if round_ >= 0:
                ms[name].append(call_ms)
    return ms


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """In this context, glibc keeps freed memory. Peers, which allocate in each call, then reuse mapped pages, as the calls of
    tilegrad do."""
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
