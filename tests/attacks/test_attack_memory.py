"""Attacks on memory: random programs of many threads on one manager, plans compared with all possible plans, leaks."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.models import CONFIG, batch
from torch import Tensor

import tilegrad
from tilegrad import Engine
from tilegrad.memory import AttentionBufferManager, BufferStateError, BufferType
from tilegrad.memory.managed import slab
from tilegrad.memory.planned.plan import Request, plan
from tilegrad.memory.types import DEFAULT_CONFIGS
from tilegrad.training.generation import draw

TYPES = (BufferType.QUERY, BufferType.SCORES, BufferType.OUTPUT, BufferType.CACHE)
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.uint8)
BEST_FIT = replace(DEFAULT_CONFIGS[BufferType.SCORES], typical_size_mb=1e-4)  # best-fit above 210 bytes


class Program:
    """Random calls of one manager. Each buffer in use is filled with its own number, which no other caller may overwrite."""

    def __init__(self, manager: AttentionBufferManager, seed: int, name: int = 0) -> None:
        self.manager, self.dice, self.name = manager, random.Random(seed), name
        self.held: list[tuple[Tensor, int, BufferType]] = []
        self.stale: list[Tensor] = []
        self.written = 0

    def step(self) -> None:
        act = self.dice.random()
        if act < 0.45 or not self.held:
            self.take()
        elif act < 0.85:
            self.give()
        elif act < 0.89:
            self.held.pop(self.dice.randrange(len(self.held)))  # dropped without deallocate
        elif act < 0.92:
            self.free_again()
        elif act < 0.94:
            self.hold_a_view()
        elif act < 0.96:
            self.manager.end_iteration()
        elif act < 0.97:
            self.manager.clear_cache(self.dice.choice((None, *TYPES)))
        else:
            self.manager.get_stats()
        if len(self.held) > 12:
            self.give()

    def take(self) -> None:
        big = self.dice.random() < 0.03
        shape = tuple(self.dice.choice((0, 1, 3, 64, 100)) for _ in range(self.dice.randint(1, 2)))
        dtype, kind = self.dice.choice(DTYPES), self.dice.choice(TYPES)
        if big:
            shape, dtype = (self.dice.choice((1 << 18, 3 << 19)),), torch.uint8
        tensor = self.manager.allocate(kind, shape, dtype, zero_init=False)
        assert tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous()
        self.written = self.written % 60 + 1
        number = (
            self.name * 16 + self.written % 16
            if dtype is not torch.uint8
            else (self.name * 16 + self.written % 16) % 256
        )
        tensor.fill_(number)
        self.held.append((tensor, number, kind))

    def give(self) -> None:
        tensor, number, kind = self.held.pop(self.dice.randrange(len(self.held)))
        assert bool((tensor == number).all()), "someone wrote into a buffer in use"
        self.manager.deallocate(tensor, kind if self.dice.random() < 0.5 else None)
        if self.dice.random() < 0.1:
            self.stale = [tensor]

    def free_again(self) -> None:
        for tensor in self.stale:
            with pytest.raises(BufferStateError):
                self.manager.deallocate(tensor)
        self.stale = []

    def hold_a_view(self) -> None:
        tensor, number, kind = self.held.pop()
        if tensor.numel():
            view = tensor.view(-1)[:1]
            self.manager.deallocate(tensor, kind)
            again = self.manager.allocate(kind, tuple(tensor.shape), tensor.dtype)
            assert again.data_ptr() != view.data_ptr(), "a buffer that a view holds was handed out"
            self.held.append((again.fill_(number), number, kind))
            assert bool((view == number).all())

    def end(self) -> None:
        while self.held:
            self.give()
        self.stale = []


def check_at_rest(manager: AttentionBufferManager) -> None:
    gc.collect()
    stats = manager.get_stats()
    assert (stats["bytes_in_use"], stats["bytes_live"]) == (0, 0)
    slots = [slot for pool in manager._cache.pools.values() for slot in pool.free]
    assert stats["bytes_cached"] == sum(slot.nbytes for slot in slots) <= manager._cache.max_bytes
    spans = sorted((slot.ptr, slot.ptr + slot.storage_bytes) for slot in slots if slot.storage_bytes)
    assert all(last <= first for (_, last), (first, _) in pairwise(spans)), "two cached buffers overlap"
    manager.clear_cache()
    assert manager.get_stats()["bytes_reserved"] == manager._cache.strategies.idle_bytes()


def program(manager: AttentionBufferManager, seed: int, steps: int, name: int = 0) -> None:
    calls = Program(manager, seed, name)
    for _ in range(steps):
        calls.step()
    calls.end()


def regions(manager: AttentionBufferManager) -> tuple[int, int]:
    """The numbers of regions of the bucketed and the best-fit slabs."""
    strategies = manager._cache.strategies._by_name
    bucketed, best_fit = (strategies[name]._slabs.values() for name in ("bucketed", "fragment_aware"))  # type: ignore[attr-defined]
    return sum(len(slab.regions) for slab in bucketed), sum(len(slab.regions) for slab in best_fit)


def programs(seeds: range, steps: int = 60) -> tuple[int, int]:
    """The most regions of the two slabs at once. In every second program regions have 16 KiB, and scores are best-fit."""
    most = (0, 0)
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            if seed % 2:
                patch.setattr(slab, "_LAZY_BYTES", 1 << 14)
                patch.setattr(slab, "MIB", 1 << 12)
            found = one_program(seed, steps)
            most = max(most[0], found[0]), max(most[1], found[1])
    return most


def one_program(seed: int, steps: int) -> tuple[int, int]:
    dice = random.Random(-seed)
    pressed = dice.choice((0.0, 0.0, 0.9, 0.99))
    manager = AttentionBufferManager(
        lightweight=False,
        custom_configs={BufferType.SCORES: BEST_FIT} if seed % 2 else None,
        max_bytes=dice.choice((None, 0, 1 << 14, 1 << 22)),
        pressure=lambda _device, p=pressed: p,  # type: ignore[misc]
    )
    calls, most = Program(manager, seed), (0, 0)
    for _ in range(steps):
        calls.step()
        found = regions(manager)
        most = max(most[0], found[0]), max(most[1], found[1])
    calls.end()
    check_at_rest(manager)
    return most


@pytest.mark.usefixtures("hits")
def test_random_programs_find_no_fault_in_the_manager() -> None:
    assert min(programs(range(50, 62))) > 1


@pytest.mark.slow
def test_ten_thousand_random_programs_find_no_fault_in_the_manager(fresh_seed: int) -> None:
    assert min(programs(range(fresh_seed, fresh_seed + 10_000))) > 1


def by_threads(seeds: range, steps: int) -> None:
    """Run eight programs on one tracked manager at once, with a limit that evicts buffers."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for seed in seeds:
            manager = AttentionBufferManager(lightweight=False, max_bytes=1 << 16, pressure=lambda _device: 0.86)
            with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as threads:
                if seed % 2:
                    patch.setattr(slab, "_LAZY_BYTES", 1 << 14)
                done = [threads.submit(program, manager, 8 * seed + name, steps, name) for name in range(8)]
                for one in done:
                    one.result(120)
            check_at_rest(manager)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hits")
