"""A Gluon kernel in plain Python, thread by thread: for tests, as Gluon has no interpreter.

Every partition of every program is a thread and a tensor is torch's. One thread runs at a time; at each barrier, atomic and
copy the next is drawn from those that can go on, some of them slow, so a seed gives one order of all things, and a call
in which none can go on is known to hang at once.

What is asynchronous happens as badly as it may. Products read their operands when they are waited for. A load spoils its slot
at once and fills it when its barrier is waited for. A store or addition to memory reads its slot when that is waited for, and
memory has it only when the thread waits for that too, or at the end. So a slot that is handed over too early, or not
waited for, gives wrong results.

Errors are: a write by TMA from before the beginning, an address outside its tensor, more arrivals than a barrier counts, a
tensor core or TMA that reads what no fence followed, work on its way at the end. Integers divide as the device's do, towards 0.

Not here: layouts and registers, threads of a partition among themselves, the order of ordinary loads and stores of memory.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITCallable

SLOW = 0.02  # how often a slow thread runs, beside others


class Number(int):
    """An integer of the device."""

    @property
    def value(self) -> Number:
        return self

    def __floordiv__(self, other: Any) -> Any:
        return _quotient(self, other) if isinstance(other, int) else NotImplemented

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotient(other, self)

    def __mod__(self, other: Any) -> Any:
        return Number(int(self) - int(_quotient(self, other)) * int(other))

    def __rmod__(self, other: Any) -> Any:
        return Number(other) % self


def _quotient(x: int, y: int) -> Number:
    size = abs(int(x)) // abs(int(y))
    return Number(size if (x < 0) == (y < 0) else -size)


def _stays_a_number(name: str) -> Callable[..., Any]:
    def method(self: Number, *other: Any) -> Any:
        result = getattr(int, name)(self, *other)
        return Number(result) if isinstance(result, int) else result

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "lshift", "rshift", "neg"):
    setattr(Number, f"__{_name}__", _stays_a_number(f"__{_name}__"))


class Block(Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def block(x: Tensor) -> Block:
    return x.as_subclass(Block)


class Pointer:
    """Elements of a tensor's memory, from its first one on."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.memory, self.at + n)

    @staticmethod
    def of(x: Tensor) -> Pointer:
        reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return Pointer(x.as_strided((reach,), (1,)))

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(where, mask) as tensors; an address outside is an error."""
        where, inside = torch.broadcast_tensors(torch.as_tensor(self.at).long(), torch.as_tensor(mask))
        taken = where[inside]
        assert not taken.numel() or 0 <= int(taken.min()) <= int(taken.max()) < len(self.memory), "address outside"
        return where, inside


class Schedule:
    """Threads of which one runs."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        self.done = threading.Event()
        self.atomics = 0  # that changed something
        self.writes: list[tuple[Task, Callable[[], object]]] = []  # read from shared memory, not yet in memory
        self.barriers: list[Barrier] = []

    def drawn(self) -> Task | None:
        if self.failure:
            return self.tasks[0] if self.tasks else None
        ready = [task for task in self.tasks if task.ready()]
        if not ready and self.tasks:
            self.failure = AssertionError("stands still: every thread waits for a barrier or a counter")
            return self.tasks[0]
        return self.dice.choices(ready, [task.weight for task in ready])[0] if ready else None

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Others may run; back when `ready` and drawn."""
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
        """A thread's writes in memory."""
        mine = [write for owner, write in self.writes if owner is of]
        self.writes = [each for each in self.writes if each[0] is not of]
        self.dice.shuffle(mine)
        for write in mine:
            write()

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        for here, program in enumerate(programs):
            Task(self, Program(here, len(programs)), program)
        first = self.drawn()
        assert first is not None
        first.go.release()
        self.done.wait()
        if self.failure:
            raise self.failure
        assert not any(barrier.loads for barrier in self.barriers), "ends with loads on their way"
        self.dice.shuffle(self.writes)
        for _, write in self.writes:
            write()


