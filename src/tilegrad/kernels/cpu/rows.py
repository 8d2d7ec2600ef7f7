"""What norm/cpu.py, activation/cpu.py and column_sum/cpu.py share. Their kernels are in csrc/rows/norm_gelu.cpp.

The kernels take float32, or bfloat16 converted to float32 in registers. Means, sums and gradients of parameters are float32.
They need no scratch. Threads share the rows of a norm, the columns of a sum over rows, or the elements of an activation; the
result does not depend on the number of threads.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..scratch import TensorLike
from . import library
from .abi import DTYPES as ALL_DTYPES

DTYPES = {dtype: ALL_DTYPES[dtype] for dtype in (torch.float32, torch.bfloat16)}


def refusal(x: TensorLike) -> str | None:
    """Why these kernels cannot run on x, from its dtype and device alone; None if they can."""
    return library.refusal(x.device) or (None if x.dtype in DTYPES else _takes_not(x.dtype))


@functools.cache
def _takes_not(dtype: torch.dtype) -> str:
    return f"takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"


def shared(x: Tensor, params: torch.dtype, *, accumulate: bool = False) -> tuple[int, ...]:
    """The first fields of `Norm`, up to `param_dtype`. params: the dtype of w and b."""
    n, c = x.shape
    return n, c, torch.get_num_threads(), library.isa(), accumulate, DTYPES[x.dtype], DTYPES[params]


def rows(x: Tensor | None) -> tuple[int, int]:
    """`Rows`: address and row stride, in elements."""
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
