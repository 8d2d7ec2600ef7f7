"""Buffers of a fixed program (planned/) and buffers on demand (managed/), with shared types and one HTML timeline.

planned/   a program that is the same every time: trace it on handles, plan every byte, bind tensors
managed/   sizes that vary: `AttentionBufferManager` hands out, caches and takes back typed buffers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .managed.manager import AttentionBufferManager, create_attention_buffer_manager
    from .planned.arena import Arenas, MemoryPlan, plan_memory, poison_dead
    from .planned.report import MemoryReport, memory_report
    from .planned.trace import Handle, Trace, bind, trace
    from .types import BufferConfig, BufferStateError, BufferType

_NAMES = {  # module → its public names
    "managed.manager": ("AttentionBufferManager", "create_attention_buffer_manager"),
    "planned.arena": ("Arenas", "MemoryPlan", "plan_memory", "poison_dead"),
    "planned.report": ("MemoryReport", "memory_report"),
    "planned.trace": ("Handle", "Trace", "bind", "trace"),
    "types": ("BufferConfig", "BufferStateError", "BufferType"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "Arenas",
    "AttentionBufferManager",
    "BufferConfig",
    "BufferStateError",
    "BufferType",
    "Handle",
    "MemoryPlan",
    "MemoryReport",
    "Trace",
    "bind",
    "create_attention_buffer_manager",
    "memory_report",
    "plan_memory",
    "poison_dead",
    "trace",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilegrad.memory' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
