"""A Gluon kernel in plain Python, thread by thread: for tests, as Gluon has no interpreter.

Each partition of a program is a thread, an mbarrier blocks it, a tensor is torch's. Products and copies out of shared memory
happen as late as they may, when they are waited for, so a slot that is handed back too early gives wrong results. What TMA
does not do (write from before the beginning) and what no barrier allows (more arrivals than it counts) are errors, and so is
a program that stands still.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITCallable

STANDSTILL_S = 20.0


class Block(Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def block(x: Tensor) -> Block:
    return x.as_subclass(Block)


class Pointer:
    """Elements of a tensor's memory, from its first one on."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.memory, self.at + n)

    @staticmethod
    def of(x: Tensor) -> Pointer:
        reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return Pointer(x.as_strided((reach,), (1,)))


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def shape(self) -> list[int]:
        return list(self.x.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def index(self, n: int) -> Shared:
        return Shared(self.x[n])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.x.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.x.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.x.narrow(dim, start, length))

    def store(self, x: Tensor) -> None:
        self.x.copy_(x)

    def load(self, layout: None) -> Block:
        return block(self.x.clone())


class Barrier:
    """An mbarrier: a phase ends with the last arrival and the last byte."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed, self.count, self.arrivals, self.bytes, self.phase = changed, 0, 0, 0, 0

    def arrive(self, arrivals: int, more_bytes: int) -> None:
        with self.changed:
            self.arrivals -= arrivals
            self.bytes += more_bytes
            assert self.arrivals >= 0, "more arrivals than the barrier counts"
            if self.arrivals == self.bytes == 0:
                self.phase, self.arrivals = self.phase ^ 1, self.count
            self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase != phase, STANDSTILL_S)
            assert done, "stands still: a barrier that nobody arrives at"


class Barriers:
    def __init__(self, count: int, changed: threading.Condition) -> None:
        self.shape, self.all = [count, 1], [Barrier(changed) for _ in range(count)]

    def index(self, n: int) -> Barrier:
        return self.all[n]


class Descriptor:
    """A tensor as TMA sees it."""

    layout = None

    def __init__(self, x: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> None:
        self.x, self.box, self.dtype = x.as_strided(sizes, strides), box, x.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(box) * x.element_size())

    def ranges(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a box at `at` lies in the tensor, and which part of the box that is."""
        lows = [max(a, 0) for a in at]
        ends = [max(low, min(a + n, size)) for low, a, n, size in zip(lows, at, self.box, self.x.shape, strict=True)]
        inside = tuple(slice(low, end) for low, end in zip(lows, ends, strict=True))
        part = tuple(slice(low - a, end - a) for low, end, a in zip(lows, ends, at, strict=True))
        return inside, part


class Partition(threading.local):
    """What a thread has on its way."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []


class Product:
    """a b + acc, on its way."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, torch.empty(0)

    def run(self) -> None:
        a = self.a.x if isinstance(self.a, Shared) else self.a
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        product = block(a.float() @ self.b.x.float())
        self.value = product + acc if self.use_acc else product


partition = Partition()


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    product = Product(a, b, acc, use_acc)
    partition.products.append(product)
    return product


def warpgroup_mma_wait(left: int, deps: tuple[Product, ...]) -> Any:
    while len(partition.products) > left:
        partition.products.pop(0).run()
    values = tuple(product.value for product in deps)
    return values[0] if len(values) == 1 else values


def _load_box(desc: Descriptor, at: list[int], ready: Barrier, to: Shared) -> None:
    inside, part = desc.ranges(at)
    to.x.zero_()
    to.x[part] = desc.x[inside]
    ready.arrive(0, -desc.block_type.nbytes)


def _store_box(desc: Descriptor, at: list[int], of: Shared) -> None:
    assert min(at) >= 0, f"TMA writes from {at}"

    def store() -> None:
        inside, part = desc.ranges(at)
        desc.x[inside] = of.x[part]

    partition.stores.append(store)


def _store_wait(left: int) -> None:
    while len(partition.stores) > left:
        partition.stores.pop(0)()


tma = SimpleNamespace(
    async_copy_global_to_shared=_load_box, async_copy_shared_to_global=_store_box, store_wait=_store_wait
)
mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: "mbarrier",
    init=lambda barrier, count: vars(barrier).update(count=count, arrivals=count),
    expect=lambda barrier, nbytes: barrier.arrive(1, nbytes),
    arrive=lambda barrier, count=1, pred=True: barrier.arrive(count, 0) if pred else None,
    wait=lambda barrier, phase: barrier.wait(phase),
)


def _plain(x: Any) -> Any:
    """A number where Gluon has a scalar."""
    return x.item() if isinstance(x, Tensor) and x.dim() == 0 and not x.is_floating_point() else x


