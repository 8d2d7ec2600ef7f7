"""Where buffers live: managed (`AttentionBufferManager`) or planned (trace, plan, arena), with one vocabulary."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .managed.manager import AttentionBufferManager, create_attention_buffer_manager
    from .types import BufferConfig, BufferStateError, BufferType

_HOMES = {
    "AttentionBufferManager": "managed.manager",
    "create_attention_buffer_manager": "managed.manager",
    "BufferConfig": "types",
    "BufferStateError": "types",
    "BufferType": "types",
}

__all__ = [
    "AttentionBufferManager",
    "BufferConfig",
    "BufferStateError",
    "BufferType",
    "create_attention_buffer_manager",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilegrad.memory' has no attribute {name!r}")
    return getattr(import_module(f"tilegrad.memory.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
