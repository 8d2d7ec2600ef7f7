"""AttentionBufferManager: an interrupt at any bytecode of any call leaves its records true, and so does fork."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from tilegrad.memory import AttentionBufferManager, BufferConfig, BufferType
from tilegrad.memory.managed import slab
from tilegrad.memory.managed.slot import Slot
from tilegrad.memory.managed.strategies import NumaAware, Strategies

pytestmark = pytest.mark.usefixtures("hits")
Q, K, SCORES, MASK, CACHE = (BufferType(name) for name in ("query", "key", "scores", "mask", "cache"))
ONE_OF_EACH: dict[BufferType, tuple[int, ...]] = {Q: (64,), SCORES: (64,), MASK: (1024,)}  # bucketed, direct, best-fit
NEAR = (60,)
BEST_FIT = BufferConfig(0.001, "high", "iteration", prefer_bucketed=False, zero_init=False)
OURS = os.path.join("tilegrad", "memory")
Act = Callable[[AttentionBufferManager, list[Tensor]], object]


class Interrupt:
    """Raises KeyboardInterrupt before the n-th bytecode that runs in the manager's files; `count` is how many ran."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Interrupt | None:
        if OURS not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self


def bytecodes(act: Callable[[], object], at: int = 0) -> int:
    """How many of the manager's bytecodes the call ran. It is interrupted before number `at`, if it reaches it."""
    interrupt, outer = Interrupt(at), sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12: settrace looks once whether any frame wants opcodes
    sys.settrace(interrupt)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(outer)
    return interrupt.count


def buffers(manager: AttentionBufferManager) -> tuple[list[Slot], list[Slot]]:
    """(in use, cached)"""
    cache = manager._cache
    return list(cache.slots.values()), [slot for pool in cache.pools.values() for slot in pool.free]


def check(manager: AttentionBufferManager, held: list[Tensor]) -> None:
    """All that must be true whenever no call is running and the caller holds these buffers."""
    cache = manager._cache
    stats = manager.get_stats()
    in_use, cached = buffers(manager)
    known = [t for t in held if id(t) in cache.slots]  # a buffer that was being freed may belong to the caller alone
    assert len(in_use) == len(known) and {id(t) for t in known} == set(cache.slots)
    assert stats["bytes_in_use"] == sum(slot.nbytes for slot in in_use)
    assert stats["bytes_cached"] == sum(slot.nbytes for slot in cached)
    assert stats["bytes_live"] == sum(slot.free_list.nbytes for slot in in_use)
    assert not set(in_use) & set(cached)
    for pool in cache.pools.values():
        assert len(pool.free) <= pool.limit + 1, "one more until the next call"
        for slot, tensor in pool.free.items():
            assert slot.handle is not None and slot.handle() is tensor and slot.pool is pool
    spans = sorted((slot.ptr, slot.ptr + slot.storage_bytes) for slot in in_use + cached if slot.storage_bytes)
    assert all(last <= first for (_, last), (first, _) in pairwise(spans)), "two buffers share bytes"
    assert sum(row["bytes_in_use"] for row in stats["per_scope"].values()) <= stats["bytes_live"]
    assert manager._open_scope() is None, "a scope that was left is open"
    freed = [t for t in held if any(t is tensor for pool in cache.pools.values() for tensor in pool.free.values())]
    taken = [block for strategy in (cache.strategies._bucketed, cache.strategies._fragment)
             for own in strategy._slabs.values() for region in own.regions for block in region.blocks]  # fmt: skip
    theirs = {id(slot.block) for slot in in_use + cached if slot.block.region is not None}
    assert {id(block) for block in taken} >= theirs, "a slab may cut a block that is in use"
    assert len(taken) <= len(theirs) + len(held) - len(known) - len(freed), "a block that nobody holds is kept"


def goes_on(manager: AttentionBufferManager, held: list[Tensor]) -> None:
    """Every buffer has one holder, other threads can use the manager, and in the end no byte is in use."""
    held[:] = [t for t in held if id(t) in manager._cache.slots]  # without those that were freed
    for number, tensor in enumerate(held):
        tensor.fill_(number)
    thread = threading.Thread(target=lambda: [manager.allocate(*each).fill_(-1) for each in ONE_OF_EACH.items()])
    thread.daemon = True
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "another thread waits for ever"
    fresh = [manager.allocate(type, shape, zero_init=False).fill_(-2) for type, shape in ONE_OF_EACH.items()]
    fresh += [manager.allocate(type, shape, zero_init=False).fill_(-2) for type, shape in ONE_OF_EACH.items()]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(held)), "a buffer has two owners"
    for tensor in fresh + held:
        manager.deallocate(tensor)
    held.clear()
    fresh.clear()
    del tensor
    manager.clear_cache()
    stats = manager.get_stats()
    assert (stats["bytes_in_use"], stats["bytes_reserved"]) == (0, 0)
    assert not manager._cache.slots


