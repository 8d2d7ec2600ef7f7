"""The cache behind the manager: which buffers exist, which are free, and which must go.

Bytes:

    held      =  in_use + cached            real: rounding and slack included
    reserved  =  held + idle                idle: held by slabs, in no buffer
    live      =  in_use − slack             what was asked for, of the buffers in use
    high_water  =  the most that live ever was (at least 1 MiB), or what a learned pattern needs

A new buffer is made only after cached ones were dropped, least recently freed first, until reserved + new ≤ high_water.
The caller holds the manager's lock, and nothing is freed meanwhile (the manager puts that off).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from ..types import BufferConfig, BufferStateError, BufferType
from .pressure import AdaptiveLimit, PressureSource
from .slab import MIB
from .slot import FreeList, Key, Pool, Slot, detach_storage
from .strategies import AllocationRequest, Strategies

_MAX_FREE_LISTS = 4096
_PRESSURE_EVERY_S = 0.05
_CPU = torch.device("cpu")


def one_device(device: torch.device | str) -> torch.device:
    """The one spelling of a device: "cuda" and torch.device("cuda") are cuda:<current>, "cpu:0" is cpu."""
    given = torch.device(device)
    if given.type == "cpu":
        return _CPU
    if given.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(given)!r}: CUDA is not available here; use device='cpu'")
        return given if given.index is not None else torch.device("cuda", torch.cuda.current_device())
    return given


def one_type(type: BufferType | str) -> BufferType:
    if type not in tuple(BufferType):
        raise ValueError(f"type: got {type!r}; accepted: {', '.join(t.name for t in BufferType)}")
    return BufferType(type)


def one_shape(shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(n, int) and n >= 0 for n in sizes):
        raise ValueError(f"shape: got {shape!r}; accepted: a sequence of ints ≥ 0")
    return sizes


class BufferCache:
    __slots__ = (
        "_configs",
        "_felt_at",
        "_high_water",
        "_pattern_high_water",
        "_pending_release",
        "_pressure",
        "_reuse",
        "_warned_pinned",
        "bounded",
        "clock",
        "dropped",
        "free_lists",
        "held",
        "in_use",
        "limits",
        "max_bytes",
        "peak",
        "pools",
        "slack",
        "slots",
        "strategies",
    )

    def __init__(
        self,
        configs: Mapping[BufferType, BufferConfig],
        *,
        reuse: bool,
        max_bytes: int | None,
        pressure: PressureSource,
        strategies: Strategies,
    ) -> None:
        self.free_lists: dict[tuple[Any, ...], FreeList] = {}
        self.slots: dict[int, Slot] = {}
        self.pools: dict[tuple[BufferType, torch.device], Pool] = {}
        self.dropped: deque[Any] = deque()
        self.limits: dict[torch.device, AdaptiveLimit] = {}
        self.strategies = strategies
        self.max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self.bounded = max_bytes is not None
        self.held = self.in_use = self.slack = self.peak = self.clock = 0
        self._configs, self._reuse, self._pressure = configs, reuse, pressure
        self._high_water, self._pattern_high_water = MIB, 0
        self._pending_release: list[Slot] = []
        self._felt_at = 0.0
        self._warned_pinned = False

    def free_list(self, type: Any, shape: Any, dtype: Any, device: Any) -> FreeList:
        """The free_list of a request; the request's own spelling finds it at once from then on."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: got {dtype!r}; accepted: a torch.dtype")
        key = Key(one_type(type), one_shape(shape), dtype, one_device(device))
        free_list = self.free_lists.get(key)
        if free_list is None:
            if len(self.free_lists) >= _MAX_FREE_LISTS:
                self.free_lists = {k: kept for k, kept in list(self.free_lists.items()) if kept.slots}
            free_list = self.free_lists[key] = FreeList(key, self._pool(key))
        if isinstance(shape, tuple) and (key.device.type == "cpu" or torch.device(device).index is not None):
            self.free_lists[type, shape, dtype, device] = free_list
        return free_list

    def find(self, free_list: FreeList) -> tuple[Slot, bool]:
        """A slot for a free_list that has none ready, and whether it came from the cache."""
        slot = self._best_fit(free_list)
        pool = free_list.pool
        if slot is None:
            pool.misses += 1
            self.make_room(free_list.nbytes)
            return self.make(free_list), False
        del pool.free[slot]
        slot.free_list.slots.remove(slot)
        pool.hits += 1
        if slot.poison is not None:
            self.check_poison(slot)
        if slot.retarget(free_list):
            del self.slots[slot.ident]
            self.adopt(slot)
        return slot, True

    def _pool(self, key: Key) -> Pool:
        pool = self.pools.get((key.type, key.device))
        if pool is None:
            config = self._configs[key.type]
            host = config.prefer_pinned and key.device.type == "cpu"
            pinned = host and torch.cuda.is_available()
            if host and not pinned and not self._warned_pinned:
                self._warned_pinned = True
                warnings.warn(f"{key.type.name} buffers are plain memory: no CUDA device to pin for", stacklevel=5)
            pool = Pool(key.type, key.device, config, pinned, key.device.type == "cuda", self._limit(config))
            self.pools[key.type, key.device] = pool
        return pool

    def _limit(self, config: BufferConfig) -> int:
        if not self._reuse:
            return 0
        return 10 if config.reuse_frequency == "high" else 5

    def _best_fit(self, free_list: FreeList) -> Slot | None:
        """The smallest cached buffer with nbytes ≤ size ≤ 1.25 nbytes, unless its slack could lift us past the high-water mark:
        then all slack in use must stay within 5 % of it."""
        best, nbytes, least = None, free_list.nbytes, free_list.most
        for slot in free_list.pool.free:
            if nbytes <= slot.storage_bytes <= least:
                best, least = slot, slot.storage_bytes
        if best is None or self.in_use + best.nbytes <= self._high_water:
            return best
        near = self._high_water * 0.05
        slack = self.slack + best.nbytes - nbytes
        return best if slack <= near or self.in_use + best.nbytes <= self._high_water + near else None

    def make_room(self, nbytes: int) -> None:
        """Drops cached buffers until so many new bytes do not pass the high-water mark."""
        if time.monotonic() - self._felt_at > _PRESSURE_EVERY_S:
            self.apply_pressure()
        self._high_water = max(self._high_water, self.in_use - self.slack + nbytes)
        high_water = max(self._high_water, self._pattern_high_water)
        while self.cached and self.reserved() + nbytes > high_water:
            self._evict(self._oldest(self.pools.values()))
        self._sweep()

    def make(self, free_list: FreeList) -> Slot:
        """A slot of new memory; it counts as cached until it is handed out."""
        pool = free_list.pool
        request = AllocationRequest(free_list.nbytes, pool.device, pool.config, pool.pinned)
        base, block = self.strategies.take(request)
        with ExitStack() as on_error:
            on_error.callback(self.strategies.give_back, request, block)
            slot = Slot(free_list, request, base, block)
            on_error.pop_all()
        del base
        slot.learn_alone()
        self.adopt(slot)
        self.held += slot.nbytes
        self.peak = max(self.peak, self.reserved())
        return slot

    def adopt(self, slot: Slot) -> None:
        slot.watch(self.dropped.append)
        self.slots[slot.ident] = slot

    def store(self, slot: Slot) -> None:
        """Caches a slot that nobody uses; `trim` is the caller's."""
        slot.free_list.slots.append(slot)
        slot.pool.free[slot] = None
        slot.stamp = self.clock = self.clock + 1

    @property
    def cached(self) -> int:
        return self.held - self.in_use

    def reserved(self) -> int:
        return self.held + self.strategies.idle_bytes()

    def is_over(self) -> bool:
        """Whether the cache holds more bytes than it may."""
        return self.cached > self.max_bytes or any(
            limit.max_bytes is not None and self.cached_on(device) > limit.max_bytes
            for device, limit in self.limits.items()
        )

    def trim(self) -> None:
        """Drops what is beyond the limits: buffers per pool, bytes in all, bytes of a device short of memory."""
        if not self.clock & 255 and time.monotonic() - self._felt_at > _PRESSURE_EVERY_S:
            self.apply_pressure()
        for pool in list(self.pools.values()):
            while len(pool.free) > pool.limit:
                self._evict(next(iter(pool.free)))
        while self.cached > self.max_bytes:
            self._evict(self._oldest(self.pools.values()))
        for device, limit in list(self.limits.items()):
            while limit.max_bytes is not None and self.cached_on(device) > limit.max_bytes:
                self._evict(self._oldest([pool for pool in self.pools.values() if pool.device == device]))
        self._sweep()

    def apply_pressure(self) -> None:
        """Asks the pressure source about every device in use, and adapts what may be cached there."""
        self._felt_at = time.monotonic()
        for device in {device for _, device in self.pools}:
            limit = self.limits.get(device) or AdaptiveLimit()
            limit.feel(self._pressure(device), self.cached_on(device))
            if limit.max_bytes is None:
                self.limits.pop(device, None)
            else:
                self.limits[device] = limit
        self.bounded = bool(self.limits) or self.max_bytes < sys.maxsize

    def cached_on(self, device: torch.device) -> int:
        pools = [pool for pool in self.pools.values() if pool.device == device]
        return sum(slot.nbytes for pool in pools for slot in pool.free)

    def _oldest(self, pools: Collection[Pool]) -> Slot:
        return min((next(iter(pool.free)) for pool in pools if pool.free), key=lambda slot: slot.stamp)

    def _evict(self, slot: Slot) -> None:
        slot.pool.evictions += self._reuse
        self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        del slot.pool.free[slot]
        slot.free_list.slots.remove(slot)
        tensor = slot.tensor
        assert tensor is not None
        self.forget(slot)
        detach_storage(tensor)

    def forget(self, slot: Slot) -> None:
        """The slot is no longer ours; a block of a slab goes back once nobody holds its storage."""
        if self.slots.get(slot.ident) is slot:
            del self.slots[slot.ident]
        self.held -= slot.nbytes
        slot.tensor = slot.handle = None
        if slot.block.slab is not None:
            self._pending_release.append(slot)

    def quarantine(self, slot: Slot) -> None:
        """Someone else holds the bytes: they stay that holder's, and are never handed out."""
        slot.pool.quarantined += 1
        self.forget(slot)

    def _sweep(self) -> None:
        waiting, self._pending_release = self._pending_release, []
        for slot in waiting:
            if slot.storage.expired():
                self.strategies.give_back(slot.request, slot.block)
            else:
                self._pending_release.append(slot)

    def reap(self) -> list[Slot]:
        """Lets go of the buffers in use whose callers dropped them."""
        gone = []
        while self.dropped:
            handle = self.dropped.popleft()
            slot: Slot = handle.slot
            if slot.handle is handle:
                self.in_use -= slot.nbytes
                self.slack -= slot.slack
                self.forget(slot)
                gone.append(slot)
        self._sweep()
        return gone

    def clear(self, type: BufferType | None) -> None:
        for pool in list(self.pools.values()):
            if type is None or pool.type is type:
                for slot in list(pool.free):
                    self._drop(slot)
        self._sweep()

    def check_poison(self, slot: Slot) -> None:
        try:
            slot.check_poison()
        except BufferStateError:
            self.quarantine(slot)
            raise

    def ready(self, wanted: Mapping[Key, int]) -> None:
        """Makes sure that the cache holds so many buffers of each key."""
        self._fill(wanted)
        self._high_water = max(self._high_water, self.reserved())
        self.trim()

    def follow(self, plan: Mapping[Key, int]) -> bool:
        """Caches exactly a learned plan ({}: back to the ordinary limits); False where it does not fit the limits."""
        nbytes = sum(count * key.nbytes for key, count in plan.items())
        if nbytes > self.max_bytes or self.limits:
            plan = {}
        for pool in self.pools.values():
            needs = sum(count for key, count in plan.items() if (key.type, key.device) == (pool.type, pool.device))
            pool.limit = max(self._limit(pool.config), needs)
        self._pattern_high_water = 0
        if plan:
            for slot in [slot for pool in self.pools.values() for slot in pool.free]:
                if len(slot.free_list.slots) > plan.get(slot.free_list.key, 0):
                    self._drop(slot)
            self._sweep()
            self._fill(plan)
            self._pattern_high_water = self.reserved()
        self.trim()
        return bool(plan)

    def _fill(self, wanted: Mapping[Key, int]) -> None:
        for key, count in wanted.items():
            free_list = self.free_list(*key)
            for _ in range(count - len(free_list.slots)):
                self.store(self.make(free_list))
