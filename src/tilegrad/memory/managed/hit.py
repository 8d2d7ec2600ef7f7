"""The manager's hits in C++, where they were built: hit.cpp says which calls that are. Without it the same calls go through
manager.py, to the same effect: only the time of the host differs.

hit.cpp reads the attributes of the manager's objects where they lie, so their classes have `__slots__`.
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
in_python: dict[str, Callable[..., Any]] = {}  # the manager's functions of Python
MODULE = NativeModule("tilegrad_hit", _HERE / "hit.cpp", ("c10",), _HERE)


@functools.cache
def load() -> ModuleType | str:
    """The module, or the reason why hits go through Python instead and what to do."""
    found = MODULE.load()
    tensor = torch.empty(0)
    if isinstance(found, ModuleType) and not found.fits(tensor, tensor._cdata):
        return f"does not know the layout of a tensor's object in torch {torch.__version__}"
    return found


def shorten(manager: type[Any], *parts: type[Any], cpu: torch.device) -> None:
    """Puts the functions of C++ before `manager.allocate` and `manager.deallocate`. Each calls the function of Python for
    whatever is no plain hit. parts: the classes of cache, free list, pool and slot."""
    takes, gives = vars(manager)["allocate"], vars(manager)["deallocate"]
    in_python.update(allocate=takes, deallocate=gives)
    module = load()
    if isinstance(module, str):
        return
    module.use(manager, *parts, cpu, takes.__defaults__[0], torch._C._len_torch_function_stack)
    module.fall_back(takes, gives)
    manager.allocate, manager.deallocate = module.methods()
