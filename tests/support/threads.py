"""Ranks that are threads of one process: collectives without a process group, for ops that take a group of ranks. The
interpreter switches between the threads all the time, so that tests of locks can fail."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class ThreadRank:
    """One of `world` ranks. Sums are formed in the order of ranks; `sent` counts the elements that this rank sent."""

    def __init__(self, rank: int, world: int, meet: threading.Barrier, given: list[Tensor]) -> None:
        self.rank, self.world, self.sent = rank, world, 0
        self._meet, self._given = meet, given

    def all_gather(self, part: Tensor, *, out: Tensor) -> None:
        self._exchange(part.clone())
        for x, other in zip(out.view(self.world, -1), self._given, strict=True):
            x.copy_(other.view(-1))
        self.sent += (self.world - 1) * part.numel()
        self._meet.wait()

    def reduce_scatter(self, x: Tensor, *, out: Tensor) -> None:
        self._exchange(x.clone())
        mine = [other.view(self.world, -1)[self.rank] for other in self._given]
        out.view(-1).copy_(sum(mine[1:], mine[0]))
        self.sent += (self.world - 1) * out.numel()
        self._meet.wait()

    def _exchange(self, x: Tensor) -> None:
        self._given[self.rank] = x
        self._meet.wait()


class Alone:
    """The only rank: collectives in place have nothing to do."""

    rank, world = 0, 1

    def all_gather(self, part: Tensor, *, out: Tensor) -> None:
        assert part.data_ptr() == out.data_ptr()

    def reduce_scatter(self, x: Tensor, *, out: Tensor) -> None:
        assert out.data_ptr() == x.data_ptr()


def run_on_threads(world: int, check: Callable[[ThreadRank], T]) -> list[T]:
    """Runs check(rank) on every rank; returns the results in the order of ranks."""
    meet, given = threading.Barrier(world, timeout=60), [Tensor()] * world

    def guarded(rank: int) -> T:
        try:
            return check(ThreadRank(rank, world, meet, given))
        except BaseException:
            meet.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(guarded, range(world)))


def switching_often(work: Callable[[int], object], threads: int) -> None:
    """Runs work(0) … work(threads − 1) at the same time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    finally:
        sys.setswitchinterval(interval)
