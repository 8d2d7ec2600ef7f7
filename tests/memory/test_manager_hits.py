"""A hit of the buffer manager: which cached buffer is handed out, and that nobody else holds it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.threads import switching_often
from torch import Tensor

from tilegrad.memory import AttentionBufferManager, BufferStateError, BufferType

Q, K, OUT = BufferType.QUERY, BufferType.KEY, BufferType.OUTPUT
CPU = torch.device("cpu")
SHAPE, NEAR = (2, 64, 8, 16), (2, 60, 8, 16)
NO_PRESSURE: dict[str, Any] = {"pressure": lambda _device: 0.0}


@pytest.fixture(params=[True, False], ids=["lightweight", "tracked"])
def manager(request: pytest.FixtureRequest) -> AttentionBufferManager:
    return AttentionBufferManager(lightweight=request.param, **NO_PRESSURE)


def pair(manager: AttentionBufferManager, *arguments: Any, **options: Any) -> None:
    manager.deallocate(manager.allocate(*arguments, **options), Q)


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
def test_wrong_arguments_raise_a_type_error(manager: AttentionBufferManager, wrong: Callable[..., object]) -> None:
    with pytest.raises(TypeError):
        wrong(manager)


def test_the_smallest_that_fits_and_of_two_alike_the_last(manager: AttentionBufferManager) -> None:
    k = 1024
    kept = [manager.allocate(Q, shape, torch.uint8) for shape in ((1300 * k,), (4, 256 * k), (2, 512 * k))]
    address = [tensor.data_ptr() for tensor in kept]
    while kept:
        manager.deallocate(kept.pop(0))
    tensor = manager.allocate(Q, (k, k), torch.uint8)
    assert tensor.data_ptr() == address[2]
    hits = manager.get_stats()["cache_hits"]
    pair(manager, Q, (1040 * k,), torch.uint8)  # 1300 / 1.25
    assert manager.get_stats()["cache_hits"] == hits + 1
    pair(manager, Q, (1039 * k,), torch.uint8)
    assert manager.get_stats()["cache_hits"] == hits + 1


def test_a_buffer_of_another_shape_or_dtype_and_a_stale_handle_with_a_gradient_are_hits(
    manager: AttentionBufferManager,
) -> None:
    pair(manager, Q, SHAPE)
    assert manager.allocate(Q, SHAPE, torch.int32).dtype is torch.int32
    assert manager.get_stats()["cache_hits"] == 1
    manager.clear_cache()

    stale = manager.allocate(Q, SHAPE)
    manager.deallocate(stale)
    stale.requires_grad_()
    assert not manager.allocate(Q, NEAR).requires_grad
    assert manager.get_stats()["cache_hits"] == 2
    del stale

    manager.clear_cache()
    pair(manager, Q, SHAPE)
    manager._cache._high_water = 0  # the slack of a buffer would lift it
    pair(manager, Q, NEAR)
    assert manager.get_stats()["cache_hits"] == 2


def test_threads_never_get_what_another_holds(manager: AttentionBufferManager) -> None:
    """Each thread writes its own number, frees some buffers while a view holds them, and looks whether the number stays."""
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


def test_a_free_list_that_names_a_buffer_too_many_or_too_few_is_no_matter(manager: AttentionBufferManager) -> None:
    """As an interrupted call leaves it: the pool says what is cached."""
    pair(manager, Q, SHAPE)
    ((slot, tensor),) = next(iter(manager._cache.pools.values())).free.items()
    address, hints = tensor.data_ptr(), slot.free_list.slots
    del tensor
    hints.clear()
    again = manager.allocate(Q, SHAPE)
    assert again.data_ptr() == address
    hints.append(slot)
    assert manager.allocate(Q, SHAPE).data_ptr() != address
    manager.deallocate(again)
    assert hints == [slot]


def test_dropped_buffers_are_let_go_of_by_the_next_hit(manager: AttentionBufferManager) -> None:
    pair(manager, Q, SHAPE)
    manager.allocate(K, SHAPE)
    tensor = manager.allocate(Q, SHAPE)
    assert not manager._cache.dropped
    assert list(manager._cache.slots) == [id(tensor)]


def test_a_hash_that_raises_leaves_a_usable_manager(manager: AttentionBufferManager) -> None:
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
    stats = manager.get_stats()
    assert (stats["cache_hits"], stats["quarantined"], stats["bytes_in_use"]) == (2, 0, 0)


def test_references_stay_as_they_are_over_many_hits(manager: AttentionBufferManager) -> None:
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


def test_a_stale_handle_is_caught_by_a_tracked_manager_after_hits() -> None:
    manager = AttentionBufferManager(**NO_PRESSURE)
    stale = manager.allocate(Q, SHAPE)
    manager.deallocate(stale)
    fresh = manager.allocate(Q, NEAR)
    with pytest.raises(BufferStateError):
        manager.deallocate(stale)
    stale.fill_(2)
    fresh.fill_(1)
    assert not stale.numel() and bool((fresh == 1).all())