def frees_with_a_view(manager: AttentionBufferManager, held: list[Tensor]) -> None:
    view = held[0][:1]
    manager.deallocate(held[0])
    del view


def drops(manager: AttentionBufferManager, held: list[Tensor]) -> None:
    held.clear()
    manager.allocate(Q, NEAR)


def in_scopes(manager: AttentionBufferManager, _held: list[Tensor]) -> None:
    with manager.scope("outer"), manager.scope("inner"), manager.buffer(Q, NEAR):
        pass


def iterations(manager: AttentionBufferManager, _held: list[Tensor]) -> None:
    for _ in range(4):
        manager.deallocate(manager.allocate(Q, NEAR))
        manager.end_iteration()


def too_many(manager: AttentionBufferManager, held: list[Tensor]) -> None:
    held += [manager.allocate(SCORES, NEAR) for _ in range(6)]
    while held:
        manager.deallocate(held[-1])
        held.pop()


ACTS: dict[str, Act] = {
    "a hit": lambda m, _: m.allocate(Q, (64,)),
    "a hit of another shape": lambda m, _: m.allocate(Q, NEAR),
    "a hit of another dtype": lambda m, _: m.allocate(Q, (64,), torch.int32),
    "a hit with zeros": lambda m, _: m.allocate(Q, (64,), zero_init=True),
    "a bucketed miss": lambda m, _: m.allocate(K, NEAR),
    "a direct miss": lambda m, _: m.allocate(SCORES, (128,)),
    "a best-fit miss": lambda m, _: m.allocate(MASK, (4096,)),
    "a miss on a node": lambda m, _: m.allocate(CACHE, (17 << 20,), torch.uint8, zero_init=False),
    "a miss that evicts": lambda m, _: m.allocate(SCORES, (1 << 18,), zero_init=False),
    "deallocate": lambda m, held: m.deallocate(held[0], Q),
    "deallocate of a best-fit buffer": lambda m, held: m.deallocate(held[2]),
    "deallocate while a view holds it": frees_with_a_view,
    "a drop": drops,
    "clear": lambda m, _: m.clear_cache(),
    "preallocate": lambda m, _: m.preallocate_buffers(1, 8, 2, 4, types=(Q, SCORES)),
    "scopes": in_scopes,
    "iterations": iterations,
    "eviction": too_many,
    "stats": lambda m, _: m.get_stats(),
}
KINDS: dict[str, dict[str, Any]] = {
    "lightweight": {"lightweight": True},
    "tracked": {},
    "debug": {"debug": True, "enable_profiling": True},
    "bounded": {"max_bytes": 1 << 13},
    "pressed": {"pressure": lambda _device: 0.9},
}


def prepared(kind: str) -> tuple[AttentionBufferManager, list[Tensor]]:
    """A manager with one buffer of each strategy in use and two cached. A variable still names the last of them."""
    options: dict[str, Any] = {"pressure": lambda _device: 0.0, "custom_configs": {MASK: BEST_FIT}} | KINDS[kind]
    manager = AttentionBufferManager(strategies=Strategies(NumaAware(min_nodes=1)), **options)
    with manager.scope("before"):
        held, *freed = [[manager.allocate(*each) for each in ONE_OF_EACH.items()] for _ in range(3)]
    for tensors in freed:
        for tensor in tensors:
            manager.deallocate(tensor)
    return manager, held


def interrupt_at(name: str, kind: str, at: int) -> None:
    """Checks the manager after the interrupt, then uses it again."""
    manager, held = prepared(kind)
    bytecodes(lambda: ACTS[name](manager, held), at)
    try:
        check(manager, held)
        goes_on(manager, held)
    except (AssertionError, LookupError, RuntimeError) as error:
        raise AssertionError(f"{name}, {kind}, interrupted before bytecode {at}") from error


def length(name: str, kind: str) -> int:
    manager, held = prepared(kind)
    return bytecodes(lambda: ACTS[name](manager, held))


