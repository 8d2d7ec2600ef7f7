"""`AttentionBufferManager`: allocates typed buffers and caches freed ones for reuse.

    allocate    a buffer of the same key is cached → its tensor, unchanged;
                a buffer of another key has the right size → a tensor of the requested shape over the same bytes;
                otherwise → new memory from a strategy, after cached buffers were dropped to make room
    deallocate  only the caller references the buffer → cached;  otherwise → quarantined: forgotten, never handed out

A cached buffer belongs to one (type, device). It serves every shape and dtype that needs between 1/1.25 of its size and its
whole size. Cached buffers are dropped under memory pressure, if in use + cached would exceed the high-water mark, and if the
cache exceeds `max_bytes` or, per (type, device), 10 (reuse high) or 5 buffers. The least recently freed are dropped first.

Threads share a manager without a lock, any call may be interrupted, and finalizers may free buffers. cache.py explains why this
is safe.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..types import DEFAULT_CONFIGS, BufferConfig, BufferStateError, BufferType
from .cache import BufferCache, one_device, one_type
from .hit import install_fast_path
from .pattern import PatternLearner, demand
from .pressure import PressureSource, memory_pressure
from .profile import Life, OpenScope, Profile, Scope, ScopeStats, cache_stats, chrome_trace, lives_page
from .slab import MIB
from .slot import FreeList, Key, Pool, Slot, detach_storage, references, storage_use_count, use_count
from .strategies import Strategies

_CPU = one_device("cpu")
_MAX_EVENTS = 1 << 16
_SQUARE = (BufferType.SCORES, BufferType.WEIGHTS)
_ATTENTION = (BufferType.QUERY, BufferType.KEY, BufferType.VALUE, BufferType.OUTPUT, *_SQUARE)

_OURS = 2  # references to a cached tensor that `allocate` itself has: a local variable, an argument

_mode_stack_depth = torch._C._len_torch_function_stack


def default_device() -> torch.device:
    """torch's default device. An empty mode stack (checked in 0.1 µs) means that nobody changed it."""
    return torch.get_default_device() if _mode_stack_depth() else _CPU