def _both(function: Callable[..., Tensor], of_numbers: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def both(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return of_numbers(x, y)
        x, y = (a if isinstance(a, Tensor) else torch.tensor(a, dtype=b.dtype) for a, b in ((x, y), (y, x)))
        return block(function(x, y))

    return both


class Language(SimpleNamespace):
    """Stands for Gluon's module of the language, in one program."""

    float32, int32, int64, constexpr = torch.float32, torch.int32, torch.int64, int
    minimum, maximum = staticmethod(_both(torch.minimum, min)), staticmethod(_both(torch.maximum, max))
    exp2, log2, abs = staticmethod(torch.exp2), staticmethod(torch.log2), staticmethod(torch.abs)
    static_range, zeros_like = staticmethod(range), staticmethod(torch.zeros_like)
    BlockedLayout = SliceLayout = NVMMADistributedLayout = staticmethod(lambda *of: None)
    DotOperandLayout = SwizzledSharedLayout = staticmethod(lambda *of: None)
    math = SimpleNamespace(exp2=torch.exp2, log2=torch.log2)

    def __init__(self, here: int, programs: int, changed: threading.Condition) -> None:
        super().__init__(here=here, programs=programs, changed=changed)

    def program_id(self, axis: int) -> int:
        return self.here  # type: ignore[no-any-return]

    def num_programs(self, axis: int) -> int:
        return self.programs  # type: ignore[no-any-return]

    def num_warps(self) -> int:
        return 4

    def to_tensor(self, x: Any) -> Any:
        return x

    def convert_layout(self, x: Any, layout: None) -> Any:
        return x

    def multiple_of(self, x: Any, n: Any) -> Any:
        return x

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) else x

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return block(torch.where(condition, x, y)) if isinstance(condition, Tensor) else x if condition else y

    def max(self, x: Tensor, axis: int) -> Any:
        return _plain(x.amax(axis))

    def sum(self, x: Tensor, axis: int) -> Any:
        return _plain(x.sum(axis))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, layout: None) -> Block:
        return block(torch.zeros(shape, dtype=dtype))

    def full(self, shape: tuple[int, ...], value: Any, dtype: torch.dtype, layout: None) -> Block:
        return block(torch.full(shape, value, dtype=dtype))

    def arange(self, start: int, stop: int, layout: None) -> Block:
        return block(torch.arange(start, stop, dtype=torch.int32))

    def load(self, at: Pointer, mask: Any = None, other: Any = None) -> Any:
        if mask is None:
            return _plain(at.memory[at.at])
        return block(torch.where(mask, at.memory[torch.where(mask, at.at, 0)], other))

    def store(self, at: Pointer, value: Tensor, mask: Tensor) -> None:
        where, mask, value = torch.broadcast_tensors(at.at, mask, value)
        at.memory[where[mask].long()] = value[mask]

    def atomic_add(self, at: Pointer, n: int) -> int:
        with self.changed:
            old = int(at.memory[at.at])
            at.memory[at.at] += n
            return old

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        return Barriers(shape[0], self.changed) if layout == "mbarrier" else Shared(torch.empty(shape, dtype=dtype))

    def warp_specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            function(*arguments)
            assert not partition.products and not partition.stores, "ends with work on its way"

        with ThreadPoolExecutor(len(partitions)) as pool:
            for done in as_completed([pool.submit(run, *each) for each in partitions]):
                done.result()


@contextmanager
def in_python(*modules: ModuleType) -> Iterator[Callable[..., None]]:
    """launch(kernel, grid, arguments), with the device functions of `modules` as plain ones. Programs run one by one."""
    kept = [(module, name, value) for module in modules for name, value in vars(module).items()]
    changed = threading.Condition()
    try:
        for module, name, value in kept:
            if isinstance(value, JITCallable):
                setattr(module, name, value.fn)
            elif type(value).__name__ == "constexpr":
                setattr(module, name, value.value)
            elif name in ("tma", "mbarrier", "warpgroup_mma", "warpgroup_mma_wait"):
                setattr(module, name, globals()[name])
            elif name == "fence_async_shared":
                setattr(module, name, lambda: None)

        def launch(kernel: Any, grid: int, arguments: tuple[Any, ...]) -> None:
            for here in range(grid):
                for module in modules:
                    for name in {"gl", "tl"} & vars(module).keys():
                        setattr(module, name, Language(here, grid, changed))
                kernel.fn(*map(_argument, arguments))

        yield launch
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def _argument(x: Any) -> Any:
    if hasattr(x, "block_shape"):
        return Descriptor(x.base, list(x.shape), list(x.strides), list(x.block_shape))
    return Pointer.of(x) if isinstance(x, Tensor) else x
