"""Buffers of a manager for the length of a call, or of torch's allocator where there is no manager.

A call takes one buffer of bytes and lays all that it needs into it: one request each time, whatever the number of
branches, so that a cache of a few buffers serves it. An op of torch.library can't take a manager. It takes the manager's
number, and 0 stands for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..kernels.scratch import Scratch, Shapes
from ..memory.managed.manager import AttentionBufferManager
from ..memory.types import BufferType

ALIGNED_BYTES = 256
_managers: WeakValueDictionary[int, AttentionBufferManager] = WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def number_of(manager: AttentionBufferManager | None) -> int:
    """What stands for a manager in the arguments of an op."""
    if manager is None:
        return 0
    _managers[id(manager)] = manager
    return id(manager)


@contextmanager
def borrowed(number: int, type: BufferType, nbytes: int, device: torch.device) -> Iterator[Tensor]:
    """Bytes, uninitialised. A manager that is gone, as its module may be before a backward, counts as none."""
    manager = _managers.get(number)
    if manager is None or not nbytes:
        yield torch.empty(nbytes, dtype=torch.uint8, device=device)
        return
    buffer = manager.allocate(type, (nbytes,), torch.uint8, device, zero_init=False)
    try:
        yield buffer
    finally:
        manager.deallocate(buffer, type)


def bytes_of(shapes: Shapes) -> int:
    return sum(_rounded(prod(shape) * dtype.itemsize) for shape, dtype in shapes.values())


def laid_out(shapes: Shapes, buffer: Tensor) -> Scratch:
    """Views of the buffer, one after the other."""
    out, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        nbytes = prod(shape) * dtype.itemsize
        out[name] = buffer[start : start + nbytes].view(dtype).view(shape)
        start += _rounded(nbytes)
    return out


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
