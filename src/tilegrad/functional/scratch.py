"""Scratch that an AttentionBufferManager lends for the length of a call.

A call borrows one TEMP buffer for all of its scratch, so that a cache of a few buffers serves it. Where a backward follows, the
forward asks for as many bytes as the backward: two sizes by turns would evict each other from the cache. An op of torch.library
can't take a manager; it takes the manager's number, and 0 means none. What is returned or saved for the backward is torch's,
never the manager's.
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
    """The manager's number among the arguments of an op."""
    if manager is None:
        return 0
    _managers[id(manager)] = manager
    return id(manager)


number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorators load all of Dynamo


def borrow(
    number: int, type: BufferType, nbytes: int, device: torch.device
) -> tuple[Tensor, AttentionBufferManager | None]:
    """Uninitialised bytes, and the manager that gets them back by `deallocate`; None where they are torch's. A manager that is
    gone, as its module may be before a backward, counts as none."""
    manager = _managers.get(number) if number else None
    if manager is not None and nbytes:
        return manager.allocate(type, (nbytes,), torch.uint8, device, zero_init=False), manager
    return torch.empty_strided((nbytes,), (1,), dtype=torch.uint8, device=device) if nbytes else _nothing(device), None


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


@contextmanager
def borrowed(number: int, type: BufferType, nbytes: int, device: torch.device) -> Iterator[Tensor]:
    buffer, manager = borrow(number, type, nbytes, device)
    try:
        yield buffer
    finally:
        if manager is not None:
            manager.deallocate(buffer, type)
