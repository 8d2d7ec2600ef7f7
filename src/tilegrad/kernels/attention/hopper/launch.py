"""Compilation and launches, shared by both directions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...cache import remember
from ...cuda_launch import Launch
from ...triton_key import set_key
from ...triton_version import launch_options
from ..problem import Sizes
from ..triton.fit import KernelCall

L2_BYTES = 24 * 2**20  # most bytes of an L2 section: about half of an H100's L2


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device the current one, if it isn't."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launches_of(calls: list[KernelCall], device: int) -> list[Launch]:
    """The launches of Triton's kernels."""
    return [launch for call in calls if (launch := call.launch(device)) is not None]


def right_of(sizes: Sizes, *, softcap: bool) -> int | None:
    """The argument `right` of a kernel. With a window or a softcap it is a number, so that fewer kernels are
    compiled."""
    return sizes.bounds[1] if softcap or sizes.left is not None else sizes.right


compiled_kernels: dict[tuple[Any, ...], Any] = {}


def prepare(kernel: Any, key: tuple[Any, ...], grid: int, arguments: tuple[Any, ...], num_warps: int) -> Launch:
    """The launch of kernel[(grid,)](*arguments) on the current device.

    The key must contain whatever changes compiled code: dtypes, boxes, constexprs, which arguments are None. The kernel must
    specialise on nothing else (do_not_specialize, typed numbers); otherwise a stale kernel would run.
    """
    set_key(kernel)
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = (kernel, device, *key)
    compiled = compiled_kernels.get(key)
    if compiled is None:
        compiled = kernel.warmup(*arguments, grid=(grid,), num_warps=num_warps, **launch_options())
        remember(compiled_kernels, key, compiled)
    return Launch(compiled, (grid,), arguments, device)
