"""Shared memory: buffers, the fence between ordinary stores and the asynchronous proxy, and mbarriers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from support.gluon.schedule import Schedule, extent, task
from support.gluon.values import Block, Number, block


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def shape(self) -> list[int]:
        return [Number(n) for n in self.x.shape]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def index(self, n: int) -> Shared:
        assert 0 <= n < len(self.x)
        return Shared(self.x[n])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.x.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.x.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.x.narrow(dim, start, length))

    def store(self, x: Tensor) -> None:
        assert list(x.shape) == list(self.x.shape)
        self.x.copy_(x)
        here = task()
        here.program.unfenced.add((*extent(self.x), here))

    def load(self, layout: None) -> Block:
        return block(self.x.clone())


class SharedLinearLayout:
    """Element e is at (row, column) = the XOR of bases[n] over the set bits n of e."""

    def __init__(self, bases: list[list[int]]) -> None:
        self.bases = tuple((r, c) for r, c in bases)


@functools.cache
def _seen_by_tma(rows: int, columns: int, bases: tuple[tuple[int, int], ...]) -> Tensor:
    """The element (row · columns + column) of a linear layout at each row and column of TMA's 128-byte swizzle of float32."""
    place = torch.arange(rows * columns)
    row, column = torch.zeros_like(place), torch.zeros_like(place)
    for n, (r, c) in enumerate(bases):
        row ^= (place >> n & 1) * r
        column ^= (place >> n & 1) * c
    line = place // 32 % rows
    seen = torch.empty(rows, columns, dtype=torch.long)
    seen[line, place // (32 * rows) * 32 + (place % 32 // 4 ^ line % 8) * 4 + place % 4] = row * columns + column
    return seen


class Rearranged(Shared):
    """A buffer written in a linear layout and read by TMA. Buffers are stored in the order of TMA."""

    def __init__(self, x: Tensor, layout: SharedLinearLayout) -> None:
        super().__init__(x)
        self.seen = _seen_by_tma(x.shape[0], x.shape[1], layout.bases)

    def store(self, x: Tensor) -> None:
        super().store(x.reshape(-1)[self.seen])


def beginning(buffer: Shared, dtype: torch.dtype, shape: list[int], layout: SharedLinearLayout | None) -> Shared:
    """The first bytes of a buffer as another tensor."""
    if layout is None:
        return Shared(buffer.x.view(-1).view(dtype)[: math.prod(shape)].view(shape))
    assert dtype == buffer.dtype and shape[0] == len(buffer.x) and shape[1] % 32 == 0
    return Rearranged(buffer.x[:, : shape[1]], layout)  # TMA stores blocks of 32 columns one after the other


def fence_async_shared() -> None:
    here = task()
    here.program.unfenced = {each for each in here.program.unfenced if each[2] is not here}


class Barrier:
    """An mbarrier: a phase ends with the last arrival and the last byte."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.count, self.arrivals, self.bytes, self.phase = schedule, 0, 0, 0, 0
        self.loads: list[
            tuple[int, Callable[[], None]]
        ] = []  # loads in flight: bytes, the function that fills the buffer
        schedule.barriers.append(self)

    def arrive(self, arrivals: int, more_bytes: int = 0) -> None:
        self.arrivals -= arrivals
        self.bytes += more_bytes
        assert self.arrivals >= 0, "more arrivals than the barrier counts"
        self.end_phase()
        self.schedule.pause()

    def end_phase(self) -> None:
        if self.arrivals == self.bytes == 0:
            self.phase, self.arrivals = self.phase ^ 1, self.count

    def wait(self, phase: int) -> None:
        def ready() -> bool:
            if self.phase != phase or self.arrivals:
                return self.phase != phase
            return self.bytes == sum(size for size, _ in self.loads)

        self.schedule.pause(ready)
        while self.phase == phase:
            size, fill = self.loads.pop(0)
            fill()
            self.bytes -= size
            self.end_phase()


class Barriers:
    def __init__(self, count: int, schedule: Schedule) -> None:
        self.shape, self.all = [Number(count), Number(1)], [Barrier(schedule) for _ in range(count)]

    def index(self, n: int) -> Barrier:
        assert n >= 0
        return self.all[n]


class NamedBarrier:
    """A barrier of the hardware with a number and a count of threads."""

    def __init__(self) -> None:
        self.arrived = self.rounds = 0

    @staticmethod
    def at(number: int, threads: int, *, waits: bool) -> None:
        """All threads of a partition arrive. They continue, or wait for the rest."""
        here = task()
        barrier = here.program.named.setdefault(number, NamedBarrier())
        barrier.arrived += here.threads
        assert barrier.arrived <= threads, f"barrier {number}: {barrier.arrived} of {threads} threads"
        round_ = barrier.rounds
        if barrier.arrived == threads:
            barrier.arrived, barrier.rounds = 0, round_ + 1
        here.schedule.pause(lambda: not waits or barrier.rounds > round_)


mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: "mbarrier",
    init=lambda barrier, count: barrier.__dict__.update(count=count, arrivals=count),
    expect=lambda barrier, nbytes: barrier.arrive(1, nbytes),
    arrive=lambda barrier, count=1, pred=True: barrier.arrive(count) if pred else None,
    wait=lambda barrier, phase: barrier.wait(phase),
)
