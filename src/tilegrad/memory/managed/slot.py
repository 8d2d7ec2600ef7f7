"""One buffer of the manager, in use or cached: its bytes, its tensor, and whether anything else references them.

A slot has only a weak reference to its tensor. The caller owns the tensor while the buffer is in use, the pool owns it while
the buffer is cached. Three counts say whether anything else references a buffer when it is freed:

    tensor._use_count()        graphs that saved it, DLPack exports, views (through `_base`)
    the storage's use count    aliases: views, detach(), numpy()
    the storage's references   a storage object that someone took
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..types import BufferConfig, BufferStateError, BufferType
from .slab import Block

storage_use_count = torch._C._storage_Use_Count
use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
references = sys.getrefcount
_NAN_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_POISON_BYTE = 0xCB
SLACK = 1.25


class Key(NamedTuple):
    type: BufferType
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Handle(weakref.ref[Tensor]):
    """The manager's weak reference to a tensor in use. When the tensor dies, `dropped` of BufferCache gets this handle."""

    __slots__ = ("slot",)
    slot: Slot


@dataclass(slots=True, eq=False)
class Pool:
    """The cached buffers of one (type, device), least recently freed first. The caller that takes a buffer out of `free` owns
    the tensor of this buffer."""

    type: BufferType
    device: torch.device
    config: BufferConfig
    pinned: bool
    on_cuda: bool
    limit: int
    free: dict[Slot, Tensor] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    quarantined: int = 0


class FreeList:
    """The cached buffers of one exact key. `slots` is only a hint, and may lack a buffer: a buffer is cached if it is in `free`
    of the pool. `took` and `gave` are the events of this key for pattern learning."""

    __slots__ = ("dtype", "gave", "key", "most", "nbytes", "pool", "shape", "slots", "took")

    def __init__(self, key: Key, pool: Pool) -> None:
        self.key, self.pool = key, pool
        self.shape, self.dtype, self.nbytes = key.shape, key.dtype, key.nbytes
        self.most = int(SLACK * key.nbytes)
        self.slots: list[Slot] = []
        self.took = (key, 1)
        self.gave = (key, -1)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def shaped(storage: torch.UntypedStorage, key: Key) -> Tensor:
    """A contiguous tensor from the first byte of the storage on. It is not a view, and works in and out of inference mode."""
    with torch.inference_mode(mode=False), torch.no_grad():
        tensor = torch.empty(0, dtype=key.dtype, device=key.device)
        return tensor.set_(storage, 0, key.shape, contiguous_strides(key.shape))


def detach_storage(tensor: Tensor) -> None:
    """Replaces the storage of a freed tensor, so that a variable that still refers to the tensor keeps no bytes of the
    buffer."""
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


