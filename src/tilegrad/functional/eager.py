"""The fast path of eager calls of attention in C++ (eager.cpp), if it was built. Without it the same calls run in Python: the
bits are the same, but the host takes longer."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from ..native.extension import NativeModule

_HERE = Path(__file__).parent
MODULE = NativeModule("tilegrad_eager", _HERE / "eager.cpp", ("c10", "torch_cpu", "torch", "torch_python"), _HERE)


@functools.cache
def load() -> ModuleType | str:
    """The module, or the reason why eager calls run in Python and what to do."""
    return MODULE.load()
