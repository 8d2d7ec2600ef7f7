"""Eager calls of attention in C++, where they were built: eager.cpp says what they do. Without them the same calls go through
Python, to the same bits: only the time of the host differs."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from ..native.extension import NativeModule

_HERE = Path(__file__).parent
MODULE = NativeModule("tilegrad_eager", _HERE / "eager.cpp", ("c10", "torch_cpu", "torch", "torch_python"), _HERE)


@functools.cache
def load() -> ModuleType | str:
    """The module, or the reason why eager calls go through Python instead and what to do."""
    return MODULE.load()
