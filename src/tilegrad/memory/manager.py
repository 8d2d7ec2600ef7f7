"""`AttentionBufferManager`: typed buffers that are handed out, come back, and are handed out again.

    allocate    exact key cached → its tensor as it is;  another key of the size class → the same bytes, re-shaped;
                else a strategy's new memory, after cached buffers made room
    deallocate  the only holder → cached;  any other holder → quarantined: forgotten, never handed out

A cached buffer is bytes of one (type, device): it serves every shape and dtype of at least 1/1.25 of its size. What is
cached leaves, least recently freed first, before in use + cached passes the most bytes ever asked for at one time,
beyond `max_bytes`, beyond 10 (reuse high) or 5 buffers per (type, device), and when memory gets tight.

One lock guards everything and is never held while a caller's tensor is written. It is re-entrant, and what it guards is
never iterated in place: a finalizer may free a buffer at any point.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilegrad.memory.pattern import PatternLearner, demand
from tilegrad.memory.pressure import AdaptiveLimit, PressureSource, memory_pressure
from tilegrad.memory.profile import Life, Profile, ScopeStats, chrome_trace
from tilegrad.memory.slab import MIB
from tilegrad.memory.slot import Key, Lane, Pool, Slot
from tilegrad.memory.strategies import Request, Strategies
from tilegrad.memory.types import DEFAULT_CONFIGS, BufferConfig, BufferStateError, BufferType

_CPU = torch.device("cpu")
_SLACK = 1.25
_SMALL_CACHE_BYTES = MIB
_MAX_LANES = 4096
_MAX_EVENTS = 1 << 16
_PRESSURE_EVERY_S = 0.05

_mode_stack_depth = torch._C._len_torch_function_stack


def default_device() -> torch.device:
    """torch's default device; the depth of the mode stack says in 0.1 µs that nobody changed it."""
    return torch.get_default_device() if _mode_stack_depth() else _CPU


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
        raise ValueError(f"type={type!r}: must be one of {', '.join(t.name for t in BufferType)}")
    return BufferType(type)


def one_shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(n, int) and n >= 0 for n in sizes):
        raise ValueError(f"shape={shape!r}: must be a sequence of integers ≥ 0")
    return sizes


