"""Runs a Gluon kernel in plain Python. README.md says what is emulated, what is checked and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITCallable

from support.gluon.language import Language
from support.gluon.schedule import Schedule
from support.gluon.shared_memory import beginning, fence_async_shared, mbarrier
from support.gluon.tensor_core import warpgroup_mma, warpgroup_mma_wait
from support.gluon.tma import Descriptor, tma, tma_load, tma_reduce_add, tma_store
from support.gluon.values import Number, Pointer

REPLACED: dict[str, Any] = {
    "tma": tma,
    "mbarrier": mbarrier,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": fence_async_shared,
    "barrier": lambda: None,
    "beginning": beginning,
    "tma_load": tma_load,
    "tma_store": tma_store,
    "tma_reduce_add": tma_reduce_add,
}


@contextmanager
def in_python(*modules: ModuleType, seed: int = 0) -> Iterator[Callable[..., None]]:
    """Yields launch(kernel, grid, arguments). Inside, the device functions of `modules` are plain functions."""
    kept = [(module, name, value) for module in modules for name, value in vars(module).items()]
    try:
        for module, name, value in kept:
            if isinstance(value, JITCallable):
                setattr(module, name, value.fn)
            elif type(value).__name__ == "constexpr":
                setattr(module, name, Number(value.value) if isinstance(value.value, int) else value.value)
            elif name in REPLACED:
                setattr(module, name, REPLACED[name])
            elif name in ("gl", "tl"):
                setattr(module, name, Language())

        def launch(kernel: Any, grid: int, arguments: tuple[Any, ...]) -> None:
            function, of = getattr(kernel, "fn", kernel), tuple(map(_argument, arguments))
            Schedule(seed).run([lambda: function(*of)] * grid)

        yield launch
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def _argument(x: Any) -> Any:
    if hasattr(x, "block_shape"):
        return Descriptor(x.base, list(x.shape), list(x.strides), [Number(n) for n in x.block_shape])
    if isinstance(x, int) and not isinstance(x, bool):
        return Number(x)
    return Pointer.of(x) if isinstance(x, Tensor) else x