class Stopped(BaseException):
    """Another thread failed."""


class Program:
    def __init__(self, here: int, programs: int) -> None:
        self.here, self.programs = Number(here), Number(programs)
        self.unfenced: set[tuple[int, int, Task]] = set()  # addresses that a thread wrote and no fence followed

    def check_fenced(self, x: Tensor) -> None:
        begin, end = _extent(x)
        assert not any(a < end and begin < b for a, b, _ in self.unfenced), "reads what no fence followed"


class Task(threading.Thread):
    """A partition of a program."""

    def __init__(self, schedule: Schedule, program: Program, function: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.schedule, self.program, self.function = schedule, program, function
        self.go, self.ready = threading.Semaphore(0), lambda: True
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
        """The end, whatever it is: an error is raised again by the thread of the test."""
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


def _extent(x: Tensor) -> tuple[int, int]:
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + reach * x.element_size()


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

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
        return Shared(self.x.view(-1).view(dtype)[: math.prod(shape)].view(shape))

    def store(self, x: Tensor) -> None:
        assert list(x.shape) == list(self.x.shape)
        self.x.copy_(x)
        here = task()
        here.program.unfenced.add((*_extent(self.x), here))

    def load(self, layout: None) -> Block:
        return block(self.x.clone())


def fence_async_shared() -> None:
    here = task()
    here.program.unfenced = {each for each in here.program.unfenced if each[2] is not here}


class Barrier:
    """An mbarrier: a phase ends with the last arrival and the last byte."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.count, self.arrivals, self.bytes, self.phase = schedule, 0, 0, 0, 0
        self.loads: list[tuple[int, Callable[[], None]]] = []  # on their way: bytes, what fills the slot
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
            coming = sum(size for size, _ in self.loads)
            return self.phase != phase or (self.arrivals == 0 and self.bytes == coming)

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


class Descriptor:
    """A tensor as TMA sees it: addresses are taken modulo 2⁶⁴."""

    layout = None

    def __init__(self, x: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> None:
        self.x, self.sizes, self.strides, self.dtype = x, sizes, strides, x.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(box) * x.element_size(), shape=box)

    def part(self, at: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """What of the tensor lies in a box at `at`, and which part of the box that is."""
        box, size = self.block_type.shape, self.x.element_size()
        assert at[-1] * size % 16 == 0, "TMA begins at multiples of 16 bytes"
        lows = [max(int(a), 0) for a in at]
        ends = [max(low, min(a + n, most)) for low, a, n, most in zip(lows, at, box, self.sizes, strict=True)]
        counts = [end - low for low, end in zip(lows, ends, strict=True)]
        inside = tuple(slice(low - a, end - a) for low, end, a in zip(lows, ends, at, strict=True))
        if 0 in counts:
            return self.x.new_empty(counts), inside
        offset = size * sum(low * int(stride) for low, stride in zip(lows, self.strides, strict=True)) % 2**64 // size
        strides = [int(stride) if n > 1 else 0 for n, stride in zip(counts, self.strides, strict=True)]
        return self.x.as_strided(counts, strides, self.x.storage_offset() + offset), inside


class Product:
    """a b + acc, on its way."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Block | None = None

    @property
    def value(self) -> Block:
        assert self.result is not None, "reads a product that was not waited for"
        return self.result

    def run(self) -> None:
        a = self.a.x if isinstance(self.a, Shared) else self.a
        product = block(a.float() @ self.b.x.float())
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.result = block(product + acc) if self.use_acc else product


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    here = task()
    for operand in (a, b):
        if isinstance(operand, Shared):
            here.program.check_fenced(operand.x)
    here.products.append(Product(a, b, acc, use_acc))
    return here.products[-1]


def warpgroup_mma_wait(left: int, deps: tuple[Product, ...]) -> Any:
    here = task()
    here.schedule.pause()
    while len(here.products) > left:
        here.products.pop(0).run()
    values = tuple(product.value for product in deps)
    return values[0] if len(values) == 1 else values


def _load_box(desc: Descriptor, at: Sequence[int], ready: Barrier, to: Shared) -> None:
    def fill() -> None:
        inside, part = desc.part(at)
        to.x.zero_()
        to.x[part] = inside

    to.x.fill_(math.nan)
    ready.loads.append((desc.block_type.nbytes, fill))
    ready.schedule.pause()


def _send_box(desc: Descriptor, at: Sequence[int], of: Shared, add: bool) -> None:
    assert min(at) >= 0, f"TMA writes from {at}"
    here = task()
    here.program.check_fenced(of.x)

    def read() -> Callable[[], object]:
        inside, part = desc.part(at)
        box = of.x[part].clone()
        return functools.partial(inside.add_ if add else inside.copy_, box)

    here.stores.append(read)
    here.schedule.pause()


def _store_wait(left: int) -> None:
    here = task()
    here.schedule.pause()
    while len(here.stores) > left:
        here.schedule.writes.append((here, here.stores.pop(0)()))


def tma_reduce_add(desc: Descriptor, at: Sequence[int], of: Shared) -> None:
    _send_box(desc, at, of, add=True)


tma = SimpleNamespace(
    async_copy_global_to_shared=_load_box,
    async_copy_shared_to_global=lambda desc, at, of: _send_box(desc, at, of, add=False),
    store_wait=_store_wait,
)
mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: "mbarrier",
    init=lambda barrier, count: vars(barrier).update(count=count, arrivals=count),
    expect=lambda barrier, nbytes: barrier.arrive(1, nbytes),
    arrive=lambda barrier, count=1, pred=True: barrier.arrive(count) if pred else None,
    wait=lambda barrier, phase: barrier.wait(phase),
)


