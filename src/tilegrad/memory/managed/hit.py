"""The fast path of the manager's cache hits, in C++, if it was built. hit.cpp lists the calls that it handles. Without it
the same calls run in manager.py with the same result and only take more host time.

hit.cpp reads attributes at their offset in the object, so the classes of the manager have `__slots__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...native.extension import NativeModule

_HERE = Path(__file__).parent
python_methods: dict[str, Callable[..., Any]] = {}  # allocate and deallocate of manager.py
MODULE = NativeModule("tilegrad_hit", _HERE / "hit.cpp", ("c10",), _HERE)


@functools.cache
def load() -> ModuleType | str:
    """The module, or the reason why it cannot be used and what to do."""
    module = MODULE.load()
    tensor = torch.empty(0)
    if isinstance(module, ModuleType) and not module.fits(tensor, tensor._cdata):
        return f"cannot read tensor objects of torch {torch.__version__}: their layout is different"
    return module


def install_fast_path(manager: type[Any], *parts: type[Any], cpu: torch.device) -> None:
    """Replaces `manager.allocate` and `manager.deallocate` by the C++ functions, which call the Python functions for
    everything that is not a plain cache hit. parts: the classes of cache, free list, pool and slot."""
    takes, gives = vars(manager)["allocate"], vars(manager)["deallocate"]
    python_methods.update(allocate=takes, deallocate=gives)
    module = load()
    if isinstance(module, str):
        return
    module.use(manager, *parts, cpu, takes.__defaults__[0], torch._C._len_torch_function_stack)
    module.fall_back(takes, gives)
    manager.allocate, manager.deallocate = module.methods()
