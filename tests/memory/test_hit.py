"""A hit in C++ (memory/managed/hit.cpp): which calls it answers, and that it leaves the manager's state as Python would."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.threads import switching_often
from torch import Tensor

from tilegrad.memory import AttentionBufferManager, BufferStateError, BufferType
from tilegrad.memory.managed import hit
from tilegrad.memory.managed.slot import Slot

Q, K, OUT = BufferType.QUERY, BufferType.KEY, BufferType.OUTPUT
CPU = torch.device("cpu")
SHAPE, NEAR = (2, 64, 8, 16), (2, 60, 8, 16)
NO_PRESSURE: dict[str, Any] = {"pressure": lambda _device: 0.0}

pytestmark = pytest.mark.skipif(isinstance(hit.load(), str), reason=f"C++ for the manager's hits {hit.load()}")


@pytest.fixture
def in_python() -> Iterator[list[str]]:
    """The names of the calls that reached Python."""
    module = hit.load()
    assert not isinstance(module, str)
    calls: list[str] = []

    def seen(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return hit.python_methods[name](*arguments, **options)

        return call

    module.fall_back(seen("allocate"), seen("deallocate"))
    yield calls
    module.fall_back(*hit.python_methods.values())


@pytest.fixture(params=[True, False], ids=["lightweight", "tracked"])
def manager(request: pytest.FixtureRequest) -> AttentionBufferManager:
    return AttentionBufferManager(lightweight=request.param, **NO_PRESSURE)


def pair(manager: AttentionBufferManager, *arguments: Any, **options: Any) -> None:
    manager.deallocate(manager.allocate(*arguments, **options), Q)


TAKEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "same shape": ((Q, SHAPE), {}),
    "another shape": ((Q, NEAR), {}),
    "all by name": ((), {"type": Q, "shape": SHAPE, "dtype": torch.float32, "device": None, "zero_init": None}),
    "in any order": ((Q,), {"zero_init": False, "shape": SHAPE}),
    "all by place": ((Q, SHAPE, torch.float32, torch.device("cpu"), False), {}),
}


@pytest.mark.parametrize("call", TAKEN)
def test_a_hit_does_not_call_python(manager: AttentionBufferManager, in_python: list[str], call: str) -> None:
    arguments, options = TAKEN[call]
    pair(manager, *arguments, **options)
    pair(manager, Q, SHAPE)
    pair(manager, Q, NEAR)
    before = manager.get_stats()["cache_hits"]
    in_python.clear()
    for _ in range(20):
        pair(manager, *arguments, **options)
    assert not in_python
    assert manager.get_stats()["cache_hits"] == before + 20
    manager.deallocate(tensor=manager.allocate(Q, SHAPE), type=None)
    assert not in_python


def test_a_hit_below_the_limit_of_bytes_does_not_call_python(in_python: list[str]) -> None:
    nbytes = 4 * 2 * 64 * 8 * 16
    for limit, calls in ((nbytes, []), (nbytes - 1, ["allocate", "deallocate"] * 5)):
        manager = AttentionBufferManager(max_bytes=limit, **NO_PRESSURE)
        pair(manager, Q, SHAPE)
        in_python.clear()
        for _ in range(5):
            pair(manager, Q, SHAPE)
        assert in_python == calls
        assert manager.get_stats()["bytes_cached"] == (0 if calls else nbytes)


def freed_with_a_view(manager: AttentionBufferManager) -> None:
    tensor = manager.allocate(Q, SHAPE)
    view = tensor[0]
    manager.deallocate(tensor)
    assert view.data_ptr() == tensor.data_ptr()


def taken_in_a_scope(manager: AttentionBufferManager) -> None:
    with manager.scope("layer"):
        manager.allocate(Q, SHAPE)


def taken_under_another_device(manager: AttentionBufferManager) -> None:
    with torch.device("meta"):
        assert manager.allocate(Q, SHAPE).is_meta


NO_HITS: dict[str, Callable[[AttentionBufferManager], object]] = {
    "a miss": lambda m: m.allocate(K, SHAPE),
    "zeros": lambda m: m.allocate(Q, SHAPE, zero_init=True),
    "zeros of its type": lambda m: m.allocate(OUT, SHAPE),
    "a list": lambda m: m.allocate(Q, list(SHAPE)),
    "another dtype": lambda m: m.allocate(Q, SHAPE, torch.int32),
    "a type by its value": lambda m: m.deallocate(m.allocate(Q, SHAPE), "query"),  # type: ignore[arg-type]
    "a view": freed_with_a_view,
    "a default device": taken_under_another_device,
}


@pytest.mark.parametrize("call", NO_HITS)
def test_a_call_that_is_not_a_plain_hit_is_answered_by_python(
    manager: AttentionBufferManager, in_python: list[str], call: str
) -> None:
    pair(manager, Q, SHAPE)
    manager.deallocate(manager.allocate(OUT, SHAPE))
    in_python.clear()
    NO_HITS[call](manager)
    assert len(in_python) == 1


def test_hits_in_a_scope_with_debug_or_with_profiling_call_python(in_python: list[str]) -> None:
    tracked = AttentionBufferManager(**NO_PRESSURE)
    pair(tracked, Q, SHAPE)
    in_python.clear()
    taken_in_a_scope(tracked)
    assert in_python == ["allocate"] and tracked.get_stats()["per_scope"]["layer"]["cache_hits"] == 1
    for manager in (
        AttentionBufferManager(debug=True, **NO_PRESSURE),
        AttentionBufferManager(enable_profiling=True, **NO_PRESSURE),
    ):
        in_python.clear()
        for _ in range(3):
            pair(manager, Q, SHAPE)
        assert in_python == ["allocate", "deallocate"] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: m.allocate(),
        lambda m: m.allocate(Q),
        lambda m: m.allocate(Q, SHAPE, type=Q),
        lambda m: m.allocate(Q, SHAPE, colour=1),
        lambda m: m.allocate(Q, SHAPE, None, None, None, None),
        lambda m: m.deallocate(),
        lambda m: m.deallocate(torch.empty(1), Q, Q),
        lambda _m: AttentionBufferManager.allocate(),  # type: ignore[call-arg]
    ],
)
def test_wrong_calls_raise_the_same_errors_as_in_python(
    manager: AttentionBufferManager, wrong: Callable[..., object]
) -> None:
    with pytest.raises(TypeError):
        wrong(manager)
    for name, function in hit.python_methods.items():
        both = (inspect.signature(x).parameters for x in (getattr(AttentionBufferManager, name), function))
        assert len(set(map(tuple, both))) == 1
        assert getattr(AttentionBufferManager, name).__doc__ == function.__doc__
    assert AttentionBufferManager.allocate.__name__ == "allocate" and manager.deallocate.__doc__


def state(manager: AttentionBufferManager, numbers: dict[Slot, int]) -> dict[str, Any]:
    """The whole state of a manager. Slots are numbered in the order in which they were first seen."""
    cache = manager._cache

    def number(slot: Slot) -> int:
        return numbers.setdefault(slot, len(numbers))

    return manager.get_stats() | {
        "slots": sorted(
            (number(slot), slot.nbytes, slot.slack, slot.stamp, slot.scope)
            for slots in (cache.slots.values(), *(pool.free for pool in cache.pools.values()))
            for slot in slots
        ),
        "lists": {tuple(k): [number(slot) for slot in v.slots] for k, v in cache.free_lists.items() if v.slots},
        "pools": {key: [number(slot) for slot in pool.free] for key, pool in cache.pools.items()},
        "events": list(manager._events),
        "rest": (cache.clock, cache.most_held, cache._high_water),
    }


def random_calls(manager: AttentionBufferManager, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """The manager's state after each call: allocations, frees, views, stale handles, changed layouts, drops."""
    dice = random.Random(seed)
    held: list[Tensor] = []
    kept: list[object] = []
    numbers: dict[Slot, int] = {}
    for _ in range(steps):
        act = dice.random()
        if act < 0.5 or not held:
            shape = dice.choice(((0,), (64,), (68,), (72,), (8, 9), (9, 8), (2048,)))
            dtype = torch.float32 if dice.random() < 0.95 else torch.int16
            with manager.scope("layer" if dice.random() < 0.1 else ""):
                held.append(manager.allocate(dice.choice((Q, OUT)), shape, dtype, zero_init=False))
            assert held[-1].shape == shape and held[-1].dtype is dtype and held[-1].is_contiguous()
        else:
            tensor = held.pop(dice.randrange(len(held)))
            if act < 0.55:
                kept = [dice.choice((lambda t: t, lambda t: t.detach(), lambda t: t.untyped_storage()))(tensor)]
            elif act < 0.6:
                tensor.unsqueeze_(0) if dice.random() < 0.5 else tensor.resize_(2)
            if act < 0.97:
                manager.deallocate(tensor)
            if 0.6 < act < 0.65 and len(tensor.shape) == 2:
                tensor.t_()
            del tensor
        if dice.random() < 0.04:
            manager.end_iteration()
        if dice.random() < 0.1:
            kept.clear()
        yield state(manager, numbers)


