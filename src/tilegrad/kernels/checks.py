"""Checks of arguments: numbers, and what ops share: shapes and dtypes, parameters, contiguous columns, aligned rows."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .scratch import accumulation_dtype

ALIGNED_BYTES = 16  # alignment of rows: TMA needs it, vector loads are faster with it


def is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, int | float) and not isinstance(x, bool)


def is_count(x: object, most: float = math.inf, least: int = 1) -> TypeGuard[int]:
    return isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


def check_tensor(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> None:
    """Checks a tensor whose shape and dtype follow from the other arguments, for example an output."""
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
        got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name}: got {got}; accepted: {dtype} {shape} on {device}")


def check_given(device: Any, *given: tuple[str, Tensor | None, tuple[int, ...], torch.dtype]) -> None:
    """`check_tensor` of each tensor that is not None."""
    for name, x, shape, dtype in given:
        if x is not None:
            check_tensor(name, x, shape, dtype, device)


def check_param(name: str, p: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Checks that a parameter has x's dtype. On a CPU it may also have the accumulation dtype: then the op rounds it, and
    no rounded copy is kept."""
    unrounded = x.device.type == "cpu" and p.dtype == accumulation_dtype(x.dtype)
    check_tensor(name, p, shape, p.dtype if unrounded else x.dtype, x.device)


def check_range(first: Tensor, rounded: Tensor | None, **tensors: Tensor) -> int:
    """Checks a range of the arenas: flat tensors of one length, in the accumulation dtype and on the device of `first`.
    `rounded` is the copy that layers compute with, and may have any dtype. Returns the length."""
    length = next(iter(tensors.values())).numel()
    for name, x in tensors.items():
        check_tensor(name, x, (length,), accumulation_dtype(first.dtype), first.device)
    if rounded is not None:
        check_tensor("rounded", rounded, (length,), rounded.dtype, first.device)
    return length


def check_max_norm(max_norm: float) -> None:
    if not max_norm > 0.0:
        raise ValueError(f"max_norm: got {max_norm!r}; accepted: a number > 0, inf for no clipping")


def check_positions(positions: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Checks the positions of packed rows: contiguous int64 of this shape, (B, T)."""
    check_tensor("positions", positions, tuple(shape), torch.int64, x.device)
    if not positions.is_contiguous():
        raise ValueError(f"positions: got strides {positions.stride()}; accepted: contiguous ones (call .contiguous())")


def check_columns(name: str, x: Tensor | None) -> None:
    """Checks that each row is contiguous. None is accepted."""
    if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name}: got strides {x.stride()}; accepted: any with the last one 1 (call .contiguous())")


def aligned_step(n: int, stride: int, itemsize: int) -> bool:
    """True if n ≤ 1, or if the bytes of the stride are a multiple of ALIGNED_BYTES and not 0."""
    return n <= 1 or stride != 0 and stride * itemsize % ALIGNED_BYTES == 0


def rows_aligned(x: Tensor) -> bool:
    """True if every row is contiguous, not broadcast, and starts at a multiple of ALIGNED_BYTES."""
    row_bytes = x.shape[-1] * x.element_size()
    if x.is_contiguous() and row_bytes % ALIGNED_BYTES == 0:
        return x.data_ptr() % ALIGNED_BYTES == 0
    axes = zip(x.shape[:-1], x.stride(), strict=False)
    return (
        x.stride(-1) == 1
        and x.data_ptr() % ALIGNED_BYTES == 0
        and all(aligned_step(n, stride, x.element_size()) for n, stride in axes)
    )
