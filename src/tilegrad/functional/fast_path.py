"""The fast path of eager calls of attention in C++ (fast_path.cpp), if it was built. Without it the same calls run in Python:
the bits are the same, but the host takes longer."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from ..native.extension import NativeModule

_HERE = Path(__file__).parent
MODULE = NativeModule(
    "tilegrad_fast_path", _HERE / "fast_path.cpp", ("c10", "torch_cpu", "torch", "torch_python"), _HERE
)


@functools.cache
def load() -> ModuleType | str:
    """The module, or the reason why eager calls run in Python and what to do."""
    return MODULE.load()
