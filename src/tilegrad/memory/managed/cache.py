"""The manager's cache: which buffers exist, which are free, and which are dropped first.

Bytes:

    reserved    =  in_use + cached + idle   real memory, with rounding and slack; idle bytes are in a slab but in no buffer
    live        =  in_use − slack           the bytes requested for the buffers in use
    high_water  =  the largest value of live so far (at least 1 MiB), or what preallocation or a learned pattern needs, if more

A new buffer is made only after cached ones were dropped, least recently freed first, until reserved + new ≤ high_water.

There is no lock, and no counter of bytes is kept up to date. A buffer is either in use (in `slots`; the caller owns its
tensor) or cached (in `free` of its pool, together with its tensor). To move a buffer, a function removes it from one dict and
adds it to the other. The interpreter interrupts neither operation. In between, the function has the only reference to the
tensor: if it is interrupted or its thread ends, the tensor and its bytes are freed. Bytes are summed when a count is requested.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter

import torch
from torch import Tensor

from ..types import BufferConfig, BufferStateError, BufferType
from .pressure import AdaptiveLimit, PressureSource
from .slab import MIB
from .slot import FreeList, Handle, Key, Pool, Slot, detach_storage, shaped
from .strategies import AllocationRequest, Strategies

_MAX_FREE_LISTS = 4096
_PRESSURE_EVERY_S = 0.05
_CPU = torch.device("cpu")
_NBYTES, _SLACK = attrgetter("nbytes"), attrgetter("slack")


def one_device(device: torch.device | str) -> torch.device:
    """The normalized device: cuda:<current> for "cuda" and torch.device("cuda"), cpu for "cpu:0"."""
    parsed = torch.device(device)
    if parsed.type == "cpu":
        return _CPU
    if parsed.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(parsed)!r}: CUDA is not available here; use device='cpu'")
        return parsed if parsed.index is not None else torch.device("cuda", torch.cuda.current_device())
    return parsed


def one_type(type: BufferType | str) -> BufferType:
    if type not in tuple(BufferType):
        raise ValueError(f"type: got {type!r}; accepted: {', '.join(t.name for t in BufferType)}")
    return BufferType(type)


def one_shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(n, int) and n >= 0 for n in sizes):
        raise ValueError(f"shape: got {shape!r}; accepted: a sequence of ints ≥ 0")
    return sizes


class BufferCache:
    __slots__ = (
        "_felt_at",
        "_high_water",
        "_pattern_high_water",
        "_pressure",
        "_reuse",
        "_warned_pinned",
        "bounded",
        "clock",
        "configs",
        "dropped",
        "free_lists",
        "limits",
        "max_bytes",
        "most_held",
        "peak",
        "pools",
        "preallocated",
        "slots",
        "strategies",
    )

    def __init__(
        self,
        configs: dict[BufferType, BufferConfig],
        *,
        reuse: bool,
        max_bytes: int | None,
        pressure: PressureSource,
        strategies: Strategies,
    ) -> None:
        self.free_lists: dict[tuple[object, ...], FreeList] = {}
        self.slots: dict[int, Slot] = {}
        self.pools: dict[tuple[BufferType, torch.device], Pool] = {}
        self.dropped: deque[Handle] = deque()
        self.limits: dict[torch.device, AdaptiveLimit] = {}
        self.strategies = strategies
        self.max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self.bounded = max_bytes is not None
        self.most_held = self.peak = self.clock = 0  # most_held: an upper bound of in_use + cached
        self.configs, self._reuse, self._pressure = configs, reuse, pressure
        self.preallocated = 0
        self._high_water, self._pattern_high_water = MIB, 0
        self._felt_at = 0.0
        self._warned_pinned = False

    def free_list(
        self, type: BufferType | str, shape: Sequence[int] | int, dtype: torch.dtype, device: torch.device | str
    ) -> FreeList:
        """The free list of a request. The arguments in the caller's form also become a key of `free_lists`."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: got {dtype!r}; accepted: a torch.dtype")
        key = Key(one_type(type), one_shape(shape), dtype, one_device(device))
        free_list = self.free_lists.get(key)
        if free_list is None:
            if len(self.free_lists) >= _MAX_FREE_LISTS:
                self.free_lists = {k: kept for k, kept in self.free_lists.copy().items() if kept.slots}
            free_list = self.free_lists.setdefault(key, FreeList(key, self._pool(key)))
        if isinstance(shape, tuple) and (key.device.type == "cpu" or torch.device(device).index is not None):
            self.free_lists[type, shape, dtype, device] = free_list
        return free_list

    def find(self, free_list: FreeList) -> tuple[Slot, Tensor, bool]:
        """(slot, tensor, whether they came from the cache): a buffer for a free list that has no buffer of its exact key."""
        pool = free_list.pool
        while (slot := self._best_fit(free_list)) is not None:
            tensor = self.claim(slot)
            if tensor is None:
                continue
            pool.hits += 1
            if slot.poison is not None:
                self.check_poison(slot, tensor)
            reshaped = slot.retarget(tensor, free_list)
            if reshaped is not tensor:
                slot.watch(reshaped, self.dropped.append)
            return slot, reshaped, True
        pool.misses += 1
        return *self.make(free_list), False

    def claim(self, slot: Slot) -> Tensor | None:
        """Takes a buffer out of the cache. Returns None if another thread took it first."""
        tensor = slot.pool.free.pop(slot, None)
        if tensor is not None:
            try:  # noqa: SIM105, because `suppress` takes a microsecond
                slot.free_list.slots.remove(slot)
            except ValueError:  # a `deallocate` that was interrupted did not add it
                pass
        return tensor

    def _pool(self, key: Key) -> Pool:
        pool = self.pools.get((key.type, key.device))
        if pool is None:
            config = self.configs[key.type]
            host = config.prefer_pinned and key.device.type == "cpu"
            pinned = host and torch.cuda.is_available()
            if host and not pinned and not self._warned_pinned:
                self._warned_pinned = True
                warnings.warn(f"{key.type.name} buffers are not pinned: no CUDA device is available", stacklevel=4)
            pool = Pool(key.type, key.device, config, pinned, key.device.type == "cuda", self._limit(config))
            pool = self.pools.setdefault((key.type, key.device), pool)
        return pool

    def _limit(self, config: BufferConfig) -> int:
        if not self._reuse:
            return 0
        return 10 if config.reuse_frequency == "high" else 5

    def _best_fit(self, free_list: FreeList) -> Slot | None:
        """The smallest cached buffer with nbytes ≤ size ≤ 1.25 nbytes. If the bytes in use would then exceed the high-water
        mark by more than 5 %, the buffer is returned only if all slack in use is at most 5 % of the mark."""
        best, nbytes, least = None, free_list.nbytes, free_list.most
        for slot in list(free_list.pool.free):
            if nbytes <= slot.storage_bytes <= least:
                best, least = slot, slot.storage_bytes
        if best is None or self.most_held <= self._high_water:
            return best
        in_use = self.in_use()
        if in_use + best.nbytes <= self._high_water:
            return best
        near = self._high_water * 0.05
        slack = self.slack() + best.nbytes - nbytes
        return best if slack <= near or in_use + best.nbytes <= self._high_water + near else None

    def make_room(self, nbytes: int) -> int:
        """Drops cached buffers until `nbytes` new bytes fit under the high-water mark. Returns the bytes in use."""
        if time.monotonic() - self._felt_at > _PRESSURE_EVERY_S:
            self.apply_pressure()
        in_use = self.in_use()
        if in_use + nbytes > self._high_water:
            self._high_water = max(self._high_water, in_use - self.slack() + nbytes)
        high_water = max(self._high_water, self._pattern_high_water)
        while oldest := self._oldest(self.pools.values()):
            if in_use + self.cached + self.strategies.idle_bytes() + nbytes <= high_water:
                break
            self._evict(oldest)
            self.strategies.sweep()
        return in_use

    def make(self, free_list: FreeList, *, evict: bool = True) -> tuple[Slot, Tensor]:
        """A buffer in new memory, neither in use nor cached. `evict`: first drop cached buffers to make room."""
        in_use = self.make_room(free_list.nbytes) if evict else self.in_use()
        pool = free_list.pool
        base, block = self.strategies.take(AllocationRequest(free_list.nbytes, pool.device, pool.config, pool.pinned))
        slot, tensor = Slot(free_list, base, block), shaped(base.untyped_storage(), free_list.key)
        del base
        slot.learn_alone()
        slot.watch(tensor, self.dropped.append)
        self.most_held = in_use + self.cached + slot.nbytes
        self.peak = max(self.peak, self.most_held + self.strategies.idle_bytes())
        return slot, tensor

    def store(self, slot: Slot, tensor: Tensor) -> None:
        """Caches a buffer that is not in use. The caller must call `trim`."""
        slot.stamp = self.clock = self.clock + 1
        slot.pool.free[slot] = tensor
        slot.free_list.slots.append(slot)

    def in_use(self) -> int:
        """Bytes of the buffers in use, slack included."""
        return sum(map(_NBYTES, list(self.slots.values())))

    def slack(self) -> int:
        """Bytes of the buffers in use beyond the requested bytes."""
        return sum(map(_SLACK, list(self.slots.values())))

    @property
    def cached(self) -> int:
        return sum(slot.nbytes for pool in list(self.pools.values()) for slot in list(pool.free))

    def reserved(self) -> int:
        return self.in_use() + self.cached + self.strategies.idle_bytes()

    def is_over(self) -> bool:
        """Whether the cached bytes exceed a limit."""
        # not any(…): Python loses an interrupt that comes while a generator is closed early
        for device, limit in self.limits.items():
            if limit.max_bytes is not None and self.cached_on(device) > limit.max_bytes:
                return True
        return self.cached > self.max_bytes

    def trim(self) -> None:
        """Drops buffers beyond a limit: buffers per pool, total bytes, or bytes on a device that is short of memory."""
        if not self.clock & 255 and time.monotonic() - self._felt_at > _PRESSURE_EVERY_S:
            self.apply_pressure()
        pools = list(self.pools.values())
        for pool in pools:
            while len(pool.free) > pool.limit and self._evict(self._oldest([pool])):
                pass
        while self.bounded and self.cached > self.max_bytes and self._evict(self._oldest(pools)):
            pass
        for device, limit in list(self.limits.items()):
            on_device = [pool for pool in pools if pool.device == device]
            while limit.max_bytes is not None and self.cached_on(device) > limit.max_bytes:
                if not self._evict(self._oldest(on_device)):
                    break
        self.strategies.sweep()

    def apply_pressure(self) -> None:
        """Reads the pressure of every device in use and adapts how much may be cached on it."""
        self._felt_at = time.monotonic()
        for device in {device for _, device in list(self.pools)}:
            limit = self.limits.get(device) or AdaptiveLimit()
            limit.feel(self._pressure(device), self.cached_on(device))
            if limit.max_bytes is None:
                self.limits.pop(device, None)
            else:
                self.bounded = True
                self.limits[device] = limit
        self.bounded = bool(self.limits) or self.max_bytes < sys.maxsize

    def cached_on(self, device: torch.device) -> int:
        pools = [pool for pool in list(self.pools.values()) if pool.device == device]
        return sum(slot.nbytes for pool in pools for slot in list(pool.free))

    def _oldest(self, pools: Collection[Pool]) -> Slot | None:
        first = (slot for pool in list(pools) for slot in list(pool.free)[:1])
        return min(first, key=lambda slot: slot.stamp, default=None)

    def _evict(self, slot: Slot | None) -> bool:
        """Drops a buffer, and returns whether there was a buffer to drop."""
        if slot is None:
            return False
        if self._drop(slot):
            slot.pool.evictions += self._reuse
        return True

    def _drop(self, slot: Slot) -> bool:
        tensor = self.claim(slot)
        if tensor is None:
            return False
        slot.handle = None
        detach_storage(tensor)
        return True

    def quarantine(self, slot: Slot) -> None:
        """Forgets a buffer whose bytes the caller still references elsewhere. The cache never hands out these bytes again."""
        slot.pool.quarantined += 1
        self.slots.pop(slot.ident, None)
        slot.handle = None

    def reap(self) -> list[Slot]:
        """Removes the buffers in use whose callers dropped the tensor, and returns their slots."""
        gone = []
        for handle in list(self.dropped):
            slot = handle.slot
            if slot.handle is handle:
                with suppress(KeyError):
                    if self.slots[slot.ident] is slot:  # there is no call, so no interrupt, before the next line
                        del self.slots[slot.ident]
                        gone.append(slot)
                slot.handle = None
            with suppress(ValueError):
                self.dropped.remove(handle)
        self.strategies.sweep()
        return gone

    def clear(self, type: BufferType | None) -> None:
        for pool in list(self.pools.values()):
            if type is None or pool.type is type:
                for slot in list(pool.free):
                    self._drop(slot)
        self.strategies.sweep()

    def check_poison(self, slot: Slot, tensor: Tensor) -> None:
        try:
            slot.check_poison(tensor)
        except BufferStateError:
            self.quarantine(slot)
            raise

    def ready(self, wanted: Mapping[Key, int]) -> None:
        """Makes sure that at least `wanted[key]` buffers of each key are cached."""
        self._fill(wanted)
        self._high_water = max(self._high_water, self.reserved())
        self.trim()

    def follow(self, plan: Mapping[Key, int]) -> bool:
        """Caches exactly the buffers of a learned plan; {} restores the normal limits. Returns False if the plan does not fit
        the limits."""
        nbytes = sum(count * key.nbytes for key, count in plan.items())
        if nbytes > self.max_bytes or self.limits:
            plan = {}
        for pool in list(self.pools.values()):
            needs = sum(count for key, count in plan.items() if (key.type, key.device) == (pool.type, pool.device))
            pool.limit = max(self._limit(pool.config), needs)
        self._pattern_high_water = 0
        if plan:
            for slot in [slot for pool in list(self.pools.values()) for slot in list(pool.free)]:
                if self._cached_of(slot.free_list) > plan.get(slot.free_list.key, 0):
                    self._drop(slot)
            self.strategies.sweep()
            self._fill(plan)
            self._pattern_high_water = self.reserved()
        self.trim()
        return bool(plan)

    def _fill(self, wanted: Mapping[Key, int]) -> None:
        for key, count in wanted.items():
            free_list = self.free_list(*key)
            for _ in range(count - self._cached_of(free_list)):
                self.store(*self.make(free_list, evict=False))
                self.preallocated += 1

    @staticmethod
    def _cached_of(free_list: FreeList) -> int:
        """How many cached buffers have the exact key of this free list."""
        return sum(slot.free_list.key == free_list.key for slot in list(free_list.pool.free))
