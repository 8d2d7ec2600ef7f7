"""The scheduler: every partition of every program is a thread; one runs at a time, in an order drawn from a seed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from support.gluon.values import Number

if TYPE_CHECKING:
    from support.gluon.shared_memory import Barrier, NamedBarrier
    from support.gluon.tensor_core import Product

SLOW = 0.02  # relative weight of a slow thread


class Schedule:
    """Threads that run one at a time."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        self.done = threading.Event()
        self.atomics = 0  # number of atomics that changed a value
        self.writes: list[tuple[Task, Callable[[], object]]] = []  # read from shared memory, not yet in memory
        self.barriers: list[Barrier] = []

    def drawn(self) -> Task | None:
        if self.failure:
            return self.tasks[0] if self.tasks else None
        ready = [task for task in self.tasks if task.ready()]
        if not ready and self.tasks:
            self.failure = AssertionError("deadlock: every thread waits for a barrier or a counter")
            return self.tasks[0]
        return self.dice.choices(ready, [task.weight for task in ready])[0] if ready else None

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets other threads run; returns when `ready` is true and this thread is drawn."""
        here = task()
        here.ready = ready
        following = self.drawn()
        if following is not here:
            assert following is not None
            following.go.release()
            here.go.acquire()
        if self.failure:
            raise Stopped

    def land(self, of: Task) -> None:
        """Performs a thread's pending writes to memory."""
        mine = [write for owner, write in self.writes if owner is of]
        self.writes = [each for each in self.writes if each[0] is not of]
        self.dice.shuffle(mine)
        for write in mine:
            write()

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        with one_processor():
            for here, program in enumerate(programs):
                Task(self, Program(here, len(programs)), program)
            first = self.drawn()
            assert first is not None
            first.go.release()
            self.done.wait()
        if self.failure:
            raise self.failure
        assert not any(barrier.loads for barrier in self.barriers), "ends with loads on their way"
        assert all(barrier.arrivals == barrier.count for barrier in self.barriers), "ends within a barrier's phase"
        self.dice.shuffle(self.writes)
        for _, write in self.writes:
            write()


@contextmanager
def one_processor() -> Iterator[None]:
    """Threads that are started inside stay on the processor of this thread. One of them runs at a time, and a switch to another
    processor takes twice as long."""
    allowed = os.sched_getaffinity(0)
    here = Path("/proc/thread-self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[36]
    os.sched_setaffinity(0, {int(here)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class Stopped(BaseException):
    """Another thread failed."""


class Program:
    def __init__(self, here: int, programs: int) -> None:
        self.here, self.programs = Number(here), Number(programs)
        self.unfenced: set[tuple[int, int, Task]] = set()  # addresses that a thread wrote and no fence followed
        self.named: dict[int, NamedBarrier] = {}

    def check_fenced(self, x: Tensor) -> None:
        begin, end = extent(x)
        assert not any(a < end and begin < b for a, b, _ in self.unfenced), "reads what no fence followed"


class Task(threading.Thread):
    """A partition of a program."""

    def __init__(self, schedule: Schedule, program: Program, function: Callable[[], None], warps: int = 4) -> None:
        super().__init__(daemon=True)
        self.threads = 32 * warps
        self.schedule, self.program, self.function = schedule, program, function
        self.go, self.ready = threading.Lock(), lambda: True
        self.go.acquire()  # `run` and `pause` wait until another thread releases it
        self.weight = schedule.dice.choice((SLOW, 1.0))
        self.products: list[Product] = []
        self.stores: list[Callable[[], Callable[[], object]]] = []
        self.seen = -1  # atomics, when this thread last looked at a counter
        schedule.tasks.append(self)
        self.start()

    def run(self) -> None:
        self.go.acquire()
        with self:
            if not self.schedule.failure:
                self.function()
                assert not self.products and not self.stores, "ends with work on its way"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Ends the thread. Its error, if any, is raised again by the thread of the test."""
        schedule = self.schedule
        if not isinstance(error, Stopped):
            schedule.failure = schedule.failure or error
        schedule.tasks.remove(self)
        following = schedule.drawn()
        if following is None:
            schedule.done.set()
        else:
            following.go.release()
        return True


def task() -> Task:
    here = threading.current_thread()
    assert isinstance(here, Task)
    return here


def extent(x: Tensor) -> tuple[int, int]:
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + reach * x.element_size()
