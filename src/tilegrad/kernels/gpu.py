"""Host functions shared by the Triton kernels: when they cannot run, how they are launched, the size of a device."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .scratch import TensorLike
from .table import Kernel, Table, takes_all
from .triton_key import set_key
from .triton_version import launch_options

OLDEST = (8, 0)  # compute capability: bfloat16 and asynchronous copies
INTERPRETED_MULTIPROCESSORS = 8


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(x: TensorLike) -> str | None:
    """Why no Triton kernel can run on x, from its dtype and device alone; None if one can."""
    return _refusal(x.dtype, x.device, interpreted=interpreting())


@functools.cache
def _refusal(dtype: torch.dtype, device: torch.device, *, interpreted: bool) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed (pip install triton)"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if device.type == "cpu":
        only = "needs a CUDA device; on a CPU it runs only in Triton's interpreter: set TRITON_INTERPRET=1"
        return None if interpreted else only
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    found = capability(device)
    return None if found >= OLDEST else f"needs compute capability 8.0 or newer; {device} has {found[0]}.{found[1]}"


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor): (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 8 for the CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def triton_else_torch(op: str, refuses: Callable[[Any], str | None] = lambda problem: refusal(problem[0])) -> Table:
    """The table of an op with two kernels: <op>/triton_ops.py and, if that refuses a call, <op>/torch_ops.py."""
    triton = Kernel("triton", f"{op}.triton_ops", refuses)
    return Table(op, (triton, Kernel("torch", f"{op}.torch_ops", takes_all)))


class JITKernel(Protocol):
    """A @triton.jit function: kernel[grid](…) launches it."""

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., object]: ...


def launch(
    kernel: JITKernel, grid: tuple[int, ...], x: torch.Tensor, /, *arguments: object, **constants: object
) -> None:
    """kernel[grid](x, *arguments, **constants) on the device of x. Does nothing for an empty grid. `constants` may override a
    default launch option."""
    if all(grid):
        set_key(kernel)
        with torch.cuda.device_of(x):
            kernel[grid](x, *arguments, **{**launch_options(), **constants})


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded(n: int) -> int:
    """The next power of two: the sizes of Triton tiles are powers of two."""
    return 1 << max(n - 1, 0).bit_length()