def test_eight_threads_may_share_one_manager() -> None:
    by_threads(range(2), 120)


@pytest.mark.slow
def test_eight_threads_may_share_one_manager_many_times(fresh_seed: int) -> None:
    by_threads(range(fresh_seed, fresh_seed + 200), 200)


def test_canary_a_program_sees_a_buffer_that_is_handed_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = AttentionBufferManager.deallocate

    def early(manager: AttentionBufferManager, tensor: Tensor, kind: BufferType | None = None) -> None:
        given(manager, tensor, kind)
        for pool in manager._cache.pools.values():
            for slot in list(pool.free)[:1]:
                pool.free[copy.copy(slot)] = pool.free[slot]

    monkeypatch.setattr(AttentionBufferManager, "deallocate", early)
    with pytest.raises((AssertionError, KeyError, BufferStateError)):
        programs(range(20))


def fewest_bytes(requests: list[Request]) -> int:
    """The smallest arena of all plans that place each request at the lowest free address, in every order."""
    best = sys.maxsize
    for order in itertools.permutations(requests):
        placed: list[tuple[int, Request]] = []
        for request in order:
            meets = sorted(
                (at, at + (other.nbytes + 63) // 64 * 64)
                for at, other in placed
                if any(a <= d and c <= b for a, b in request.live for c, d in other.live)
            )
            at = 0
            for first, last in meets:
                if at + request.nbytes <= first:
                    break
                at = max(at, last)
            placed.append((at, request))
        best = min(best, max(at + request.nbytes for at, request in placed))
    return best


def plans(seeds: range) -> None:
    """No arena is smaller than the smallest or more than a tenth larger, and at least 97% are the smallest."""
    exact = 0
    for seed in seeds:
        dice = random.Random(seed)
        requests = []
        for name in range(dice.randint(1, 6)):
            first = dice.randint(0, 6)
            requests.append(
                Request(str(name), dice.choice((64, 128, 192, 640, 1024)), ((first, first + dice.randint(0, 4)),))
            )
        arena, least = plan(requests).arena_bytes, fewest_bytes(requests)
        assert least <= arena <= 1.1 * least, (seed, arena, least)
        exact += arena == least
    assert exact >= 0.97 * len(seeds)


def test_plans_of_small_traces_are_within_a_tenth_of_the_smallest() -> None:
    plans(range(60))


@pytest.mark.slow
def test_plans_of_ten_thousand_small_traces_are_within_a_tenth_of_the_smallest(fresh_seed: int) -> None:
    plans(range(fresh_seed, fresh_seed + 10_000))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096


def attention_call() -> None:
    q, k, v = (torch.randn(1, 2, 48, 16, requires_grad=True) for _ in range(3))
    tilegrad.attention(q, k, v, causal=True).sum().backward()


def manager_call() -> Callable[[], None]:
    manager = AttentionBufferManager(lightweight=False, pressure=lambda _device: 0.0)
    calls = Program(manager, 0)

    def call() -> None:
        for _ in range(20):
            calls.step()
        calls.end()

    return call


def engine_call() -> Callable[[], None]:
    engine = Engine(CONFIG, 2, 8)
    tokens, targets = batch(CONFIG, 2, 8)

    def call() -> None:
        engine.step(tokens, targets, learning_rate=1e-4)

    return call


def generate_call() -> Callable[[], None]:
    engine = Engine(CONFIG, 1, 8)

    def call() -> None:
        list(draw(CONFIG, engine.params, [1, 2, 3], 2))

    return call


CALLS = {"attention": lambda: attention_call, "manager": manager_call, "engine": engine_call, "generate": generate_call}


def grown(call: Callable[[], None], warm: int, calls: int) -> float:
    """The relative growth of resident memory over so many calls. It compares the least during the first third with the least
    during the last third, because allocators keep freed memory for some milliseconds."""

    def least(calls: int) -> int:
        gc.collect()
        seen = []
        for _ in range(calls):
            call()
            seen.append(resident_bytes())
        return min(seen)

    for _ in range(warm):
        call()
    before = least(calls // 3)
    for _ in range(calls // 3):
        call()
    return least(calls // 3) / before - 1


def leaks(call: Callable[[], None], warm: int, calls: int) -> bool:
    """Whether memory grows by a hundredth in each of up to five windows. A leak grows in all of them; an allocator that
    keeps new memory, or a thread of another test, makes it grow in one."""
    return all(grown(call, warm if window == 0 else 0, calls) >= 0.01 for window in range(5))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["attention", "manager"])
def test_resident_memory_does_not_grow(name: str) -> None:
    assert not leaks(CALLS[name](), 150, 60)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_resident_memory_does_not_grow_over_ten_thousand_calls(name: str) -> None:
    assert not leaks(CALLS[name](), 1000, 10_000)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_canary_a_leak_is_seen() -> None:
    kept: list[Tensor] = []
    assert leaks(lambda: kept.append(torch.zeros(1 << 16)), 20, 150)
