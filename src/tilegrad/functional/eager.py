"""Fast path of eager calls of attention in C++, if it was built; eager.cpp says what it does. Without it the same calls run in
Python with the same bits and only take more host time."""

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