class AttentionBufferManager:
    """Allocates typed buffers and caches freed ones; the module docstring has the rules.

    enable_preallocation   a buffer of the typical size of each type is cached from the start
    lightweight            no profiling, no stats per scope, no error if a tensor is used after its buffer was reused
    debug                  freed buffers are filled with NaN or 0xCB, and `allocate` raises if one was written afterwards
    pressure               device → the used share of its memory, in [0, 1]; see `tilegrad.memory.managed.pressure`
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_cache",
        "_debug",
        "_device",
        "_events",
        "_following",
        "_learner",
        "_preallocation",
        "_profile",
        "_reuse",
        "_scope",
        "_scopes",
        "_tracked",
    )
    _shared: ClassVar[dict[str, AttentionBufferManager]] = {}

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
                raise ValueError(f"{name}=True with lightweight=True: nothing is tracked; pass lightweight=False")
        if enable_preallocation and not enable_reuse:
            raise ValueError("enable_preallocation=True with enable_reuse=False: pass enable_reuse=True")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes: got {max_bytes!r}; accepted: None (no limit) or an int ≥ 0")
        configs = {**DEFAULT_CONFIGS, **{one_type(t): c for t, c in (custom_configs or {}).items()}}
        for type, config in configs.items():
            if not isinstance(config, BufferConfig):
                raise TypeError(f"custom_configs[{type.name}]: got {config!r}; accepted: a BufferConfig")
        self._reuse, self._tracked, self._debug = enable_reuse, not lightweight, debug
        self._preallocation = enable_preallocation
        self._device = None if device is None else one_device(device)
        self._cache = BufferCache(
            configs,
            reuse=enable_reuse,
            max_bytes=max_bytes,
            pressure=pressure,
            strategies=strategies or Strategies(),
        )
        self._events: deque[tuple[Key, int]] = deque(maxlen=_MAX_EVENTS)
        self._learner: PatternLearner[Key] = PatternLearner()
        self._following = False
        self._scope: ContextVar[OpenScope | None] = ContextVar("scope", default=None)
        self._scopes: dict[str, ScopeStats] = {}
        self._profile = Profile() if enable_profiling else None
        weakref.finalize(self, self._cache.clear, None).atexit = False
        if enable_preallocation:
            where = self._device or default_device()
            typical = {t: int(c.typical_size_mb * MIB) for t, c in configs.items()}
            self._cache.ready({Key(t, (n,), torch.uint8, where): 1 for t, n in typical.items()})

    @classmethod
    def shared(cls, name: str) -> AttentionBufferManager:
        """The tracked manager with this name, which the process shares. It is made on first use."""
        manager = cls._shared.get(name)
        return cls._shared.setdefault(name, cls()) if manager is None else manager

    @property
    def configs(self) -> Mapping[BufferType, BufferConfig]:
        """The config of each type, with `custom_configs` applied."""
        return MappingProxyType(self._cache.configs)

    @property
    def enable_reuse(self) -> bool:
        return self._reuse

    @property
    def enable_preallocation(self) -> bool:
        return self._preallocation

    def allocate(
        self,
        type: BufferType,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        zero_init: bool | None = None,
    ) -> Tensor:
        """A contiguous buffer, uninitialised unless `zero_init`. zero_init=None uses the type's config."""
        # Longer than 60 lines because a call of a helper function would take a tenth of the time of a hit.
        profile = self._profile
        began = 0 if profile is None else profile.now()
        if device is None:
            device = self._device
            if device is None:
                device = torch.get_default_device() if _mode_stack_depth() else _CPU
        cache = self._cache
        if cache.dropped:
            self._reap()
        try:
            free_list = cache.free_lists[type, shape, dtype, device]
        except (KeyError, TypeError):
            free_list = cache.free_list(type, shape, dtype, device)
        pool = free_list.pool
        try:
            slot = free_list.slots.pop()
            tensor = pool.free.pop(slot, None)
        except IndexError:
            tensor = None
        hit = tensor is not None
        if tensor is not None:
            pool.hits += 1
        else:  # no cached buffer of this key, or another thread took it first
            slot, tensor, hit = cache.find(free_list)
        tracked = self._tracked
        storage = slot.storage_object()  # this reference keeps the storage at `cdata` alive
        if hit and (
            tensor.shape != free_list.shape
            or not tensor.is_contiguous()
            or tensor.data_ptr() != slot.ptr
            or tracked
            and (
                storage is None
                or use_count(tensor) != 1
                or references(storage) != slot.storage_refs
                or storage_use_count(slot.cdata) != slot.alone
                or references(tensor) > _OURS
                or self._debug
            )
        ):
            del storage
            slot, tensor, hit = self._look_again(slot, tensor, named=tracked and references(tensor) > _OURS)
        if tracked:
            slot.scope = "" if self._scope.get() is None else self._scope_name()
        if slot.freed is not None:
            slot.await_freed(tensor)
        cache.slots[slot.ident] = slot
        self._events.append(free_list.took)
        if slot.scope or profile is not None:
            self._note_taken(slot, began, hit=hit)
        if zero_init or (zero_init is None and slot.zero):
            tensor.zero_()
        return tensor

    def deallocate(self, tensor: Tensor, type: BufferType | None = None) -> None:
        """Returns the buffer to the cache. Do not use the tensor afterwards, even if a variable still refers to it."""
        profile = self._profile
        began = 0 if profile is None else profile.now()
        cache = self._cache
        slots = cache.slots
        ident = id(tensor)
        try:
            slot = slots[ident]
        except KeyError:
            raise self._not_in_use(tensor) from None
        handle = slot.handle
        if handle is None or handle() is not tensor:
            if slot.is_dying(tensor):
                return
            raise self._not_in_use(tensor)
        pool, free_list = slot.pool, slot.free_list
        if type is not None and type is not pool.type and one_type(type) is not pool.type:
            raise BufferStateError(f"type={type!r}: this buffer has type {pool.type.name}; pass that or nothing")
        if tensor.requires_grad:
            raise BufferStateError(
                f"a {pool.type.name} buffer with {'grad_fn' if tensor.grad_fn else 'requires_grad=True'} belongs "
                "to a graph; drop it instead, the graph frees it"
            )
        if profile is not None:
            profile.end(slot, began_ns=began)
        storage = slot.storage_object()
        if (
            storage is None
            or use_count(tensor) != 1
            or references(storage) != slot.storage_refs
            or storage_use_count(slot.cdata) != slot.alone
            or self._debug
            and slot.moved(tensor)
        ):
            cache.quarantine(slot)
            self._events.append(free_list.gave)
            return
        del storage  # the next `allocate` counts the references to it
        if pool.on_cuda:
            slot.mark_freed()
        if self._debug:
            slot.poison_bytes(tensor)
        slot.stamp = cache.clock = clock = cache.clock + 1
        free = pool.free
        try:
            del slots[ident]  # Python checks for interrupts only around calls, so none comes before the next line
            free[slot] = tensor
        except KeyError:  # another thread freed it meanwhile
            raise self._not_in_use(tensor) from None
        free_list.slots.append(slot)
        self._events.append(free_list.gave)
        if len(free) > pool.limit or not clock & 255 or (cache.bounded and cache.is_over()):
            cache.trim()

    @contextmanager
    def buffer(
        self,
        type: BufferType,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        zero_init: bool | None = None,
    ) -> Iterator[Tensor]:
        """`allocate` on entry, `deallocate` on exit."""
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
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        types: Collection[BufferType] = _ATTENTION,
    ) -> None:
        """Makes sure that one buffer of each type is cached: (B, T, H, D), and (B, H, T, T) for SCORES and WEIGHTS."""
        if not self._reuse:
            raise ValueError("preallocate_buffers with enable_reuse=False: nothing is kept; pass enable_reuse=True")
        if isinstance(device, torch.dtype):
            raise TypeError(f"device: got {device}; accepted: a device; pass the dtype as dtype=")
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_heads": num_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: got {size!r}; accepted: an int ≥ 1")
        where = self._device or default_device() if device is None else one_device(device)
        row, square = (batch_size, seq_len, num_heads, head_dim), (batch_size, num_heads, seq_len, seq_len)
        wanted = {Key(one_type(t), square if t in _SQUARE else row, dtype, where): 1 for t in types}
        nbytes = sum(key.nbytes for key in wanted)
        if nbytes > self._cache.max_bytes:
            raise ValueError(f"preallocate_buffers: {nbytes} bytes exceed max_bytes={self._cache.max_bytes}; raise it")
        self._cache.ready(wanted)

    def clear_cache(self, type: BufferType | None = None) -> None:
        """Frees every cached buffer, or every cached buffer of one type. Buffers in use stay unchanged."""
        only = None if type is None else one_type(type)
        self._reap()
        self._cache.clear(only)

    def end_iteration(self) -> None:
        """Marks the end of an iteration. After three iterations with the same allocations, the buffers for the next one are
        cached in advance."""
        self._reap()
        events = self._events.copy()
        self._events.clear()
        self._learner.observe(demand(events) if len(events) < _MAX_EVENTS else {})
        self._cache.apply_pressure()
        if self._reuse:
            self._following = self._cache.follow(self._learner.plan)

    @contextmanager
    def scope(self, module_name: str) -> Iterator[None]:
        """In this context, allocations are counted under this name, in the innermost scope only. The name "" means no scope. A
        lightweight manager keeps no counts per scope."""
        outer, opened = self._open_scope(), Scope(module_name)
        try:
            self._scope.set((weakref.ref(opened), outer) if opened else None)
            yield
        finally:
            self._scope.set(outer)

    def _open_scope(self) -> OpenScope | None:
        """The innermost open scope. Skips scopes that an interrupt left open, which nothing references any more."""
        innermost = self._scope.get()
        while innermost is not None and innermost[0]() is None:
            innermost = innermost[1]
        return innermost

    def get_stats(self) -> dict[str, Any]:
        """Counts and bytes. `bytes_reserved` = in use + cached + idle in slabs; `bytes_peak` is its maximum. `bytes_live` is
        the sum of the requested bytes of the buffers in use; `preallocated_buffers` counts buffers made in advance.
        `buffer_types` is an alias of `per_type`."""
        self._reap()
        scopes = {
            name: asdict(stats) | {"bytes_in_use": self._scope_bytes(name)}
            for name, stats in self._scopes.copy().items()
        }
        return cache_stats(self._cache, self._profile) | {
            "pattern": {
                "alike": self._learner.alike,
                "broken": self._learner.broken,
                "learned": bool(self._learner.plan),
                "followed": self._following,
            },
            "per_scope": scopes,
        }

    def export_trace(self, path: str | Path) -> None:
        """Writes the life of every buffer as Chrome trace JSON (chrome://tracing, Perfetto)."""
        trace = chrome_trace(self._profiled("export_trace"))
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def export_html(self, path: str | Path) -> None:
        """Writes the life of every buffer as one self-contained HTML page."""
        page = lives_page(self._profiled("export_html"), self.get_stats())
        Path(path).write_text(page, encoding="utf-8")

    def _profiled(self, caller: str) -> Profile:
        if self._profile is None:
            raise ValueError(f"{caller}: this manager has no profile; create it with enable_profiling=True")
        return self._profile

    def _reap(self) -> None:
        for slot in self._cache.reap():
            self._events.append(slot.free_list.gave)
            if self._profile is not None:
                self._profile.end(slot, began_ns=None)

    def _look_again(self, slot: Slot, tensor: Tensor, *, named: bool) -> tuple[Slot, Tensor, bool]:
        """Checks a suspect cached buffer. Returns (slot, tensor, whether they came from the cache) to hand out.

        If the bytes of the cached buffer moved (a resize_ that grew), or something references them after the free, the buffer
        is quarantined and a new one is made. `named`: a variable still refers to its tensor. Then a new tensor over the same
        bytes is returned, so that a second free of the old tensor is an error. A changed shape or stride (resize_, t_) is
        undone."""
        cache = self._cache
        if self._debug:
            cache.check_poison(slot, tensor)
        if slot.moved(tensor) or self._tracked and slot.held_elsewhere(tensor):
            cache.quarantine(slot)
            slot.pool.hits -= 1
            slot.pool.misses += 1
            return *cache.make(slot.free_list), False
        if named:
            old, tensor = tensor, tensor.data
            slot.watch(tensor, cache.dropped.append)
            detach_storage(old)
        slot.restore_layout(tensor)
        return slot, tensor, True

    def _note_taken(self, slot: Slot, began_ns: int, *, hit: bool) -> None:
        if slot.scope:
            stats = self._scopes.setdefault(slot.scope, ScopeStats())
            stats.take(slot.free_list.nbytes, self._scope_bytes(slot.scope), hit=hit)
        if self._profile is not None:
            key = slot.free_list.key
            label = f"{key.type.name} {key.shape} {str(key.dtype).removeprefix('torch.')}"
            life = Life(key.type, label, slot.scope, slot.block.strategy, slot.free_list.nbytes, began_ns, None)
            self._profile.begin(slot, life, began_ns=began_ns)

    def _scope_name(self) -> str:
        innermost = self._open_scope()
        return "" if innermost is None else str(innermost[0]() or "")

    def _scope_bytes(self, name: str) -> int:
        """The requested bytes of the buffers in use that were allocated in a scope."""
        return sum(slot.free_list.nbytes for slot in list(self._cache.slots.values()) if slot.scope == name)

    def _not_in_use(self, tensor: object) -> BufferStateError:
        if not isinstance(tensor, Tensor):
            return BufferStateError(f"tensor: got {tensor!r}; accepted: a tensor from this manager's allocate")
        for pool in list(self._cache.pools.values()):
            if any(cached is tensor for cached in list(pool.free.values())):
                return BufferStateError(f"this {pool.type.name} buffer was deallocated already; call deallocate once")
        return BufferStateError(
            f"tensor of shape {tuple(tensor.shape)} is not a buffer in use of this manager: it came from elsewhere, is "
            "a view of a buffer, or was deallocated before; pass the tensor that allocate returned, once"
        )


def create_attention_buffer_manager(
    enable_reuse: bool = True,
    enable_preallocation: bool = False,
    enable_profiling: bool = False,
    lightweight: bool = True,
) -> AttentionBufferManager:
    """A manager for everyday use. `enable_profiling=True` turns `lightweight` off, because a profile needs tracking."""
    return AttentionBufferManager(
        enable_reuse=enable_reuse,
        enable_preallocation=enable_preallocation,
        enable_profiling=enable_profiling,
        lightweight=lightweight and not enable_profiling,
    )


def use_fast_path() -> None:
    """Installs the C++ fast path of cache hits, if it was built."""
    install_fast_path(AttentionBufferManager, BufferCache, FreeList, Pool, Slot, cpu=_CPU)


use_fast_path()