@pytest.mark.parametrize("lightweight", [True, False])
@pytest.mark.parametrize("max_bytes", [None, 1 << 13])
def test_after_every_call_the_state_is_that_of_python(
    lightweight: bool, max_bytes: int | None, in_python: list[str]
) -> None:
    class InPython(AttentionBufferManager):
        allocate = hit.python_methods["allocate"]
        deallocate = hit.python_methods["deallocate"]

    calls = 0
    assert not isinstance(InPython.allocate, type(AttentionBufferManager.allocate))
    for seed in range(3):
        options = {"lightweight": lightweight, "max_bytes": max_bytes} | NO_PRESSURE
        in_cpp, reference = AttentionBufferManager(**options), InPython(**options)
        for got, want in zip(random_calls(in_cpp, seed, 100), random_calls(reference, seed, 100), strict=True):
            assert got == want
            calls += 1
    assert len(in_python) < 0.65 * calls


def test_the_smallest_buffer_that_fits_is_taken_and_the_newest_of_equal_ones(
    manager: AttentionBufferManager, in_python: list[str]
) -> None:
    k = 1024
    for shape in ((k, k), (1040 * k,), (1039 * k,)):
        manager._cache.free_list(Q, shape, torch.uint8, CPU)  # there is one from the second call with a shape
    kept = [manager.allocate(Q, shape, torch.uint8) for shape in ((1300 * k,), (4, 256 * k), (2, 512 * k))]
    address = [tensor.data_ptr() for tensor in kept]
    while kept:
        manager.deallocate(kept.pop(0))
    in_python.clear()
    tensor = manager.allocate(Q, (k, k), torch.uint8)
    assert tensor.data_ptr() == address[2]
    pair(manager, Q, (1040 * k,), torch.uint8)  # 1300 / 1.25
    assert not in_python
    pair(manager, Q, (1039 * k,), torch.uint8)
    assert in_python == ["allocate"]


