"""What the Triton kernels share on the host: the calls that none of them takes, and a device's size."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

OLDEST = (8, 0)  # compute capability: bfloat16, and copies that go ahead of the arithmetic
INTERPRETED_MULTIPROCESSORS = 8


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton's kernels run on the CPU, line by line."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(x: Any) -> str | None:
    """Why no Triton kernel can run on x, from its dtype and device alone; None where one can."""
    return _refusal(x.dtype, x.device, interpreted=interpreting())


@functools.cache
def _refusal(dtype: torch.dtype, device: torch.device, *, interpreted: bool) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed (pip install triton)"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if device.type == "cpu":
        only = "needs a CUDA device; on the CPU only Triton's interpreter, TRITON_INTERPRET=1"
        return None if interpreted else only
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    found = capability(device)
    return None if found >= OLDEST else f"needs compute capability 8.0 or newer, and {device} has {found[0]}.{found[1]}"


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 8 for the CPU, where GPU kernels run interpreted."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def padded(n: int) -> int:
    """The next power of two: a Triton tile's sizes are powers of two."""
    return 1 << max(n - 1, 0).bit_length()
