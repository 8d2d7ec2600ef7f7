"""Scratch from an AttentionBufferManager for the duration of a call.

A call borrows one TEMP buffer for all of its scratch, so that a few cached buffers are enough. If a backward follows, the
forward requests as many bytes as the backward, because two alternating sizes would evict each other from the cache. A
torch.library op can't take a manager, so it takes the manager's number; 0 means none. Tensors that are returned or saved for
the backward come from torch, never from the manager.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..memory.types import BufferType

if TYPE_CHECKING:
    from ..memory.managed.manager import AttentionBufferManager

_managers: WeakValueDictionary[int, AttentionBufferManager] = WeakValueDictionary()


def number_of(manager: AttentionBufferManager | None) -> int:
    """The number that an op takes instead of the manager; 0 for None."""
    if manager is None:
        return 0
    _managers[id(manager)] = manager
    return id(manager)


number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator loads all of Dynamo


def borrow(
    number: int, type: BufferType, nbytes: int, device: torch.device
) -> tuple[Tensor, AttentionBufferManager | None]:
    """Uninitialised bytes, and the manager whose `deallocate` takes them back, or None if they are from torch. A manager that
    no longer exists, because its module was deleted before the backward, counts as none."""
    manager = _managers.get(number) if number else None
    if manager is not None and nbytes:
        return manager.allocate(type, (nbytes,), torch.uint8, device, zero_init=False), manager
    return torch.empty_strided((nbytes,), (1,), dtype=torch.uint8, device=device) if nbytes else _empty(device), None


@functools.cache
def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


@contextmanager
def borrowed(number: int, type: BufferType, nbytes: int, device: torch.device) -> Iterator[Tensor]:
    buffer, manager = borrow(number, type, nbytes, device)
    try:
        yield buffer
    finally:
        if manager is not None:
            manager.deallocate(buffer, type)
