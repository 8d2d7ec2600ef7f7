"""Kernels compiled once for what changes their code, and facts of the device that both directions plan with.

A launch is kept under the addresses, sizes and strides of its call: a training step makes the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from ...cuda_launch import Launch
from ...triton_version import launch_options

L2_BYTES = 24 * 2**20  # of L2 that one section of heads may fill: about half of an H100's
MOST_LAUNCHES = 1024
T = TypeVar("T")


class LaunchCache(Generic[T]):
    """What was prepared for a call, by its key; at most MOST_LAUNCHES, then it starts anew."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], T] = {}

    def get(self, key: tuple[object, ...], prepare: Callable[[], T]) -> T:
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= MOST_LAUNCHES:
                self._kept.clear()
            kept = self._kept[key] = prepare()
        return kept

    def clear(self) -> None:
        self._kept.clear()


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device the current one; nothing where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


compiled_kernels: dict[tuple[Any, ...], Any] = {}


def prepare(kernel: Any, key: tuple[Any, ...], grid: int, arguments: tuple[Any, ...], num_warps: int) -> Launch:
    """The launch of kernel[(grid,)](*arguments) on the current device.

    The key must tell apart whatever changes the code: dtypes, boxes, constexprs, which arguments are None. The kernel
    specialises on nothing else (do_not_specialize, numbers with a type), else a stale kernel would run.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = (kernel, device, *key)
    compiled = compiled_kernels.get(key)
    if compiled is None:
        compiled = compiled_kernels[key] = kernel.warmup(
            *arguments, grid=(grid,), num_warps=num_warps, **launch_options()
        )
    return Launch(compiled, (grid,), arguments, device)