def _plain(x: Any) -> Any:
    """A number where Gluon has a scalar."""
    return Number(x.item()) if x.dim() == 0 and not x.is_floating_point() else block(x)


def _both(function: Callable[..., Tensor], of_numbers: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def both(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return of_numbers(x, y)
        x, y = (a if isinstance(a, Tensor) else torch.tensor(a, dtype=b.dtype) for a, b in ((x, y), (y, x)))
        return block(function(x, y))

    return both


def _no_layout(*of: Any, **more: Any) -> None:
    return None


class Language(SimpleNamespace):
    """Stands for Gluon's and Triton's modules of the language."""

    float32, int32, int64, constexpr = torch.float32, torch.int32, torch.int64, int
    minimum, maximum = staticmethod(_both(torch.minimum, min)), staticmethod(_both(torch.maximum, max))
    exp2, log2, abs = staticmethod(torch.exp2), staticmethod(torch.log2), staticmethod(torch.abs)
    static_range, zeros_like = staticmethod(range), staticmethod(torch.zeros_like)
    BlockedLayout = SliceLayout = NVMMADistributedLayout = staticmethod(_no_layout)
    DotOperandLayout = SwizzledSharedLayout = SharedLinearLayout = staticmethod(_no_layout)
    NVMMASharedLayout = SimpleNamespace(get_default_for=_no_layout)
    math = SimpleNamespace(exp2=torch.exp2, log2=torch.log2)

    def program_id(self, axis: int) -> int:
        return task().program.here

    def num_programs(self, axis: int) -> int:
        return task().program.programs

    def num_warps(self) -> int:
        return 4

    def to_tensor(self, x: Any) -> Any:
        return x

    def convert_layout(self, x: Any, layout: None) -> Any:
        return x

    def multiple_of(self, x: Any, n: Any) -> Any:
        return x

    def static_assert(self, condition: bool) -> None:
        assert condition

    def thread_barrier(self) -> None:
        pass

    def cdiv(self, x: Any, y: Any) -> Any:
        return (x + y - 1) // y

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) else x

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return block(torch.where(condition, x, y)) if isinstance(condition, Tensor) else x if condition else y

    def max(self, x: Tensor, axis: int) -> Any:
        return _plain(x.amax(axis))

    def sum(self, x: Tensor, axis: int) -> Any:
        return _plain(x.sum(axis))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: None = None) -> Block:
        return block(torch.zeros(*shape, dtype=dtype))

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype, layout: None = None) -> Block:
        return block(torch.full(tuple(shape), value, dtype=dtype))

    def arange(self, start: int, stop: int, layout: None = None) -> Block:
        return block(torch.arange(start, stop, dtype=torch.int32))

    def load(self, at: Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Any:
        where, inside = at.places(mask)
        if not len(at.memory):
            return block(torch.full(where.shape, other, dtype=at.memory.dtype))
        return _plain(torch.where(inside, at.memory[torch.where(inside, where, 0)], other))

    def store(self, at: Pointer, value: Any, mask: Any = True) -> None:
        where, inside = at.places(mask)
        at.memory[where[inside]] = torch.as_tensor(value).expand(where.shape)[inside].to(at.memory.dtype)

    def atomic_add(self, at: Pointer, n: Any, sem: str = "") -> Any:
        """Where n is 0, a thread that looks again comes back when there was another atomic."""
        here, schedule = task(), task().schedule
        looks = isinstance(n, int) and n == 0
        schedule.pause(lambda: not looks or schedule.atomics != here.seen)
        where, _ = at.places(True)
        old = _plain(at.memory[where])
        if looks:
            here.seen = schedule.atomics
        else:
            more = torch.as_tensor(n, dtype=at.memory.dtype).expand(where.shape)
            at.memory.index_put_((where,), more, accumulate=True)
            schedule.atomics += 1
        return old

    def inline_asm_elementwise(self, asm: str, *of: Any, **more: Any) -> None:
        if asm.startswith("cp.async.bulk.wait_group 0;"):
            _store_wait(0)
            task().schedule.land(task())
        else:
            assert asm.startswith("fence.proxy.async.global;"), asm

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "mbarrier":
            return Barriers(shape[0], task().schedule)
        return Shared(torch.full(shape, math.nan if dtype.is_floating_point else 2**31 - 1, dtype=dtype))

    def warp_specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        here = task()
        started = [
            Task(here.schedule, here.program, lambda function=function, of=of: function(*of))  # type: ignore[misc]
            for function, of in partitions
        ]
        here.schedule.pause(lambda: not any(each in here.schedule.tasks for each in started))


REPLACED = ("tma", "mbarrier", "warpgroup_mma", "warpgroup_mma_wait", "fence_async_shared", "tma_reduce_add")


@contextmanager
def in_python(*modules: ModuleType, seed: int = 0) -> Iterator[Callable[..., None]]:
    """launch(kernel, grid, arguments), with the device functions of `modules` as plain ones."""
    kept = [(module, name, value) for module in modules for name, value in vars(module).items()]
    try:
        for module, name, value in kept:
            if isinstance(value, JITCallable):
                setattr(module, name, value.fn)
            elif type(value).__name__ == "constexpr":
                setattr(module, name, Number(value.value) if isinstance(value.value, int) else value.value)
            elif name in REPLACED:
                setattr(module, name, globals()[name])
            elif name in ("gl", "tl"):
                setattr(module, name, Language())

        def launch(kernel: Any, grid: int, arguments: tuple[Any, ...]) -> None:
            function, of = getattr(kernel, "fn", kernel), tuple(map(_argument, arguments))
            Schedule(seed).run([lambda: function(*of)] * grid)

        yield launch
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def _argument(x: Any) -> Any:
    if hasattr(x, "block_shape"):
        return Descriptor(x.base, list(x.shape), list(x.strides), [Number(n) for n in x.block_shape])
    if isinstance(x, int) and not isinstance(x, bool):
        return Number(x)
    return Pointer.of(x) if isinstance(x, Tensor) else x