class AttentionBufferManager:
    """Hands out typed buffers and caches them; see the module's text for the rules.

    lightweight    no profiling, no stats per scope, and a stale handle is not caught once its buffer is handed out again
    debug          freed buffers are filled with NaN (float) or 0xCB; `allocate` raises if one was written since
    pressure       device → used share of its memory in [0, 1]; see `tilegrad.memory.pressure`
    enable_preallocation   one buffer of each type's typical size is cached from the start
    """

    _shared: dict[str, AttentionBufferManager] = {}
    _shared_lock = threading.Lock()

    def __init__(
        self,
        enable_reuse: bool = True,
        enable_preallocation: bool = False,
        enable_profiling: bool = False,
        custom_configs: Mapping[BufferType, BufferConfig] | None = None,
        max_bytes: int | None = None,
        device: torch.device | str | None = None,
        lightweight: bool = False,
        *,
        debug: bool = False,
        pressure: PressureSource = memory_pressure,
        strategies: Strategies | None = None,
    ) -> None:
        for name, asked in (("enable_profiling", enable_profiling), ("debug", debug)):
            if lightweight and asked:
                raise ValueError(f"{name}=True needs a tracked manager; pass lightweight=False")
        if enable_preallocation and not enable_reuse:
            raise ValueError("enable_preallocation=True with enable_reuse=False: nothing is kept; enable reuse")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes={max_bytes!r}: must be None (no limit) or at least 0")
        self._configs = {**DEFAULT_CONFIGS, **{one_type(t): c for t, c in (custom_configs or {}).items()}}
        for type, config in self._configs.items():
            if not isinstance(config, BufferConfig):
                raise TypeError(f"custom_configs[{type.name}]={config!r}: must be a BufferConfig")
        self._reuse = enable_reuse
        self._max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self._device = None if device is None else one_device(device)
        self._lock = threading.RLock()
        self._strategies = strategies or Strategies()
        self._lanes: dict[tuple[Any, ...], Lane] = {}
        self._pools: dict[tuple[BufferType, torch.device], Pool] = {}
        self._slots: dict[int, Slot] = {}
        self._dropped: deque[Any] = deque()
        self._limbo: list[Slot] = []
        self._in_use = self._live = self._cached = self._peak = self._clock = 0
        self._mark = _SMALL_CACHE_BYTES
        self._plan_mark = 0
        self._events: deque[tuple[Key, int]] = deque(maxlen=_MAX_EVENTS)
        self._learner: PatternLearner[Key] = PatternLearner()
        self._pressure, self._felt_at = pressure, 0.0
        self._limits: dict[torch.device, AdaptiveLimit] = {}
        self._warned_pinned = False
        self._tracked, self._debug = not lightweight, debug
        self._scope: ContextVar[str] = ContextVar("scope", default="")
        self._scopes: dict[str, ScopeStats] = {}
        self._profile = Profile() if enable_profiling else None
        if enable_preallocation:
            where = self._device or default_device()
            self._ready({Key(t, (int(c.typical_size_mb * MIB),), torch.uint8, where): 1 for t, c in self._configs.items()})

    @classmethod
    def shared(cls, name: str) -> AttentionBufferManager:
        """The process's tracked manager of that name, made on first use."""
        with cls._shared_lock:
            if name not in cls._shared:
                cls._shared[name] = cls()
            return cls._shared[name]

    def allocate(
        self,
        type: BufferType,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        zero_init: bool | None = None,
    ) -> Tensor:
        """A contiguous buffer; uninitialised unless `zero_init`, by default what the type's config says."""
        began = 0 if self._profile is None else self._profile.now()
        if device is None:
            device = self._device or default_device()
        with self._lock:
            if self._dropped:
                self._reap()
            try:
                slot = self._lanes[type, shape, dtype, device].slots.pop()
            except (KeyError, IndexError, TypeError):
                slot, hit = self._find(type, shape, dtype, device)
            else:
                hit = True
                pool = slot.pool
                del pool.free[slot]
                pool.hits += 1
                self._cached -= slot.nbytes
            if hit and self._tracked:
                slot, hit = self._vetted(slot)
            tensor = slot.tensor
            assert tensor is not None
            slot.tensor = None
            self._in_use += slot.nbytes
            self._live += slot.requested
            self._events.append(slot.lane.took)
            if slot.freed is not None:
                slot.await_freed(tensor)
            if self._tracked:
                self._note_taken(slot, hit, began)
        if zero_init or (zero_init is None and slot.zero):
            tensor.zero_()
        return tensor

    def deallocate(self, tensor: Tensor, type: BufferType | None = None) -> None:
        """Takes the buffer back. The tensor is dead from here on, even if a variable still names it."""
        began = 0 if self._profile is None else self._profile.now()
        with self._lock:
            slot = self._slots.get(id(tensor))
            if slot is None or slot.tensor is not None or slot.handle() is not tensor:
                raise self._not_in_use(tensor)
            pool = slot.pool
            if type is not None and type is not pool.type and one_type(type) is not pool.type:
                raise BufferStateError(f"type={type!r}: this buffer is {pool.type.name}; pass that type or none")
            if tensor.requires_grad:
                raise BufferStateError(
                    f"a {pool.type.name} buffer with {'grad_fn' if tensor.grad_fn else 'requires_grad=True'} is part of "
                    "a graph; free it when the graph is gone, or just drop it"
                )
            self._in_use -= slot.nbytes
            self._live -= slot.requested
            self._events.append(slot.lane.gave)
            if self._tracked:
                self._note_given(slot, began)
            if slot.held_elsewhere(tensor):
                pool.quarantined += 1
                self._forget(tensor, slot)
                return
            if not slot.same_layout(tensor):
                tensor.set_(tensor.untyped_storage(), 0, *slot.layout())
            slot.tensor = tensor
            if pool.on_cuda:
                slot.mark_freed()
            if self._debug:
                slot.poison_bytes()
            self._store(slot)

    def _store(self, slot: Slot) -> None:
        pool = slot.pool
        slot.lane.slots.append(slot)
        pool.free[slot] = None
        self._cached += slot.nbytes
        slot.stamp = self._clock = self._clock + 1
        if len(pool.free) > pool.limit or self._cached > self._max_bytes or self._limits or not self._clock & 255:
            self._trim()

    @contextmanager
    def buffer(
        self,
        type: BufferType,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        zero_init: bool | None = None,
    ) -> Iterator[Tensor]:
        """`allocate` for the length of a block."""
        tensor = self.allocate(type, shape, dtype, device, zero_init)
        try:
            yield tensor
        finally:
            self.deallocate(tensor, type)

    def preallocate_buffers(
        self,
        batch_size: int,
        seq_len: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        types: Collection[BufferType] = (
            BufferType.QUERY,
            BufferType.KEY,
            BufferType.VALUE,
            BufferType.OUTPUT,
            BufferType.SCORES,
            BufferType.WEIGHTS,
        ),
    ) -> None:
        """Makes sure that one buffer of each type is cached: (B, T, H, D), and (B, H, T, T) for SCORES and WEIGHTS."""
        if not self._reuse:
            raise ValueError("preallocate_buffers needs enable_reuse=True: nothing is kept without it")
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_heads": num_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r}: must be an integer of at least 1")
        where = one_device(device) if device is not None else self._device or default_device()
        square = (batch_size, num_heads, seq_len, seq_len)
        wanted: dict[Key, int] = {}
        for type in types:
            whole = type in (BufferType.SCORES, BufferType.WEIGHTS)
            shape = square if whole else (batch_size, seq_len, num_heads, head_dim)
            wanted[Key(one_type(type), shape, dtype, where)] = 1
        nbytes = sum(math.prod(key.shape) for key in wanted) * dtype.itemsize
        if nbytes > self._max_bytes:
            raise ValueError(f"preallocate_buffers: {nbytes} bytes do not fit max_bytes={self._max_bytes}")
        self._ready(wanted)

    def clear_cache(self, type: BufferType | None = None) -> None:
        """Gives every cached buffer (of one type) back to the system; buffers in use are untouched."""
        only = None if type is None else one_type(type)
        with self._lock:
            self._reap()
            for pool in list(self._pools.values()):
                if only is None or pool.type is only:
                    for slot in list(pool.free):
                        self._drop(slot)
            self._sweep()

    def end_iteration(self) -> None:
        """Marks the end of an iteration. After three alike, what the next one needs is cached when this returns."""
        with self._lock:
            self._reap()
            whole = len(self._events) < _MAX_EVENTS
            self._learner.observe(demand(self._events) if whole else {})
            self._events.clear()
            self._feel_pressure()
            if self._reuse:
                self._follow_plan()

    @contextmanager
    def scope(self, module_name: str) -> Iterator[None]:
        """Counts what is allocated inside under `module_name` (innermost wins); a lightweight manager keeps no such count."""
        token = self._scope.set(module_name)
        try:
            yield
        finally:
            self._scope.reset(token)

    # Finding, making and losing slots. The lock is held in everything below.

    def _find(self, type: Any, shape: Any, dtype: Any, device: Any) -> tuple[Slot, bool]:
        """The slot for a request whose exact spelling had none ready, and whether it came from the cache."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r}: must be a torch.dtype")
        key = Key(one_type(type), one_shape(shape), dtype, one_device(device))
        lane, pool = self._lane(key), self._pool(key)
        if isinstance(shape, tuple) and torch.device(device).index == key.device.index:
            self._lanes[type, shape, dtype, device] = lane
        nbytes = math.prod(key.shape) * dtype.itemsize
        slot = lane.slots[-1] if lane.slots else self._best_fit(pool, nbytes)
        if slot is None:
            pool.misses += 1
            return self._make(pool, lane, nbytes), False
        self._unlist(slot)
        pool.hits += 1
        if slot.lane is not lane:
            assert slot.tensor is not None
            if self._debug:
                self._check_poison(slot)
            old = id(slot.tensor)
            if slot.retarget(lane, nbytes):
                del self._slots[old]
                self._adopt(slot)
        return slot, True

    def _lane(self, key: Key) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= _MAX_LANES:
                self._lanes = {k: kept for k, kept in list(self._lanes.items()) if kept.slots}
            lane = self._lanes[key] = Lane(key)
        return lane

    def _pool(self, key: Key) -> Pool:
        pool = self._pools.get((key.type, key.device))
        if pool is None:
            config = self._configs[key.type]
            pinned = config.prefer_pinned and key.device.type == "cpu" and torch.cuda.is_available()
            if config.prefer_pinned and key.device.type == "cpu" and not pinned and not self._warned_pinned:
                self._warned_pinned = True
                warnings.warn(f"{key.type.name} buffers are plain memory: no CUDA device to pin for", stacklevel=4)
            pool = Pool(key.type, key.device, config, pinned, self._limit(config))
            self._pools[key.type, key.device] = pool
        return pool

    def _limit(self, config: BufferConfig) -> int:
        if not self._reuse:
            return 0
        return 10 if config.reuse_frequency == "high" else 5

    def _best_fit(self, pool: Pool, nbytes: int) -> Slot | None:
        """The smallest cached buffer of nbytes ≤ size ≤ 1.25 nbytes, unless its slack would break the high-water mark."""
        best = None
        for slot in list(pool.free):
            size = slot.storage_bytes
            if nbytes <= size and slot.nbytes <= _SLACK * nbytes and (best is None or slot.nbytes < best.nbytes):
                best = slot
        if best is None:
            return None
        in_use = self._in_use + best.nbytes
        slack = in_use - (self._live + nbytes)
        return best if in_use <= self._mark or slack <= 0.05 * self._mark else None

    def _make(self, pool: Pool, lane: Lane, nbytes: int) -> Slot:
        self._sweep()
        if time.monotonic() - self._felt_at > _PRESSURE_EVERY_S:
            self._feel_pressure()
        self._mark = max(self._mark, self._live + nbytes)
        self._make_room(nbytes)
        request = Request(nbytes, pool.device, pool.config, pool.pinned)
        base, block = self._strategies.take(request)
        slot = Slot(pool, lane, request, base, block)
        del base
        slot.learn_alone()
        self._adopt(slot)
        self._peak = max(self._peak, self._reserved() + slot.nbytes)
        return slot

    def _adopt(self, slot: Slot) -> None:
        slot.watch(self._dropped.append)
        self._slots[id(slot.tensor)] = slot

    def _reserved(self) -> int:
        return self._in_use + self._cached + self._strategies.idle_bytes()

    def _make_room(self, nbytes: int) -> None:
        mark = max(self._mark, self._plan_mark)
        while self._cached and self._reserved() + nbytes > mark:
            self._evict(self._oldest(self._pools.values()))

    def _oldest(self, pools: Collection[Pool]) -> Slot:
        return min((next(iter(pool.free)) for pool in pools if pool.free), key=lambda slot: slot.stamp)

    def _trim(self) -> None:
        for pool in list(self._pools.values()):
            while len(pool.free) > pool.limit:
                self._evict(next(iter(pool.free)))
        while self._cached > self._max_bytes:
            self._evict(self._oldest(self._pools.values()))
        for device, limit in list(self._limits.items()):
            pools = [pool for pool in self._pools.values() if pool.device == device]
            while limit.max_bytes is not None and self._cached_on(pools) > limit.max_bytes:
                self._evict(self._oldest(pools))
        if not self._clock & 255 and time.monotonic() - self._felt_at > _PRESSURE_EVERY_S:
            self._feel_pressure()

    def _cached_on(self, pools: Collection[Pool]) -> int:
        return sum(slot.nbytes for pool in pools for slot in list(pool.free))

    def _unlist(self, slot: Slot) -> None:
        del slot.pool.free[slot]
        slot.lane.slots.remove(slot)
        self._cached -= slot.nbytes

    def _evict(self, slot: Slot) -> None:
        slot.pool.evictions += self._reuse
        self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        self._unlist(slot)
        assert slot.tensor is not None
        self._forget(slot.tensor, slot)

    def _forget(self, tensor: Tensor, slot: Slot) -> None:
        """The slot is no longer ours; a block of a slab goes back once nobody holds its storage."""
        del self._slots[id(tensor)]
        slot.tensor = slot.handle = None
        if slot.block.slab is not None:
            self._limbo.append(slot)

    def _sweep(self) -> None:
        waiting, self._limbo = self._limbo, []
        for slot in waiting:
            if slot.storage.expired():
                self._strategies.give_back(slot.request, slot.block)
            else:
                self._limbo.append(slot)

    def _reap(self) -> None:
        """Accounts for the buffers that their callers dropped without deallocate."""
        while self._dropped:
            handle = self._dropped.popleft()
            slot: Slot = handle.slot
            if slot.handle is not handle:
                continue
            for known, other in list(self._slots.items()):
                if other is slot:
                    del self._slots[known]
            self._in_use -= slot.nbytes
            self._live -= slot.requested
            self._events.append(slot.lane.gave)
            if self._tracked:
                self._note_given(slot, None)
            slot.handle = None
            if slot.block.slab is not None:
                self._limbo.append(slot)
        self._sweep()