def test_another_shape_is_a_hit_where_only_sizes_change(manager: AttentionBufferManager, in_python: list[str]) -> None:
    for shape, dtype in ((NEAR, torch.float32), (SHAPE, torch.int32)):
        manager._cache.free_list(Q, shape, dtype, CPU)
    pair(manager, Q, SHAPE)
    in_python.clear()
    tensor = manager.allocate(Q, SHAPE, torch.int32)
    assert in_python == ["allocate"] and tensor.dtype is torch.int32
    manager.clear_cache()

    stale = manager.allocate(Q, SHAPE)
    manager.deallocate(stale)
    stale.requires_grad_()
    in_python.clear()
    assert not manager.allocate(Q, NEAR).requires_grad and in_python == ["allocate"]
    del stale

    manager.clear_cache()
    pair(manager, Q, SHAPE)
    manager._cache._high_water = 0  # the unused bytes of a buffer would raise it
    in_python.clear()
    pair(manager, Q, NEAR)
    assert in_python == ["allocate"] and manager.get_stats()["cache_hits"] == 2


def test_a_thread_never_gets_a_buffer_that_another_thread_holds(
    manager: AttentionBufferManager, in_python: list[str]
) -> None:
    """Each thread writes its own number, frees some buffers while a view holds them, and checks that the number stays."""
    errors: list[tuple[int, int]] = []

    def work(number: int) -> None:
        views: list[Tensor] = []
        for step in range(300):
            tensor = manager.allocate(Q, (64,), torch.int64, zero_init=False)
            tensor.fill_(number)
            if step % 10 == 0:
                views = [*views[-2:], tensor.detach()]
            if not all(bool((x == number).all()) for x in (tensor, *views)):
                errors.append((number, step))
            manager.deallocate(tensor, Q)
            del tensor

    switching_often(work, 4)
    assert not errors
    stats = manager.get_stats()
    assert (stats["bytes_in_use"], stats["quarantined"], stats["cache_hits"] + stats["cache_misses"]) == (0, 120, 1200)
    assert len(in_python) < 600