@pytest.fixture
def small_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The garbage collector is off too: the manager must recover from an interrupt without it."""
    gc.disable()
    monkeypatch.setattr(slab, "_LAZY_BYTES", 1 << 24)
    yield
    gc.enable()


@pytest.mark.usefixtures("small_regions")
def test_an_interrupt_at_any_bytecode_leaves_the_managers_records_true(hits: str) -> None:
    """Some bytecodes of every call; the slow set has all of them, and the other kinds of manager."""
    dice, count = random.Random(hits), 0
    for name in ACTS:
        number = length(name, "tracked")
        for at in dice.sample(range(1, number + 1), min(8, number)):
            interrupt_at(name, "tracked", at)
            count += 1
    assert count > 100


@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize("name", ["a hit", "deallocate"])
def test_an_interrupt_at_every_bytecode_of_a_hit_leaves_the_managers_records_true(name: str, hits: str) -> None:
    number = length(name, "tracked")
    assert number > 50 if hits == "Python" else number >= 0
    for at in range(1, number + 1):
        interrupt_at(name, "tracked", at)


@pytest.mark.slow
@pytest.mark.usefixtures("small_regions")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACTS)
def test_an_interrupt_at_every_bytecode_leaves_the_managers_records_true(name: str, kind: str, hits: str) -> None:
    number = length(name, kind)
    print(f"{name}, {kind}, {hits}: {number} interrupts")
    for at in range(1, number + 1):
        interrupt_at(name, kind, at)


def survive_signals(count: int) -> None:
    """Sends interrupts at random times into pairs of calls by the main thread."""
    manager = AttentionBufferManager(pressure=lambda _device: 0.0, custom_configs={MASK: BEST_FIT})
    dice, came = random.Random(0), 0
    outer = signal.signal(signal.SIGALRM, signal.default_int_handler)
    held: list[Tensor] = []
    try:
        while came < count:
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 2e-3))
                while True:
                    type, shape = dice.choice(list(ONE_OF_EACH.items()))
                    held.append(manager.allocate(type, shape))
                    if len(held) > 8:
                        manager.deallocate(held[-1])
                        held.pop()
                    if len(held) > 8 and dice.random() < 0.1:
                        manager.clear_cache()
            except KeyboardInterrupt:
                came += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            check(manager, held)
            held.clear()
            check(manager, held)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer)
    goes_on(manager, held)


def test_signals_at_random_times_leave_the_managers_records_true() -> None:
    survive_signals(500)


@pytest.mark.slow
def test_many_signals_at_random_times_leave_the_managers_records_true() -> None:
    survive_signals(40_000)


def test_the_next_call_finds_the_buffer_of_an_interrupted_call() -> None:
    """A buffer is cached and in no free list, as between two steps of `deallocate`. The next call hands it out."""
    manager = AttentionBufferManager(pressure=lambda _device: 0.0)
    tensor = manager.allocate(Q, (64,))
    address = tensor.data_ptr()
    manager.deallocate(tensor)
    manager._cache.free_list(Q, (64,), torch.float32, "cpu").slots.clear()
    assert manager.allocate(Q, (64,)).data_ptr() == address


def forked(manager: AttentionBufferManager) -> int:
    """The exit code of the child: 0 if it could allocate, free and clear within a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            for type, shape in ONE_OF_EACH.items():
                if not (manager.configs[type].prefer_pinned and torch.cuda.is_initialized()):  # no CUDA after fork
                    manager.deallocate(manager.allocate(type, (*shape, 2)).fill_(1))
            manager.clear_cache()
            manager.end_iteration()
            code = 0 if manager.get_stats()["bytes_cached"] == 0 else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_fork_has_a_usable_manager_whatever_another_thread_does(hits: str) -> None:
    manager = AttentionBufferManager(pressure=lambda _device: 0.0, custom_configs={MASK: BEST_FIT})
    end = threading.Event()

    def work() -> None:
        n = 0
        while not end.is_set():
            n += 1
            for type in ONE_OF_EACH:
                manager.deallocate(manager.allocate(type, (1024 + n % 64,)))
            manager.clear_cache()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork next to threads
            codes = [forked(manager) for _ in range(25 if hits == "Python" else 5)]
    finally:
        end.set()
        thread.join(20)
    assert not any(codes), codes
    check(manager, [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_fork_does_not_wait_for_a_thread_that_is_inside_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = AttentionBufferManager(pressure=lambda _device: 0.0)
    inside, leave, take = threading.Event(), threading.Event(), slab.BucketSlab.take

    def slowly(own: slab.BucketSlab, *arguments: Any) -> Any:
        inside.set()
        leave.wait(20)
        return take(own, *arguments)

    monkeypatch.setattr(slab.BucketSlab, "take", slowly)
    thread = threading.Thread(target=manager.allocate, args=(Q, (64,)), daemon=True)
    thread.start()
    assert inside.wait(20)
    monkeypatch.setattr(slab.BucketSlab, "take", take)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert forked(manager) == 0
    finally:
        leave.set()
        thread.join(20)
    assert manager.get_stats()["strategies"]["bucketed"] == 1


def test_managers_without_references_are_collected() -> None:
    manager = AttentionBufferManager()
    manager.deallocate(manager.allocate(Q, (64,)))
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