class Slot:
    __slots__ = (
        "alone",
        "block",
        "cdata",
        "free_list",
        "freed",
        "handle",
        "ident",
        "nbytes",
        "poison",
        "pool",
        "ptr",
        "scope",
        "slack",
        "stamp",
        "storage_bytes",
        "storage_object",
        "storage_refs",
        "zero",
    )

    def __init__(self, free_list: FreeList, base: Tensor, block: Block) -> None:
        self.pool, self.free_list, self.block = free_list.pool, free_list, block
        self.nbytes = block.nbytes
        self.slack = block.nbytes - free_list.nbytes
        self.zero = free_list.pool.config.zero_init
        self.stamp = 0
        self.scope = ""
        self.poison: torch.dtype | None = None
        self.freed: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self.ident = 0
        self.storage_bytes = base.numel()
        self.storage_object = weakref.ref(base.untyped_storage())
        self.cdata: int = base.untyped_storage()._cdata
        self.ptr = base.data_ptr()
        self.handle: Handle | None = None

    def learn_alone(self) -> None:
        """Records the counts that mean "no other reference". Called once, while only one tensor has the bytes."""
        storage = self.storage_object()
        self.storage_refs, self.alone = references(storage), storage_use_count(self.cdata)

    def watch(self, tensor: Tensor, dropped: Callable[[Handle], object]) -> None:
        """Makes `tensor` the tensor of this slot. `dropped` is called with its handle when the tensor dies."""
        handle = Handle(tensor, dropped)
        handle.slot = self
        self.ident, self.handle = id(tensor), handle

    def is_dying(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the tensor of this slot, but the weak reference to it is already cleared. This happens in
        a finalizer that frees the buffer: the garbage collector clears the weak references to a cycle before it calls
        finalizers. The buffer then counts as dropped."""
        return self.handle is not None and self.handle() is None and tensor.untyped_storage() is self.storage_object()

    def held_elsewhere(self, tensor: Tensor) -> bool:
        """Whether anything but a variable references the bytes. `allocate` and `deallocate` inline this function for speed."""
        storage = self.storage_object()  # this reference keeps the storage at `cdata` alive
        return (
            storage is None
            or use_count(tensor) != 1
            or references(storage) != self.storage_refs
            or storage_use_count(self.cdata) != self.alone
        )

    def moved(self, tensor: Tensor) -> bool:
        """Whether the tensor no longer begins at the address of its buffer."""
        return tensor.data_ptr() != self.ptr

    def restore_layout(self, tensor: Tensor) -> None:
        """Undoes a resize_ or t_ of the caller."""
        shape = self.free_list.shape
        if tensor.shape != shape or not tensor.is_contiguous():
            tensor.set_(tensor.untyped_storage(), 0, shape, contiguous_strides(shape))

    def retarget(self, old: Tensor, free_list: FreeList) -> Tensor:
        """A tensor of another shape or dtype over the same bytes: `old` itself, or a new tensor for `watch`."""
        same_dtype = free_list.dtype is self.free_list.dtype
        self.free_list, self.slack = free_list, self.nbytes - free_list.nbytes
        if same_dtype and not old.requires_grad:
            return old.resize_(free_list.shape)
        new = shaped(old.untyped_storage(), free_list.key)
        detach_storage(old)
        return new

    def poison_bytes(self, tensor: Tensor) -> None:
        self._raw(tensor).fill_(_POISON_BYTE)
        self.poison = tensor.dtype
        if self.poison in _NAN_DTYPES:
            tensor.fill_(float("nan"))

    def check_poison(self, tensor: Tensor) -> None:
        """Raises if a byte has changed since the buffer was freed."""
        if self.poison is None:
            return
        raw, dtype = self._raw(tensor), self.poison
        self.poison = None
        expected = torch.full_like(raw, _POISON_BYTE)
        if dtype in _NAN_DTYPES:
            used = self.free_list.nbytes
            nan = torch.full((used // dtype.itemsize,), float("nan"), dtype=dtype, device=raw.device)
            expected[:used] = nan.view(torch.uint8)
        changed = (raw != expected).nonzero()
        if len(changed):
            key = self.free_list.key
            raise BufferStateError(
                f"a {key.type.name} buffer {key.shape} {key.dtype} was written after deallocate: {len(changed)} bytes "
                f"changed, the first at byte {int(changed[0])}; do not use a tensor after deallocate"
            )

    def _raw(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        return shaped(
            storage, Key(self.free_list.key.type, (storage.nbytes(),), torch.uint8, self.free_list.key.device)
        )

    def mark_freed(self) -> None:
        """Records an event after the work of the current stream on the buffer."""
        stream = torch.cuda.current_stream(self.pool.device)
        event = torch.cuda.Event()
        event.record(stream)
        self.freed = (stream, event)

    def await_freed(self, tensor: Tensor) -> None:
        """Makes the current stream wait for the stream that freed the buffer, if it is another stream."""
        assert self.freed is not None
        stream, event = self.freed
        current = torch.cuda.current_stream(self.pool.device)
        if current != stream:
            current.wait_event(event)
            if self.block.region is not None:
                self.block.region.record_stream(current)
            else:
                tensor.record_stream(current)
        self.freed = None