def test_a_free_list_may_name_a_buffer_too_many_or_too_few(
    manager: AttentionBufferManager, in_python: list[str]
) -> None:
    """An interrupted call leaves such a list: the pool alone says what is cached."""
    pair(manager, Q, SHAPE)
    ((slot, tensor),) = next(iter(manager._cache.pools.values())).free.items()
    address, hints = tensor.data_ptr(), slot.free_list.slots
    del tensor
    hints.clear()
    in_python.clear()
    again = manager.allocate(Q, SHAPE)
    assert again.data_ptr() == address and not in_python
    hints.append(slot)
    assert manager.allocate(Q, SHAPE).data_ptr() != address and in_python == ["allocate"]
    manager.deallocate(again)
    assert hints == [slot]


def test_the_next_hit_forgets_dropped_buffers(manager: AttentionBufferManager, in_python: list[str]) -> None:
    pair(manager, Q, SHAPE)
    manager.allocate(K, SHAPE)
    in_python.clear()
    tensor = manager.allocate(Q, SHAPE)
    assert in_python == ["allocate"] and not manager._cache.dropped
    assert list(manager._cache.slots) == [id(tensor)]


def test_the_error_of_a_shape_that_cannot_be_hashed_reaches_the_caller(manager: AttentionBufferManager) -> None:
    class Bad(tuple[int, ...]):
        def __hash__(self) -> int:
            raise OverflowError("no hash")

    pair(manager, Q, SHAPE)
    with pytest.raises(OverflowError, match="no hash"):
        manager.allocate(Q, Bad(SHAPE))
    pair(manager, Q, SHAPE)
    assert manager.get_stats()["cache_hits"] == 1


def test_an_interrupt_in_a_hash_is_not_lost(manager: AttentionBufferManager) -> None:
    interrupts = [KeyboardInterrupt]

    class Once(tuple[int, ...]):
        def __hash__(self) -> int:
            if interrupts:
                raise interrupts.pop()
            return super().__hash__()

    pair(manager, Q, SHAPE)
    with pytest.raises(KeyboardInterrupt):
        manager.allocate(Q, Once(SHAPE))


def test_hits_are_called_inside_torch_compile(manager: AttentionBufferManager) -> None:
    pair(manager, Q, SHAPE)

    def twice(x: torch.Tensor) -> torch.Tensor:
        buffer = manager.allocate(Q, SHAPE, torch.float32, zero_init=False)
        buffer.copy_(x * 2)
        y = buffer + 1
        manager.deallocate(buffer)
        return y

    torch.compiler.reset()
    compiled = torch.compile(twice, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(SHAPE)), torch.full(SHAPE, 3.0))


def test_many_hits_leak_no_references(manager: AttentionBufferManager) -> None:
    def many() -> None:
        for _ in range(600):
            pair(manager, Q, SHAPE)
            pair(manager, Q, NEAR)
        manager._events.clear()

    many()
    many()
    cache = manager._cache
    (slot,) = next(iter(cache.pools.values())).free
    lists = list(set(cache.free_lists.values()))
    shared: list[Any] = [Q, SHAPE, NEAR, torch.float32, manager, manager._scope, cache, slot, slot.pool]
    shared += [slot.scope, slot.handle, *lists, *(x for found in lists for x in (found.took, found.gave, found.slots))]
    before, blocks = [sys.getrefcount(x) for x in shared], sys.getallocatedblocks()
    many()
    assert abs(sys.getallocatedblocks() - blocks) < 100
    assert [sys.getrefcount(x) for x in shared] == before


def test_a_tracked_manager_catches_a_stale_handle_after_hits() -> None:
    manager = AttentionBufferManager(**NO_PRESSURE)
    stale = manager.allocate(Q, SHAPE)
    manager.deallocate(stale)
    fresh = manager.allocate(Q, NEAR)
    with pytest.raises(BufferStateError):
        manager.deallocate(stale)
    stale.fill_(2)
    fresh.fill_(1)
    assert not stale.numel() and bool((fresh == 1).all())
